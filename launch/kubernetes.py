#!/usr/bin/env python3
"""Runs qkattn on a Kubernetes cluster: one run as a JobSet, or the workers of a study as a Job.

  launch/kubernetes.py --name=N --image=IMAGE --accelerator=v6e-16 -- \\
      train --config=small --workdir=gs://BUCKET/small --config.mesh.data=16
  launch/kubernetes.py --name=N --image=IMAGE --accelerator=a3-2x8 --volume=CLAIM -- \\
      train --config=small --workdir=/runs/small --config.mesh.data=16
  launch/kubernetes.py --name=N --image=IMAGE --accelerator=v6e-8 --workers=4 -- \\
      ablate --config=quickstart --workdir=gs://BUCKET/quickstart

Accelerators: v6e-N, v5litepod-N (chips), v5p-N, v4-N (cores), or KIND-HOSTSxGPUS with a KIND of
a2, a2ultra, g2, a3, a3mega, a3ultra, a4 on GKE, or `gpu` for nodes of any cluster.
--dry_run prints the manifest, made from launch/kubernetes/*.yaml, and does nothing: edit it, then
`kubectl create -f`. Standard library only; needs kubectl. Exit code: 0 submitted, 2 wrong
arguments, else kubectl's.
"""

import json
import re
import string
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from arguments import (
    DRY_RUN,
    ENV,
    check_kept,
    flag,
    label,
    leave,
    need,
    read,
    require_command,
    run_program,
    switch,
    whole,
)

TEMPLATES = Path(__file__).resolve().parent / 'kubernetes'
PORT = 8476
FLAT = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
SOLID = {4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4', 128: '4x4x8', 256: '4x8x8'}
SOLID |= {512: '8x8x8', 1024: '8x8x16', 2048: '8x16x16'}
# GKE's name, how much a chip counts in the type's N, topology by chips, most chips per host.
TPUS = {
    'v4': ('tpu-v4-podslice', 2, SOLID, 4),
    'v5litepod': ('tpu-v5-lite-podslice', 1, FLAT, 8),
    'v5p': ('tpu-v5p-slice', 2, SOLID, 4),
    'v6e': ('tpu-v6e-slice', 1, FLAT, 8),
}
# GKE's name; None for any node with GPUs.
GPUS = {
    'gpu': None,
    'g2': 'nvidia-l4',
    'a2': 'nvidia-tesla-a100',
    'a2ultra': 'nvidia-a100-80gb',
    'a3': 'nvidia-h100-80gb',
    'a3mega': 'nvidia-h100-mega-80gb',
    'a3ultra': 'nvidia-h200-141gb',
    'a4': 'nvidia-b200',
}
GKE = 'cloud.google.com/gke-'
FLAGS = {
    '--name': flag('name of the JobSet or Job', label, required=True),
    '--image': flag('image built with launch/kubernetes/Dockerfile', required=True),
    '--accelerator': flag('e.g. v6e-16, a3-2x8, gpu-1x8', required=True),
    '--workers': flag('pods that share a study', whole(1)),
    '--spot': switch('on nodes that may be preempted'),
    '--volume': flag('volume claim to mount at /runs'),
    '--env': ENV,
    '--service_account': flag('account with access to the bucket', default='default'),
    '--queue': flag("Kueue's local queue"),
    '--namespace': flag("default: kubectl's"),
    '--retries': flag('restarts after a crash', whole(0), 3),
    '--grace': flag('seconds from a stop to a kill', whole(0), 300),
    '--dry_run': DRY_RUN,
}


class Machine(NamedTuple):
    """Hosts, the chips of each as a Kubernetes resource, and the labels of their nodes."""

    resource: str
    hosts: int
    chips: int
    nodes: dict[str, str]


def hardware(accelerator: str) -> Machine:
    """What --accelerator names; an unknown one ends the launcher."""
    kind, _, size = accelerator.partition('-')
    if kind in GPUS and (sizes := re.fullmatch('([1-9][0-9]*)x([1-9][0-9]*)', size)):
        name = GPUS[kind]
        nodes = {} if name is None else {f'{GKE}accelerator': name}
        return Machine('nvidia.com/gpu', int(sizes[1]), int(sizes[2]), nodes)
    if kind in TPUS:
        name, cores, topologies, most = TPUS[kind]
        totals = {str(cores * chips): chips for chips in topologies}
        if size not in totals:
            leave(f'--accelerator={accelerator} does not exist; {kind} has {", ".join(totals)}')
        total = totals[size]
        chips = total if total <= most else 4
        nodes = {f'{GKE}tpu-accelerator': name, f'{GKE}tpu-topology': topologies[total]}
        return Machine('google.com/tpu', total // chips, chips, nodes)
    valid = ', '.join([f'{kind}-N' for kind in TPUS] + [f'{kind}-HOSTSxGPUS' for kind in GPUS])
    leave(f'--accelerator={accelerator} is not known; valid: {valid}')


def quoted(value: Any) -> str:
    """A value as YAML in one line, in ASCII: JSON with YAML's escape for long code points."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub('[^ -~]', lambda match: f'\\U{ord(match[0]):08x}', text)


def literal(text: str) -> str:
    """An argument or a value in which Kubernetes expands no $(NAME)."""
    return text.replace('$', '$$')


def manifest(options: Namespace) -> str:
    """The YAML of the JobSet, or of the Job with --workers."""
    machine, workers = hardware(options.accelerator), options.workers
    on_gpus = machine.resource == 'nvidia.com/gpu'
    if workers and machine.hosts > 1:
        leave(
            f'--workers={workers} needs an accelerator of one host, not '
            f'{options.accelerator} with {machine.hosts}; submit one job per worker instead'
        )
    # Compiled programs are executed: a directory has one owner, and pods with TPUs run as root.
    programs = f'/runs/.jax-cache-{"gpu" if on_gpus else "tpu"}'
    env = [{'name': 'JAX_COMPILATION_CACHE_DIR', 'value': programs}]
    if not workers:  # nodes start and pull images at different times
        env += [{'name': 'QKATTN_CONNECT_SECONDS', 'value': '3600'}]
    if on_gpus:  # one that does not open is an error: no run goes on on the CPU
        env += [{'name': 'JAX_PLATFORMS', 'value': 'cuda,cpu'}]
    if on_gpus and not workers:
        first = f'{options.name}-train-0-0.{options.name}:{PORT}'
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        env += [
            {'name': 'JAX_COORDINATOR_ADDRESS', 'value': first},
            {'name': 'JAX_NUM_PROCESSES', 'value': str(machine.hosts)},
            {'name': 'JAX_PROCESS_ID', 'valueFrom': {'fieldRef': {'fieldPath': index}}},
        ]
    given = dict(setting.split('=', 1) for setting in options.env)
    env = [entry for entry in env if entry['name'] not in given]
    env += [{'name': name, 'value': literal(value)} for name, value in given.items()]
    claim = {'persistentVolumeClaim': {'claimName': options.volume}}
    queue = {'kueue.x-k8s.io/queue-name': options.queue} if options.queue else {}
    values = {
        'name': options.name,
        'labels': {'app': 'qkattn'} | queue,
        'retries': options.retries,
        'grace': options.grace,
        'hosts': machine.hosts,
        'chips': machine.chips,
        'workers': workers,
        'limits': {machine.resource: machine.chips},
        'user': {'runAsNonRoot': True} if on_gpus else {'runAsUser': 0},
        'service_account': options.service_account,
        'nodes': machine.nodes | ({f'{GKE}spot': 'true'} if options.spot else {}),
        'image': options.image,
        'arguments': [literal(argument) for argument in options.command],
        'env': env,
        'volume': {'name': 'runs'} | (claim if options.volume else {'emptyDir': {}}),
    }
    file = 'study' if workers else 'gpu' if on_gpus else 'tpu'
    template = string.Template((TEMPLATES / f'{file}.yaml').read_text())
    return template.substitute({name: quoted(value) for name, value in values.items()})


def main() -> int:
    options = read(__doc__, FLAGS, sys.argv[1:])
    require_command(options)
    text = manifest(options)
    check_kept(options, 'gs:// or /runs of a --volume', 'pods', *['/runs'] * bool(options.volume))
    if options.dry_run:
        print(text, end='')
        return 0
    need('kubectl', 'https://kubernetes.io/docs/tasks/tools says how')
    where = [f'--namespace={options.namespace}'] if options.namespace else []
    # `create` refuses a name that is taken, where `apply` would leave a finished job as it is.
    command = ['kubectl', 'create', *where, '-f', '-']
    return run_program(command, input=text).returncode


if __name__ == '__main__':
    sys.exit(main())

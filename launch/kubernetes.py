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
    at_least,
    check_workdir_lasts,
    exit_with,
    flag,
    label,
    read_command_line,
    require_command,
    require_program,
    run_program,
    switch,
)

TEMPLATES = Path(__file__).resolve().parent / 'kubernetes'
PORT = 8476
FLAT = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
SOLID = {4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4', 128: '4x4x8', 256: '4x8x8'}
SOLID |= {512: '8x8x8', 1024: '8x8x16', 2048: '8x16x16'}


class Tpu(NamedTuple):
    """A kind of TPU, as in --accelerator=KIND-N."""

    gke_name: str
    units_per_chip: int  # 2 if N counts cores, 1 if N counts chips
    topologies: dict[int, str]  # by number of chips
    most_chips: int  # on a single host; each host of a larger slice has 4


TPUS = {
    'v4': Tpu('tpu-v4-podslice', 2, SOLID, 4),
    'v5litepod': Tpu('tpu-v5-lite-podslice', 1, FLAT, 8),
    'v5p': Tpu('tpu-v5p-slice', 2, SOLID, 4),
    'v6e': Tpu('tpu-v6e-slice', 1, FLAT, 8),
}
# GKE's names. None allows any node with GPUs.
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
    '--workers': flag('pods that share a study', at_least(1)),
    '--spot': switch('on nodes that may be preempted'),
    '--volume': flag('volume claim to mount at /runs'),
    '--env': ENV,
    '--service_account': flag('account with access to the bucket', default='default'),
    '--queue': flag("Kueue's local queue"),
    '--namespace': flag("default: kubectl's"),
    '--retries': flag('restarts after a crash', at_least(0), 3),
    '--grace': flag('seconds from a stop to a kill', at_least(0), 300),
    '--dry_run': DRY_RUN,
}


class Machine(NamedTuple):
    """The hardware of a job, in the words of Kubernetes."""

    resource: str  # 'nvidia.com/gpu' or 'google.com/tpu'
    hosts: int
    chips: int  # per host
    nodes: dict[str, str]  # labels of the nodes


def hardware(accelerator: str) -> Machine:
    """Returns the hosts that --accelerator names; an unknown name ends the launcher.

    For example, 'a3-2x8' means 2 hosts with 8 GPUs each. 'v5p-16' means 16 cores, which are 8 chips
    on 2 hosts with 4 chips each.
    """
    kind, _, size = accelerator.partition('-')
    hosts_and_gpus = re.fullmatch('([1-9][0-9]*)x([1-9][0-9]*)', size)  # '2x8'
    if kind in GPUS and hosts_and_gpus:
        hosts = int(hosts_and_gpus[1])
        gpus = int(hosts_and_gpus[2])
        gke_name = GPUS[kind]
        nodes = {} if gke_name is None else {f'{GKE}accelerator': gke_name}
        return Machine('nvidia.com/gpu', hosts, chips=gpus, nodes=nodes)

    if kind in TPUS:
        tpu = TPUS[kind]
        # For v5p, {'8': 4, '16': 8, ...}: a size counts the two cores of each chip.
        chips_by_size = {str(tpu.units_per_chip * chips): chips for chips in tpu.topologies}
        if size not in chips_by_size:
            sizes = ', '.join(chips_by_size)
            exit_with(f'--accelerator={accelerator} does not exist; {kind} has {sizes}')
        chips = chips_by_size[size]
        chips_per_host = chips if chips <= tpu.most_chips else 4
        hosts = chips // chips_per_host
        nodes = {
            f'{GKE}tpu-accelerator': tpu.gke_name,
            f'{GKE}tpu-topology': tpu.topologies[chips],
        }
        return Machine('google.com/tpu', hosts, chips=chips_per_host, nodes=nodes)

    valid = ', '.join([f'{kind}-N' for kind in TPUS] + [f'{kind}-HOSTSxGPUS' for kind in GPUS])
    exit_with(f'--accelerator={accelerator} is not known; valid: {valid}')


def quoted(value: Any) -> str:
    """Formats a value as a line of YAML: JSON, with YAML's escapes for non-ASCII characters."""

    def escape(character: re.Match[str]) -> str:
        """Returns '\\U000000e9' for 'é'."""
        return f'\\U{ord(character[0]):08x}'

    text = json.dumps(value, ensure_ascii=False)
    return re.sub('[^ -~]', escape, text)  # from space to tilde is printable ASCII


def literal(text: str) -> str:
    """Escapes a text, so that Kubernetes does not expand $(NAME)."""
    return text.replace('$', '$$')


def environment(options: Namespace, machine: Machine, on_gpus: bool) -> list[dict[str, Any]]:
    """Returns the environment variables of a pod. Variables of --env replace the defaults."""
    # Pods with TPUs run as root. A cache must have one owner, because its programs are executed.
    cache = f'/runs/.jax-cache-{"gpu" if on_gpus else "tpu"}'
    defaults: list[dict[str, Any]] = [{'name': 'JAX_COMPILATION_CACHE_DIR', 'value': cache}]
    if not options.workers:
        # Nodes start and pull images at different times.
        defaults.append({'name': 'QKATTN_CONNECT_SECONDS', 'value': '3600'})
    if on_gpus:
        # A broken GPU is an error, so that no run falls back to the CPU.
        defaults.append({'name': 'JAX_PLATFORMS', 'value': 'cuda,cpu'})
    if on_gpus and not options.workers:
        # The pods of a JobSet find each other at the first; Kubernetes numbers them.
        first_pod = f'{options.name}-train-0-0.{options.name}:{PORT}'
        index_of_pod = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        defaults += [
            {'name': 'JAX_COORDINATOR_ADDRESS', 'value': first_pod},
            {'name': 'JAX_NUM_PROCESSES', 'value': str(machine.hosts)},
            {'name': 'JAX_PROCESS_ID', 'valueFrom': {'fieldRef': {'fieldPath': index_of_pod}}},
        ]
    value_by_name = dict(setting.split('=', 1) for setting in options.env)  # of NAME=VALUE
    variables = [variable for variable in defaults if variable['name'] not in value_by_name]
    for name, value in value_by_name.items():
        variables.append({'name': name, 'value': literal(value)})
    return variables


def manifest(options: Namespace) -> str:
    """Returns the YAML of the JobSet, or of the Job with --workers."""
    machine = hardware(options.accelerator)
    workers = options.workers
    on_gpus = machine.resource == 'nvidia.com/gpu'
    if workers and machine.hosts > 1:
        exit_with(
            f'--workers={workers} needs an accelerator of one host, not '
            f'{options.accelerator} with {machine.hosts}; submit one job per worker instead'
        )
    labels = {'app': 'qkattn'}
    if options.queue:
        labels['kueue.x-k8s.io/queue-name'] = options.queue
    nodes = dict(machine.nodes)
    if options.spot:
        nodes[f'{GKE}spot'] = 'true'
    values = {
        'name': options.name,
        'labels': labels,
        'retries': options.retries,
        'grace': options.grace,
        'hosts': machine.hosts,
        'chips': machine.chips,
        'workers': workers,
        'limits': {machine.resource: machine.chips},
        'user': {'runAsNonRoot': True} if on_gpus else {'runAsUser': 0},  # TPUs need root
        'service_account': options.service_account,
        'nodes': nodes,
        'image': options.image,
        'arguments': [literal(argument) for argument in options.command],
        'env': environment(options, machine, on_gpus),
        'volume': volume_of_runs(options),
    }
    file = 'gpu.yaml' if on_gpus else 'tpu.yaml'
    if workers:
        file = 'study.yaml'
    template = string.Template((TEMPLATES / file).read_text())
    return template.substitute({name: quoted(value) for name, value in values.items()})


def volume_of_runs(options: Namespace) -> dict[str, Any]:
    """Returns the volume that a pod mounts at /runs; without --volume, it ends with the pod."""
    if options.volume:
        return {'name': 'runs', 'persistentVolumeClaim': {'claimName': options.volume}}
    return {'name': 'runs', 'emptyDir': {}}


def main() -> int:
    options = read_command_line(__doc__, FLAGS, sys.argv[1:])
    require_command(options)
    text = manifest(options)
    check_workdir_lasts(
        options,
        storage='gs:// or /runs of a --volume',
        machines='pods',
        other_paths=['/runs/'] if options.volume else [],
    )
    if options.dry_run:
        print(text, end='')
        return 0
    require_program('kubectl', 'https://kubernetes.io/docs/tasks/tools says how')
    namespace = [f'--namespace={options.namespace}'] if options.namespace else []
    # `create` fails if the name is taken. `apply` would do nothing to a finished job.
    command = ['kubectl', 'create', *namespace, '-f', '-']
    return run_program(command, input=text).returncode


if __name__ == '__main__':
    sys.exit(main())

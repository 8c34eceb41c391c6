#!/usr/bin/env python3
"""Runs qkattn on a Kubernetes cluster: one run as a JobSet, or the workers of a study as a Job.

  launch/kubernetes.py --name=N --image=IMAGE --accelerator=v6e-16 -- \\
      train --config=small --workdir=gs://BUCKET/small
  launch/kubernetes.py --name=N --image=IMAGE --accelerator=a3-2x8 --volume=CLAIM -- \\
      train --config=small --workdir=/runs/small
  launch/kubernetes.py --name=N --image=IMAGE --accelerator=v6e-8 --workers=4 -- \\
      ablate --config=quickstart --workdir=gs://BUCKET/quickstart

Accelerators: v6e-N, v5litepod-N (chips), v5p-N, v4-N (cores), or KIND-HOSTSxGPUS with a KIND of
a2, a2ultra, g2, a3, a3mega, a3ultra, a4 on GKE, or `gpu` for nodes of any cluster.
--dry_run prints the manifest, made from launch/kubernetes/*.yaml, and does nothing: edit it, then
`kubectl create -f`. Standard library only; needs kubectl. Exit code: 0 submitted, 2 wrong
arguments, else kubectl's.
"""

import json
import math
import re
import shutil
import string
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from arguments import Parser, label, leave, require, split, variable, whole

TEMPLATES = Path(__file__).resolve().parent / 'kubernetes'
PORT = 8476
FLAT = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}
SOLID = {4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4', 128: '4x4x8', 256: '4x8x8'}
SOLID |= {512: '8x8x8', 1024: '8x8x16', 2048: '8x16x16'}
# GKE's name, cores that the number counts for a chip, topology by chips, chips of a host at most.
TPUS = {
    'v4': ('tpu-v4-podslice', 2, SOLID, 4),
    'v5litepod': ('tpu-v5-lite-podslice', 1, FLAT, 8),
    'v5p': ('tpu-v5p-slice', 2, SOLID, 4),
    'v6e': ('tpu-v6e-slice', 1, FLAT, 8),
}
# GKE's name; None: any node with GPUs.
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


def hardware(accelerator: str) -> dict[str, Any]:
    """Hosts, chips per host and node labels; an unknown accelerator ends the launcher."""
    kind, _, size = accelerator.partition('-')
    if kind in GPUS and (found := re.fullmatch('([1-9][0-9]*)x([1-9][0-9]*)', size)):
        hosts, chips = map(int, found.groups())
        nodes = {} if GPUS[kind] is None else {f'{GKE}accelerator': GPUS[kind]}
        return {'resource': 'nvidia.com/gpu', 'hosts': hosts, 'chips': chips, 'nodes': nodes}
    if kind in TPUS:
        label, cores, topologies, most = TPUS[kind]
        sizes = {str(cores * chips): chips for chips in topologies}
        if size not in sizes:
            leave(f'--accelerator={accelerator} does not exist; {kind} has {", ".join(sizes)}')
        total = sizes[size]
        chips = total if total <= most else 4
        nodes = {f'{GKE}tpu-accelerator': label, f'{GKE}tpu-topology': topologies[total]}
        return {
            'resource': 'google.com/tpu',
            'hosts': math.ceil(total / chips),
            'chips': chips,
            'nodes': nodes,
        }
    valid = ', '.join([f'{one}-N' for one in TPUS] + [f'{one}-HOSTSxGPUS' for one in GPUS])
    leave(f'--accelerator={accelerator} is not known; valid are {valid}')


def quoted(value: Any) -> str:
    """A value as YAML in one line, in ASCII: JSON with YAML's escape for long code points."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub('[^ -~]', lambda found: f'\\U{ord(found[0]):08x}', text)


def literal(text: str) -> str:
    """An argument or a value in which Kubernetes expands no $(NAME)."""
    return text.replace('$', '$$')


def manifest(options: Namespace, command: list[str]) -> str:
    """The YAML of the JobSet, or of the Job with --workers."""
    machine = hardware(options.accelerator)
    on_gpus = machine['resource'] == 'nvidia.com/gpu'
    if options.workers and machine['hosts'] > 1:
        leave(
            f'--workers={options.workers} needs an accelerator of one host, not '
            f'{options.accelerator} with {machine["hosts"]}; submit one job per worker instead'
        )
    nodes = machine['nodes'] | ({f'{GKE}spot': 'true'} if options.spot else {})
    # Programs are executed: a directory is that of one user, and pods with TPUs run as root.
    programs = f'/runs/.jax-cache-{"gpu" if on_gpus else "tpu"}'
    env = [{'name': 'JAX_COMPILATION_CACHE_DIR', 'value': programs}]
    if not options.workers:  # nodes are made, and images pulled, at different times
        env += [{'name': 'QKATTN_CONNECT_SECONDS', 'value': '3600'}]
    if on_gpus and not options.workers:
        first = f'{options.name}-train-0-0.{options.name}:{PORT}'
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        env += [
            {'name': 'JAX_COORDINATOR_ADDRESS', 'value': first},
            {'name': 'JAX_NUM_PROCESSES', 'value': str(machine['hosts'])},
            {'name': 'JAX_PROCESS_ID', 'valueFrom': {'fieldRef': {'fieldPath': index}}},
        ]
    given = dict(one.split('=', 1) for one in options.env)
    env = [one for one in env if one['name'] not in given]
    env += [{'name': name, 'value': literal(value)} for name, value in given.items()]
    claim = {'persistentVolumeClaim': {'claimName': options.volume}}
    queue = {'kueue.x-k8s.io/queue-name': options.queue} if options.queue else {}
    values = {
        'name': options.name,
        'labels': {'app': 'qkattn'} | queue,
        'retries': options.retries,
        'grace': options.grace,
        'hosts': machine['hosts'],
        'chips': machine['chips'],
        'workers': options.workers,
        'limits': {machine['resource']: machine['chips']},
        'user': {'runAsNonRoot': True} if on_gpus else {'runAsUser': 0},
        'service_account': options.service_account,
        'nodes': nodes,
        'image': options.image,
        'arguments': [literal(argument) for argument in command],
        'env': env,
        'volume': {'name': 'runs'} | (claim if options.volume else {'emptyDir': {}}),
    }
    file = 'study' if options.workers else 'gpu' if on_gpus else 'tpu'
    template = string.Template((TEMPLATES / f'{file}.yaml').read_text())
    return template.substitute({name: quoted(value) for name, value in values.items()})


def read_options(argv: list[str]) -> tuple[Namespace, list[str]]:
    """The command line, checked; a mistake ends the launcher with one sentence."""
    flags, command = split(argv)
    parser = Parser(__doc__)
    parser.add_argument('--name', type=label, required=True, help='of the JobSet or Job')
    parser.add_argument('--image', required=True, help='made with launch/kubernetes/Dockerfile')
    parser.add_argument('--accelerator', required=True, help='e.g. v6e-16, a3-2x8, gpu-1x8')
    parser.add_argument('--workers', type=whole(1), help='pods that share a study')
    parser.add_argument('--spot', action='store_true', help='on nodes that may be preempted')
    parser.add_argument('--volume', help='claim that is mounted at /runs')
    parser.add_argument('--env', type=variable, action='append', default=[], help='NAME=VALUE')
    parser.add_argument('--service_account', default='default', help='with access to the bucket')
    parser.add_argument('--queue', help="Kueue's local queue")
    parser.add_argument('--namespace', help="default: kubectl's")
    parser.add_argument('--retries', type=whole(0), default=3, help='after a crash')
    parser.add_argument('--grace', type=whole(0), default=300, help='seconds to save in')
    parser.add_argument('--dry_run', action='store_true', help='print the manifest')
    options = parser.parse_args(flags)
    require(command, options.workers)
    return options, command


def main() -> int:
    options, command = read_options(sys.argv[1:])
    text = manifest(options, command)
    if not options.volume and not any('gs://' in argument for argument in command):
        print('note: without --volume or gs://, results end with the pods', file=sys.stderr)
    if options.dry_run:
        print(text, end='')
        return 0
    if not shutil.which('kubectl'):
        leave('kubectl is not installed; https://kubernetes.io/docs/tasks/tools says how')
    where = [f'--namespace={options.namespace}'] if options.namespace else []
    # `create` refuses a name that is taken, where `apply` would leave a finished job as it is.
    return subprocess.run(
        ['kubectl', 'create', *where, '-f', '-'], input=text, text=True
    ).returncode


if __name__ == '__main__':
    sys.exit(main())

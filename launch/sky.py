#!/usr/bin/env python3
"""Submits a run, or the workers of a study, to SkyPilot as managed jobs.

  launch/sky.py --accelerators=H100:8 --nodes=2 -- train --config=small --workdir=gs://BUCKET/small
  launch/sky.py --accelerators=tpu-v6e-8 --workers=4 -- \\
      ablate --config=quickstart --workdir=gs://BUCKET/quickstart

The jobs are launch/sky/train.yaml and study.yaml with the command in their line `set --`. Spot
capacity unless --on_demand; a preempted job goes on elsewhere. --dry_run prints the YAML and the
`sky jobs launch` command and does nothing. Standard library only; needs sky. Exit code: 0
submitted, 2 wrong arguments, else sky's.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from arguments import Parser, label, leave, require, split, variable, whole

ROOT = Path(__file__).resolve().parent.parent


def quoted(argument: str) -> str:
    """An argument for bash in one line of printable ASCII."""
    if re.fullmatch('[ -~]*', argument):
        return shlex.quote(argument)
    return "$'" + ''.join(rf'\x{byte:02x}' for byte in argument.encode()) + "'"


def task(options: Namespace, command: list[str]) -> str:
    """The YAML of the job."""
    text = (ROOT / 'launch/sky' / f'{"study" if options.workers else "train"}.yaml').read_text()
    line = f'  set -- {" ".join(map(quoted, command))}'
    filled, count = re.subn('^  set -- .*$', lambda _: line, text, flags=re.M)
    if count != 1:
        leave('the YAML in launch/sky has no line `set --`, or several; restore it')
    return filled


def submissions(options: Namespace, path: str) -> list[list[str]]:
    """One `sky jobs launch` per job."""
    flags = ['--detach-run', '--yes', '--gpus', options.accelerators]
    flags += ['--no-use-spot'] if options.on_demand else ['--use-spot']
    flags += ['--infra', options.infra] if options.infra else []
    flags += ['--num-nodes', str(options.nodes)] if not options.workers else []
    extras = 'tpu,gcs' if options.accelerators.startswith('tpu') else 'cuda,gcs'
    given = [f'EXTRAS={extras}', f'RETRIES={options.retries}', *options.env]
    flags += [word for one in given for word in ('--env', one)]
    names = [f'{options.name}-{k}' for k in range(options.workers or 0)] or [options.name]
    return [['sky', 'jobs', 'launch', '--name', name, *flags, path] for name in names]


def read_options(argv: list[str]) -> tuple[Namespace, list[str]]:
    """The command line, checked; a mistake ends the launcher with one sentence."""
    flags, command = split(argv)
    parser = Parser(__doc__)
    parser.add_argument('--accelerators', required=True, help='e.g. H100:8, tpu-v6e-16')
    parser.add_argument('--name', type=label, default='qkattn', help='of the job or jobs')
    parser.add_argument('--nodes', type=whole(1), default=1, help='hosts with GPUs (1)')
    parser.add_argument('--workers', type=whole(1), help='jobs that share a study')
    parser.add_argument('--infra', help='where, e.g. gcp/us-east5; default: the cheapest')
    parser.add_argument('--on_demand', action='store_true', help='capacity that is not preempted')
    parser.add_argument('--env', type=variable, action='append', default=[], help='NAME=VALUE')
    parser.add_argument('--retries', type=whole(0), default=3, help='after a crash (3)')
    parser.add_argument('--dry_run', action='store_true', help='print, do nothing')
    options = parser.parse_args(flags)
    require(command, options.workers)
    if not re.fullmatch(r'[A-Za-z0-9-]+(:[1-9][0-9]*)?', options.accelerators):
        leave(f'--accelerators={options.accelerators} is not NAME or NAME:COUNT, e.g. H100:8')
    if options.workers and options.nodes > 1:
        leave(f'--workers={options.workers} excludes --nodes={options.nodes}: a worker is one host')
    if not any('gs://' in argument for argument in command):
        print('note: without a gs:// directory, results end with the hosts', file=sys.stderr)
    return options, command


def main() -> int:
    options, command = read_options(sys.argv[1:])
    text = task(options, command)
    if options.dry_run:
        print(text)
        print('\n'.join(map(shlex.join, submissions(options, 'job.yaml'))))
        return 0
    if not shutil.which('sky'):
        leave("sky is not installed; pip install 'skypilot[gcp]' in an environment of its own")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'job.yaml')
        path.write_text(text)
        for one in submissions(options, str(path)):
            code = subprocess.run(one, cwd=ROOT).returncode  # `workdir: .` is the repository
            if code:
                return code
    return 0


if __name__ == '__main__':
    sys.exit(main())

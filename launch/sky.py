#!/usr/bin/env python3
"""Submits a run, or the workers of a study, to SkyPilot as managed jobs.

  launch/sky.py --accelerators=H100:8 --nodes=2 -- \\
      train --config=small --workdir=gs://BUCKET/small --config.mesh.data=16
  launch/sky.py --accelerators=tpu-v6e-8 --workers=4 -- \\
      ablate --config=quickstart --workdir=gs://BUCKET/quickstart

The jobs are launch/sky/train.yaml and study.yaml with the command in their line `set --`. Spot
capacity unless --on_demand; a preempted job goes on elsewhere. --dry_run prints the YAML and the
`sky jobs launch` command and does nothing. Standard library only; needs sky. Exit code: 0
submitted, 2 wrong arguments, else sky's.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from arguments import (
    DRY_RUN,
    ENV,
    WORKERS,
    at_least,
    check_workdir_lasts,
    exit_with,
    flag,
    label,
    read_command_line,
    require_command,
    require_program,
    switch,
)

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {
    '--accelerators': flag('e.g. H100:8, tpu-v6e-16', required=True),
    '--name': flag('name of the job or jobs', label, 'qkattn'),
    '--nodes': flag('hosts with GPUs (1)', at_least(1), 1),
    '--workers': WORKERS,
    '--infra': flag('where, e.g. gcp/us-east5; default: the cheapest'),
    '--on_demand': switch('capacity that is not preempted'),
    '--env': ENV,
    '--retries': flag('restarts after a crash (3)', at_least(0), 3),
    '--dry_run': DRY_RUN,
}


def quoted(argument: str) -> str:
    """Quotes an argument for bash, in one line of printable ASCII."""
    is_printable_ascii = re.fullmatch('[ -~]*', argument)
    if is_printable_ascii:
        return shlex.quote(argument)
    # Bash reads $'\xc3\xa9' as 'é'.
    escaped_bytes = ''.join(rf'\x{byte:02x}' for byte in argument.encode())
    return f"$'{escaped_bytes}'"


def task(options: Namespace) -> str:
    """Returns the YAML of the jobs, with the command in its line `set --`."""
    file = 'study.yaml' if options.workers else 'train.yaml'
    template = (ROOT / 'launch/sky' / file).read_text()
    command = ' '.join(quoted(argument) for argument in options.command)
    line = f'  set -- {command}'
    # A function as replacement keeps the backslashes of the line.
    text, num_replaced = re.subn('^  set -- .*$', lambda _: line, template, flags=re.M)
    if num_replaced != 1:
        exit_with('the YAML in launch/sky has no line `set --`, or several; restore it')
    return text


def submissions(options: Namespace, path: str) -> list[list[str]]:
    """Returns a `sky jobs launch` command for the run or each worker. `path` is the YAML file."""
    flags = ['--detach-run', '--yes', '--gpus', options.accelerators]
    flags.append('--no-use-spot' if options.on_demand else '--use-spot')
    if options.infra:
        flags += ['--infra', options.infra]
    if not options.workers:
        flags += ['--num-nodes', str(options.nodes)]
    is_tpu = options.accelerators.lower().startswith('tpu')  # SkyPilot also takes TPU-V6E-8
    extras = 'tpu,gcs' if is_tpu else 'cuda,gcs'
    for variable in (f'EXTRAS={extras}', f'RETRIES={options.retries}', *options.env):
        flags += ['--env', variable]

    names = [options.name]
    if options.workers:
        names = [f'{options.name}-{worker}' for worker in range(options.workers)]
    return [['sky', 'jobs', 'launch', '--name', name, *flags, path] for name in names]


def main() -> int:
    options = read_command_line(__doc__, FLAGS, sys.argv[1:])
    require_command(options)
    if not re.fullmatch(r'[A-Za-z0-9-]+(:[1-9][0-9]*)?', options.accelerators):
        exit_with(f'--accelerators={options.accelerators} is not NAME or NAME:COUNT, e.g. H100:8')
    if options.workers and options.nodes > 1:
        exit_with(
            f'--workers={options.workers} excludes --nodes={options.nodes}: a worker is one host'
        )
    check_workdir_lasts(options, storage='a gs:// directory', machines='hosts')
    text = task(options)
    if options.dry_run:
        print(text)
        for submission in submissions(options, 'job.yaml'):
            print(shlex.join(submission))
        return 0
    require_program('sky', "pip install 'skypilot[gcp]' in an environment of its own")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'job.yaml')
        path.write_text(text, encoding='utf-8')
        for submission in submissions(options, str(path)):
            # `workdir: .` in the YAML must be the repository.
            code = subprocess.run(submission, cwd=ROOT).returncode
            if code:
                return code
    return 0


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""Submits a training job, or the workers of a study, to Slurm.

  launch/slurm.py --nodes=2 --gpus_per_node=8 --time=1-0 -- train --config=NAME --workdir=DIRECTORY
  launch/slurm.py --workers=8 --gpus_per_node=1 -- ablate --config=NAME --workdir=DIRECTORY

The job is launch/slurm.sbatch, which resumes after a preemption, at its time limit, and after a
bounded number of crashes. The virtual environment, QKATTN_VENV (.venv in the repository), and the
directory have to be on a file system that all nodes share. The environment travels with the job.
--dry_run prints the command and the script, and does nothing. Standard library only; needs sbatch.
Exit code: 0 submitted, 2 wrong arguments, else sbatch's.
"""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from arguments import Parser, leave, require, split, whole

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / 'launch/slurm.sbatch'
# Options of sbatch that are passed on, with a value.
PASSED = 'account begin chdir constraint cpus_per_task dependency exclude gpus_per_node gres'
PASSED += ' job_name mail_type mail_user mem nodelist output partition qos reservation time'


def parser() -> Parser:
    """The launcher's own flags."""
    result = Parser(__doc__)
    result.add_argument('--nodes', type=whole(1), default=1, help='nodes of a job (1)')
    result.add_argument(
        '--processes_per_node', type=whole(1), default=1, help='processes that share its GPUs (1)'
    )
    result.add_argument('--workers', type=whole(1), help='an array of jobs that share a study')
    result.add_argument(
        '--retries', type=whole(0), default=3, help='how often a crashed job is requeued (3)'
    )
    result.add_argument('--dry_run', action='store_true', help='print what would be submitted')
    result.add_argument('--exclusive', action='store_true', help='share no node with other jobs')
    for name in PASSED.split():
        result.add_argument(f'--{name}', metavar='VALUE', help='as sbatch has it')
    return result


def submission(options: argparse.Namespace, command: list[str]) -> list[str]:
    """The sbatch command line."""
    flags = [f'--nodes={options.nodes}', f'--ntasks-per-node={options.processes_per_node}']
    flags += [f'--array=1-{options.workers}'] if options.workers else []
    flags += ['--exclusive'] if options.exclusive else []
    given = {name: getattr(options, name) for name in PASSED.split()}
    flags += [f'--{n.replace("_", "-")}={v}' for n, v in given.items() if v is not None]
    return ['sbatch', *flags, str(SCRIPT), *command]


def main() -> None:
    flags, command = split(sys.argv[1:])
    options = parser().parse_args(flags)
    require(command, options.workers)
    venv = Path(os.environ.get('QKATTN_VENV') or ROOT / '.venv').absolute()
    variables = {'QKATTN_VENV': str(venv), 'QKATTN_RETRIES': str(options.retries)}
    submit = submission(options, command)
    if options.dry_run:
        print(shlex.join(['env', *(f'{n}={v}' for n, v in variables.items()), *submit]))
        print(f'\n# {SCRIPT}\n{SCRIPT.read_text()}', end='')
        return
    if not (venv / 'bin/python').exists():
        leave(f'{venv} has no bin/python; run launch/venv.sh or set QKATTN_VENV')
    if shutil.which('sbatch') is None:
        leave('sbatch is not installed; run this where jobs are submitted, or with --dry_run')
    os.execvpe('sbatch', submit, {**os.environ, **variables})


if __name__ == '__main__':
    main()

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

import os
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from arguments import (
    DRY_RUN,
    WORKERS,
    at_least,
    exit_with,
    flag,
    read_command_line,
    require_command,
    require_program,
    switch,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / 'launch/slurm.sbatch'
# Options of sbatch that are passed on, with a value.
SBATCH_OPTIONS = (
    'account',
    'begin',
    'chdir',
    'constraint',
    'cpus_per_task',
    'dependency',
    'exclude',
    'gpus_per_node',
    'gres',
    'job_name',
    'mail_type',
    'mail_user',
    'mem',
    'nodelist',
    'output',
    'partition',
    'qos',
    'reservation',
    'time',
)
FLAGS = {
    '--nodes': flag('nodes of a job (1)', at_least(1), 1),
    '--processes_per_node': flag('processes that share its GPUs (1)', at_least(1), 1),
    '--workers': WORKERS,
    '--retries': flag('how often a crashed job is requeued (3)', at_least(0), 3),
    '--dry_run': DRY_RUN,
    '--exclusive': switch('share no node with other jobs'),
    **{f'--{name}': flag('passed to sbatch', metavar='VALUE') for name in SBATCH_OPTIONS},
}


def submission(options: Namespace) -> list[str]:
    """Returns the sbatch command of the job, or of an array with a job for each worker."""
    command = [
        'sbatch',
        f'--nodes={options.nodes}',
        f'--ntasks-per-node={options.processes_per_node}',
    ]
    if options.workers:
        command.append(f'--array=1-{options.workers}')
    if options.exclusive:
        command.append('--exclusive')
    for name in SBATCH_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            command.append(f'--{name.replace("_", "-")}={value}')
    return [*command, str(SCRIPT), *options.command]


def main() -> None:
    options = read_command_line(__doc__, FLAGS, sys.argv[1:])
    require_command(options)
    venv = Path(os.environ.get('QKATTN_VENV') or ROOT / '.venv').expanduser().absolute()
    variables = {'QKATTN_VENV': str(venv), 'QKATTN_RETRIES': str(options.retries)}
    command = submission(options)
    if options.dry_run:
        settings = [f'{name}={value}' for name, value in variables.items()]
        print(shlex.join(['env', *settings, *command]))
        print(f'\n# {SCRIPT}\n{SCRIPT.read_text()}', end='')
        return
    if not (venv / 'bin/python').exists():
        exit_with(f'{venv} has no bin/python; run launch/venv.sh or set QKATTN_VENV')
    require_program('sbatch', 'run this where jobs are submitted, or with --dry_run')
    os.execvpe('sbatch', command, {**os.environ, **variables})


if __name__ == '__main__':
    main()

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
from pathlib import Path

from arguments import DRY_RUN, WORKERS, flag, leave, need, read, require_command, switch, whole

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / 'launch/slurm.sbatch'
# Options of sbatch that are passed on, with a value.
PASSED = 'account begin chdir constraint cpus_per_task dependency exclude gpus_per_node gres'
PASSED += ' job_name mail_type mail_user mem nodelist output partition qos reservation time'
FLAGS = {
    '--nodes': flag('nodes of a job (1)', whole(1), 1),
    '--processes_per_node': flag('processes that share its GPUs (1)', whole(1), 1),
    '--workers': WORKERS,
    '--retries': flag('how often a crashed job is requeued (3)', whole(0), 3),
    '--dry_run': DRY_RUN,
    '--exclusive': switch('share no node with other jobs'),
    **{f'--{name}': flag('passed to sbatch', metavar='VALUE') for name in PASSED.split()},
}


def main() -> None:
    options = read(__doc__, FLAGS, sys.argv[1:])
    require_command(options)
    venv = Path(os.environ.get('QKATTN_VENV') or ROOT / '.venv').expanduser().absolute()
    variables = {'QKATTN_VENV': str(venv), 'QKATTN_RETRIES': str(options.retries)}
    submit = ['sbatch', f'--nodes={options.nodes}']
    submit += [f'--ntasks-per-node={options.processes_per_node}']
    submit += [f'--array=1-{options.workers}'] if options.workers else []
    submit += ['--exclusive'] if options.exclusive else []
    passed = {name: getattr(options, name) for name in PASSED.split()}
    submit += [f'--{n.replace("_", "-")}={v}' for n, v in passed.items() if v is not None]
    submit += [str(SCRIPT), *options.command]
    if options.dry_run:
        print(shlex.join(['env', *(f'{n}={v}' for n, v in variables.items()), *submit]))
        print(f'\n# {SCRIPT}\n{SCRIPT.read_text()}', end='')
        return
    if not (venv / 'bin/python').exists():
        leave(f'{venv} has no bin/python; run launch/venv.sh or set QKATTN_VENV')
    need('sbatch', 'run this where jobs are submitted, or with --dry_run')
    os.execvpe('sbatch', submit, {**os.environ, **variables})


if __name__ == '__main__':
    main()

"""launch/slurm.py: command lines. launch/slurm.sbatch: what a job does as its processes end.

Stand-ins take the places of srun, squeue and scontrol.
"""

import shlex
import subprocess
import sys

import pytest

from tests.launch import launchers
from tests.launch.launchers import AWKWARD, ROOT, TRAIN, dry_run, stand_in

RUN_FLAGS = ('--nodes=2', '--gpus_per_node=8', '--processes_per_node=4', '--job_name=a b')
RUN_OPTIONS = ['--nodes=2', '--ntasks-per-node=4', '--gpus-per-node=8', '--job-name=a b']
STUDY_OPTIONS = ['--nodes=1', '--ntasks-per-node=1', '--array=1-8']
# As srun --kill-on-bad-exit=1: a failure ends the other process; the largest exit code is its own.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time

def task(rank):
    env = {{'SLURM_PROCID': str(rank), 'SLURMD_NODENAME': f'node{{rank}}'}}
    env = {{**os.environ, **env, 'JAX_PROCESS_ID': str(rank)}}
    return subprocess.Popen(sys.argv[3:], env=env, start_new_session=True)

assert sys.argv[1:3] == ['--kill-on-bad-exit=1', '--label']
running, codes = {{one.pid for one in map(task, range(2))}}, []
while running:
    pid, status = os.wait()
    running.discard(pid)
    codes.append(os.waitstatus_to_exitcode(status))
    while open(os.environ['HOME'] + '/starts').read().count('\\n') < 2:
        time.sleep(0.01)
    for other in running if codes[-1] else ():
        os.killpg(other, signal.SIGTERM)
sys.exit(max(codes))
"""
SQUEUE = '#!/bin/sh\n[ "$5" = %T ] && echo $STATE || echo $COMMENT\n'
SCONTROL = '#!/bin/sh\necho "$@" >>$HOME/calls; [ "$1 $COMMENT" != "update (null)" ]\n'


@pytest.mark.parametrize(
    ('flags', 'command', 'retries', 'options'),
    [
        (RUN_FLAGS, (*TRAIN, *AWKWARD), 3, RUN_OPTIONS),
        (('--workers=8', '--retries=0'), ('ablate', '--workdir', 'runs/s'), 0, STUDY_OPTIONS),
    ],
)
def test_a_dry_run_prints_the_command_and_the_script(flags, command, retries, options):
    text = dry_run('slurm', *flags, command=command, QKATTN_VENV='/a v')
    line, script = text.split('\n\n# ')[0], ROOT / 'launch/slurm.sbatch'
    assert text[len(line) + 4 :] == f'{script}\n{script.read_text()}'
    variables = ['env', 'QKATTN_VENV=/a v', f'QKATTN_RETRIES={retries}']
    assert shlex.split(line) == [*variables, 'sbatch', *options, str(script), *command]


ARRAY = {'SLURM_ARRAY_JOB_ID': '7', 'SLURM_ARRAY_TASK_ID': '2'}
AGAIN = 'stopped with a checkpoint'


@pytest.mark.parametrize(
    ('plan', 'variables', 'code', 'words', 'calls'),
    [
        ('0 0', {}, 0, 'is done', []),
        ('75 saves', {}, 75, f'{AGAIN} and is requeued', ['requeue 9']),
        ('75 saves', {'STATE': 'COMPLETING'}, 75, f'{AGAIN} and was cancelled', []),
        ('75 saves', ARRAY, 75, f'job 7_2 {AGAIN} and is requeued', ['requeue 7_2']),
        ('saves 1', {}, 1, 'crashed (1 of at most 2 times)', ['Comment=crashes=1', 'requeue 9']),
        ('1 saves', {'COMMENT': 'crashes=1'}, 1, 'crashed 2 times', ['Comment=crashes=2']),
        # A site where jobs cannot write their comments: all restarts count.
        ('1 0', {'COMMENT': '(null)', 'SLURM_RESTART_COUNT': '1'}, 1, 'crashed 2 times', ['Comm']),
        ('saves 2', {}, 2, 'has a wrong setting or directory and is not requeued', []),
    ],
)
def test_a_job_is_requeued_by_the_exit_codes_of_its_processes(
    plan, variables, code, words, calls, tmp_path
):
    (tmp_path / 'plan').write_text(plan)
    for name, text in (('srun', SRUN), ('squeue', SQUEUE), ('scontrol', SCONTROL)):
        stand_in(tmp_path / 'bin' / name, text)
    stand_in(tmp_path / 'venv/bin/python', launchers.PROGRAM)
    job = {'SLURM_JOB_ID': '9', 'SLURM_JOB_NODELIST': 'node[0-1]', 'HOME': str(tmp_path)}
    job |= {'QKATTN_VENV': f'{tmp_path}/venv', 'QKATTN_RETRIES': '1'}
    job |= {'STATE': 'RUNNING', 'COMMENT': '', **variables}
    env = launchers.before_path(tmp_path / 'bin') | job
    command = ['bash', ROOT / 'launch/slurm.sbatch', *TRAIN, *AWKWARD]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    made = (tmp_path / 'calls').read_text().splitlines() if calls else []
    assert (tmp_path / 'calls').exists() == bool(calls) and len(made) == len(calls)
    assert all(part in call for part, call in zip(calls, made, strict=True))
    both = launchers.starts(tmp_path)
    assert [start['arguments'] for start in both] == [['-m', 'qkattn', *TRAIN, *AWKWARD]] * 2
    assert {start['env']['JAX_COORDINATOR_PORT'] for start in both} == {'20009'}

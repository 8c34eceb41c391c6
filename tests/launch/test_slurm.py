"""launch/slurm.py, and launch/slurm.sbatch with stand-ins for srun, squeue and scontrol."""

import os
import shlex
import subprocess

import pytest

from tests.launch.launchers import AWKWARD, LAUNCH, PROGRAM, dry_run, stand_in, starts

TRAIN = ('train', '--config=small', '--workdir=runs/small')
RUN_FLAGS = ('--nodes=2', '--gpus_per_node=8', '--processes_per_node=4', '--job_name=a b')
RUN_OPTIONS = ['--nodes=2', '--ntasks-per-node=4', '--gpus-per-node=8', '--job-name=a b']
STUDY_OPTIONS = ['--nodes=1', '--ntasks-per-node=1', '--array=1-8']


@pytest.mark.parametrize(
    ('flags', 'command', 'retries', 'options'),
    [
        (RUN_FLAGS, (*TRAIN, *AWKWARD), 3, RUN_OPTIONS),
        (('--workers=8', '--retries=0'), ('ablate', '--workdir', 'runs/s'), 0, STUDY_OPTIONS),
    ],
)
def test_a_dry_run_prints_the_command_and_the_script(flags, command, retries, options):
    text = dry_run('slurm', *flags, command=command, QKATTN_VENV='/a v')
    line, script = text.split('\n\n# ')[0], LAUNCH / 'slurm.sbatch'
    assert text[len(line) + 4 :] == f'{script}\n{script.read_text()}'
    variables = ['env', 'QKATTN_VENV=/a v', f'QKATTN_RETRIES={retries}']
    assert shlex.split(line) == [*variables, 'sbatch', *options, str(script), *command]


# Two tasks, of which the first that fails ends the other; the largest exit code.
SRUN = """#!/usr/bin/env bash
[[ "$1 $2" == '--kill-on-bad-exit=1 --label' ]] || exit 9
shift 2
for rank in 0 1; do
  JAX_PROCESS_ID=$rank SLURM_PROCID=$rank SLURMD_NODENAME=node$rank setsid "$@" & pids+=($!)
done
largest=0
for _ in 0 1; do
  code=0
  wait -n || code=$?
  ((code == 0)) || kill -TERM "${pids[@]/#/-}" 2>/dev/null
  ((code <= largest)) || largest=$code
done
exit $largest
"""
# The state of the job, or its comment, which scontrol sets.
SQUEUE = """#!/usr/bin/env bash
case "$*" in *%T) echo "$STATE" ;; *%k) cat "$HOME/comment" 2>/dev/null || echo "(null)" ;; esac
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >>"$HOME/calls"
if [[ $1 == update ]]; then echo "${3#Comment=}" >"$HOME/comment"; fi
"""


@pytest.fixture
def job(tmp_path):
    """job('saves 75-late', NAME='value', ...) -> exit code, log, what scontrol was asked to do."""
    for name, text in {'srun': SRUN, 'squeue': SQUEUE, 'scontrol': SCONTROL}.items():
        stand_in(tmp_path / 'bin' / name, text)
    stand_in(tmp_path / 'venv/bin/python', PROGRAM)

    def run(plan: str, **variables: str) -> tuple[int, str, list[str]]:
        (tmp_path / 'plan').write_text(plan)
        for name in ('calls', 'starts'):
            (tmp_path / name).write_text('')
        env = {'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'HOME': str(tmp_path)}
        env |= {'QKATTN_VENV': f'{tmp_path}/venv', 'STATE': 'RUNNING', 'SLURM_JOB_ID': '70007'}
        env |= {'SLURM_JOB_NODELIST': 'node[0-1]', **variables}
        command = ['bash', LAUNCH / 'slurm.sbatch', *TRAIN, *AWKWARD]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stderr, (tmp_path / 'calls').read_text().splitlines()

    return run


def test_every_process_gets_the_arguments_unchanged_and_a_job_has_a_port(job, tmp_path):
    code, log, calls = job('0 0', SLURM_CPUS_PER_TASK='4')
    assert (code, calls) == (0, []) and 'slurm: job 70007 is done' in log
    for start in starts(tmp_path):
        assert start['arguments'] == ['-m', 'qkattn', *TRAIN, *AWKWARD]
        assert start['env']['JAX_COORDINATOR_PORT'] == str(20000 + 70007 % 12000)
        assert start['env']['SRUN_CPUS_PER_TASK'] == '4'
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize(
    ('plan', 'variables', 'code', 'words', 'requeued'),
    [
        ('saves 75-late', {}, 75, 'stopped with a checkpoint and is requeued', True),
        (
            'saves 75-late',
            {'STATE': 'COMPLETING'},
            75,
            'and was cancelled or ended by Slurm',
            False,
        ),
        ('saves 2-late', {}, 2, 'has a wrong setting or directory and is not requeued', False),
        ('saves 1-late', {}, 1, 'process 1 on node1 ended with exit code 1', True),
        (
            'saves 139-late',
            {'QKATTN_RETRIES': '0'},
            1,
            'crashed 1 times and is not requeued',
            False,
        ),
    ],
)
def test_what_comes_back(job, plan, variables, code, words, requeued):
    ended, log, calls = job(plan, **variables)
    assert ended == code and words in log, log
    assert ('requeue 70007' in calls) == requeued


def test_crashes_alone_are_counted_and_a_worker_requeues_itself_alone(job):
    worker = {'SLURM_ARRAY_JOB_ID': '7', 'SLURM_ARRAY_TASK_ID': '2', 'QKATTN_RETRIES': '1'}
    job('saves 75-late', SLURM_RESTART_COUNT='0', **worker)
    code, log, calls = job('1 0', SLURM_RESTART_COUNT='1', **worker)
    assert calls == ['update JobId=7_2 Comment=crashes=1', 'requeue 7_2']
    assert code == 1 and 'job 7_2 crashed (1 of at most 2 times) and is requeued' in log
    code, log, calls = job('1 0', SLURM_RESTART_COUNT='2', **worker)
    assert calls == ['update JobId=7_2 Comment=crashes=2'] and 'crashed 2 times and is not' in log

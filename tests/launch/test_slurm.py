"""launch/slurm.py and launch/slurm.sbatch: command lines, and jobs of a real Slurm on loopback.

Its jobs run stand-ins for qkattn; one trains. They mostly wait: .ci/run has other tests meanwhile.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.launch import launchers, slurm
from tests.launch.launchers import AWKWARD, dry_run
from tests.launch.slurm import Jobs
from tests.processes import ROOT
from tests.runs import assert_same_run

TRAIN = ('--', 'train', '--config=small', '--workdir=runs/small')


@pytest.mark.parametrize(
    ('flags', 'command', 'retries', 'sbatch_options'),
    [
        pytest.param(
            ('--nodes=2', '--gpus_per_node=8', '--processes_per_node=4', '--job_name=a b'),
            ('train', '--config=small', '--workdir=runs/small', *AWKWARD),
            3,  # the default
            ['--nodes=2', '--ntasks-per-node=4', '--gpus-per-node=8', '--job-name=a b'],
            id='a run',
        ),
        pytest.param(
            ('--workers=8', '--retries=0'),
            ('ablate', '--workdir', 'runs/s'),
            0,
            ['--nodes=1', '--ntasks-per-node=1', '--array=1-8'],
            id='the workers of a study',
        ),
    ],
)
def test_a_dry_run_prints_what_would_be_submitted(flags, command, retries, sbatch_options):
    """A dry run prints the command of sbatch, an empty line, and the script with its path.

    The script runs `python -m qkattn COMMAND`, with the Python of QKATTN_VENV.
    """
    text = dry_run('slurm', *flags, command=command, QKATTN_VENV='/a v')

    script = ROOT / 'launch/slurm.sbatch'
    sbatch_line, _, commented_script = text.partition('\n\n# ')
    assert commented_script == f'{script}\n{script.read_text()}'
    assert shlex.split(sbatch_line) == [
        'env',
        'QKATTN_VENV=/a v',
        f'QKATTN_RETRIES={retries}',
        'sbatch',
        *sbatch_options,
        str(script),
        *command,
    ]


def test_a_crash_is_retried_if_the_controller_does_not_answer(tmp_path):
    """The script of a job asks Slurm how often the job has crashed, and allows 3 retries.

    If Slurm does not answer, the script counts each restart, here 1, as a crash.
    """
    # Stand-ins for programs of Slurm: srun crashes, and squeue gives no answer.
    launchers.write_program(tmp_path / 'srun', '#!/bin/sh\nexit 200\n')
    launchers.write_program(tmp_path / 'squeue', '#!/bin/sh\nexit 1\n')
    # scontrol prints its arguments.
    launchers.write_program(tmp_path / 'scontrol', '#!/bin/sh\necho $*\n')
    environment = launchers.environment_with(tmp_path) | {
        'SLURM_JOB_ID': '7',
        'SLURM_JOB_NODELIST': 'a',
        'SLURM_RESTART_COUNT': '1',
        'SLURM_SUBMIT_DIR': str(tmp_path),
    }

    finished = subprocess.run(
        ['bash', ROOT / 'launch/slurm.sbatch', 'train'],
        env=environment,
        capture_output=True,
        text=True,
    )

    # This is the second of at most 4 crashes, so the job is requeued.
    assert finished.returncode == 1
    assert finished.stdout == 'update JobId=7 Comment=crashes=2\nrequeue 7\n'


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    """A private Slurm of two nodes."""
    missing = [name for name, path in slurm.PROGRAMS.items() if path is None]
    if missing:
        pytest.skip(f'{", ".join(missing)} are missing (Debian: slurmctld slurmd slurm-client)')
    with slurm.running_cluster(tmp_path_factory.mktemp('slurm') / 'cluster') as cluster:
        yield cluster


@pytest.fixture
def stand_in_jobs(cluster, tmp_path):
    """Jobs whose processes run a shell script instead of qkattn. `submit` writes the script."""
    program = tmp_path / 'venv/bin/python'
    launchers.write_program(program, '#!/usr/bin/env bash\nshift 2\n. ./stand_in.sh\n')
    return Jobs(cluster, tmp_path, tmp_path / 'venv')


def submit(jobs: Jobs, script: str, *arguments: object) -> str:
    """Submits a job whose processes run a shell script instead of qkattn.

    In the script, "$@" are the arguments of qkattn, and SLURM_PROCID is the rank.

    Returns:
        The number of the job.
    """
    (jobs.directory / 'stand_in.sh').write_text(script)
    return jobs.submit(*arguments)


# Like training, a process ends with 75 on SIGTERM. Here, it waits for at most 60 s.
SAVE_ON_SIGTERM = """
trap 'exit 75' TERM
touch started-$SLURM_PROCID-${SLURM_RESTART_COUNT:-0}
for _ in {1..600}; do sleep .1; done
"""


def wait_until_started(jobs: Jobs, job: str, restart: int = 0, num_processes: int = 2) -> None:
    """Waits until all processes of SAVE_ON_SIGTERM have begun, after a number of restarts."""
    files = [jobs.directory / f'started-{rank}-{restart}' for rank in range(num_processes)]
    jobs.cluster.wait(job, lambda fields: all(file.exists() for file in files))


@pytest.mark.slow
def test_every_process_gets_the_arguments_unchanged(stand_in_jobs):
    """The two processes of a job get its arguments, and a port that only this job uses.

    Instead of qkattn, the processes of both jobs run a shell script.
    """
    # Each process writes its arguments and its port to the file JOB-RANK, a NUL after each.
    script = 'printf "%s\\0" "$@" $JAX_COORDINATOR_PORT >$SLURM_JOB_ID-$SLURM_PROCID'
    arguments = ('train', '--config=small', '--workdir=runs/small', *AWKWARD)
    jobs = [submit(stand_in_jobs, script, '--nodes=2', '--', *arguments) for _ in range(2)]

    processes_per_port = Counter()
    for job in jobs:
        stand_in_jobs.log_after(job, 'COMPLETED', '0:0', restarts=0)
        for rank in range(2):
            text = (stand_in_jobs.directory / f'{job}-{rank}').read_text()
            # The last part of the split, after the last NUL, is empty.
            *arguments_of_process, port, _ = text.split('\0')
            assert arguments_of_process == list(arguments)
            processes_per_port[int(port)] += 1

    assert list(processes_per_port.values()) == [2, 2], 'one port per job'
    # Ports below 1024 are reserved, and Linux gives ports from 32768 on to clients.
    assert min(processes_per_port) > 1024
    assert max(processes_per_port) < 32768


def script_that_fails(rank: int, exit_code: int) -> str:
    """A script for two processes: the process `rank` ends with `exit_code`, and the other with 75.

    When the process `rank` fails, Slurm sends SIGTERM to the other process. That process runs
    SAVE_ON_SIGTERM, which writes the file 'started-RANK-RESTART' once it handles SIGTERM. The
    failure waits for this file, because an earlier SIGTERM would kill the process.
    """
    other_rank = 1 - rank
    return f"""
    if [[ $SLURM_PROCID = {rank} ]]; then
        until [[ -e started-{other_rank}-${{SLURM_RESTART_COUNT:-0}} ]]; do sleep .1; done
        exit {exit_code}
    fi
    {SAVE_ON_SIGTERM}
    """


@pytest.mark.slow
def test_a_crash_is_retried(stand_in_jobs):
    """Process 1 crashes at both starts, and one retry is allowed."""
    script = script_that_fails(rank=1, exit_code=1)

    job = submit(stand_in_jobs, script, '--nodes=2', '--retries=1', *TRAIN)

    log = stand_in_jobs.log_after(job, 'FAILED', '1:0', restarts=1)
    # Process 1 runs on the second node, 127.0.0.2.
    assert log.count('process 1 on 127.0.0.2 ended with exit code 1\n') == 2
    assert log.count(f'job {job} crashed (1 of at most 2 times) and is requeued') == 1
    assert f'job {job} crashed 2 times and is not requeued' in log


@pytest.mark.slow
def test_a_wrong_setting_is_not_retried(stand_in_jobs):
    # Exit code 2 means a wrong setting.
    script = script_that_fails(rank=0, exit_code=2)

    job = submit(stand_in_jobs, script, '--nodes=2', '--retries=1', *TRAIN)

    log = stand_in_jobs.log_after(job, 'FAILED', '2:0', restarts=0)
    assert 'process 1 on 127.0.0.2 ended with exit code 1\n' not in log
    assert f'job {job} crashed (1 of at most 2 times) and is requeued' not in log
    assert f'job {job} has a wrong setting or directory and is not requeued' in log


@pytest.mark.slow
def test_a_job_that_is_stopped_preempted_or_crashes_is_requeued(stand_in_jobs):
    """A job of two processes has four starts.

    The processes run a shell script instead of qkattn. SLURM_RESTART_COUNT is empty at the first
    start.

        start  SLURM_RESTART_COUNT  what ends it                          exit code
        1                           SIGTERM, as before a time limit       75, requeued
        2      1                    SIGTERM, as another job preempts it   75, requeued
        3      2                    a crash, of which one is retried      3, requeued
        4      3                    the end of the script                 0
    """
    script = f"""
    case $SLURM_RESTART_COUNT in
        '' | 1) {SAVE_ON_SIGTERM} ;;
        2) exit 3 ;;
        *) echo finished ;;
    esac"""
    job = submit(stand_in_jobs, script, '--nodes=2', '--retries=1', *TRAIN)

    wait_until_started(stand_in_jobs, job)
    stand_in_jobs.cluster.call('scancel', '--signal=TERM', job)  # stops the first start
    wait_until_started(stand_in_jobs, job, restart=1)
    stand_in_jobs.preempt(job)  # submits a job of higher priority, which stops the second start

    log = stand_in_jobs.log_after(job, 'COMPLETED', '0:0', restarts=3)
    assert 'stopped with a checkpoint and is requeued' in log
    # Only the third start counts as a crash. With --retries=1, a job is requeued after its first
    # crash, but not after a second.
    assert log.count('crashed (1 of at most 2 times)') == 1
    # A line of the log begins with the rank of its process.
    assert '0: finished' in log
    assert '1: finished' in log
    assert 'restart 3' in log


@pytest.mark.slow
def test_a_job_is_requeued_three_minutes_before_its_time_limit(stand_in_jobs):
    """Time limits are whole minutes, and Slurm checks them about once a minute."""
    # The script waits 2400 * 0.1 s = 4 minutes for SIGTERM.
    save_within_four_minutes = SAVE_ON_SIGTERM.replace('600', '2400')
    script = f'[[ -z $SLURM_RESTART_COUNT ]] || exit 0; {save_within_four_minutes}'

    job = submit(stand_in_jobs, script, '--nodes=2', '--time=4', *TRAIN)

    log = stand_in_jobs.log_after(job, 'COMPLETED', '0:0', restarts=1)
    assert f'job {job} stopped with a checkpoint and is requeued' in log


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(stand_in_jobs):
    """The process saves and ends with 75, which would requeue a job that is not cancelled."""
    job = submit(stand_in_jobs, SAVE_ON_SIGTERM, *TRAIN)
    wait_until_started(stand_in_jobs, job, num_processes=1)

    stand_in_jobs.cluster.call('scancel', job)

    end = stand_in_jobs.cluster.end(job)
    log = stand_in_jobs.log(job)
    assert end.state == 'CANCELLED', log
    assert end.restarts == 0, log
    assert 'requeued' not in log


@pytest.mark.slow
def test_a_worker_that_crashes_requeues_itself_alone(stand_in_jobs):
    """The workers are tasks 1 and 2 of a Slurm array, and only task 2 crashes.

    The last task has the same number as the array. Requeuing that number would restart all tasks.
    """
    # Task 2 fails at its first start, because SLURM_RESTART_COUNT is empty there.
    script = '[[ $SLURM_ARRAY_TASK_ID$SLURM_RESTART_COUNT != 2 ]]'

    array = submit(stand_in_jobs, script, '--workers=2', '--', 'ablate', '--workdir=x')

    first_end = stand_in_jobs.cluster.end(f'{array}_1')
    second_end = stand_in_jobs.cluster.end(f'{array}_2')
    assert first_end == slurm.JobEnd('COMPLETED', '0:0', restarts=0)
    assert second_end == slurm.JobEnd('COMPLETED', '0:0', restarts=1)


# Training: preempted, killed, requeued, finished

RUN_CONFIG = """
from qkattn.config import *

def get_config():
    return to_config_dict(Config(
        model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
        data=DataConfig(eval_sequences=8),
        optimizer=OptimizerConfig(warmup_steps=2),
        train=TrainConfig(num_steps=2000, batch_size=4, steps_per_dispatch=1, log_every=10,
                          eval_every=500, checkpoint_every=500, lifting='map'),
        mesh=MeshConfig(data=2),
    ))
"""


@pytest.fixture
def training(cluster, tmp_path, data_dir):
    """Jobs that train for real, on one CPU device per process."""
    jobs = Jobs(cluster, tmp_path, Path(sys.prefix))
    jobs.environment |= {'PYTHONPATH': str(ROOT), 'QKATTN_DATA': data_dir, 'JAX_PLATFORMS': 'cpu'}
    jobs.environment['XLA_FLAGS'] = '--xla_backend_optimization_level=0'
    return jobs


def kill_process(job: str, rank: int) -> None:
    """Sends SIGKILL to the process that trains as a rank of a job.

    The process runs Python, and has Slurm's variables for this job and rank.
    """
    job_variable = f'SLURM_JOB_ID={job}'.encode()
    rank_variable = f'SLURM_PROCID={rank}'.encode()
    for process in Path('/proc').glob('[0-9]*'):
        # A process may end meanwhile, or belong to another user.
        with contextlib.suppress(OSError):
            variables = (process / 'environ').read_bytes().split(b'\0')
            command_line = (process / 'cmdline').read_bytes()
            program, _, _ = command_line.partition(b'\0')
            is_of_rank = job_variable in variables and rank_variable in variables
            if is_of_rank and program.endswith(b'/python'):
                os.kill(int(process.name), signal.SIGKILL)
                return
    raise AssertionError(f'job {job} has no process {rank}')


def wait_for_some_steps(training: Jobs, job: str) -> None:
    """Waits until the run in the directory 'disturbed' has written more than 5 further metrics."""
    metrics = training.directory / 'disturbed/metrics.jsonl'

    def num_lines() -> int:
        return metrics.read_bytes().count(b'\n') if metrics.exists() else 0

    lines_before = num_lines()
    training.cluster.wait(job, lambda fields: num_lines() > lines_before + 5)


@pytest.mark.slow
def test_a_disturbed_run_of_two_nodes_ends_bitwise_equal(training):
    """A run that is preempted, and then loses a process, ends like an undisturbed run."""
    (training.directory / 'run.py').write_text(RUN_CONFIG)
    run = ('--nodes=2', '--', 'train', '--config=run.py')
    undisturbed_job = training.submit(*run, '--workdir=undisturbed')
    training.log_after(undisturbed_job, 'COMPLETED', '0:0', restarts=0)

    job = training.submit(*run, '--workdir=disturbed')
    wait_for_some_steps(training, job)
    training.preempt(job)
    wait_for_some_steps(training, job)
    kill_process(job, rank=1)
    wait_for_some_steps(training, job)
    end = training.cluster.end(job)

    log = training.log(job)
    print(log)
    assert end.state == 'COMPLETED', log
    assert end.exit_code == '0:0', log
    # The preemption and the crash each cause a restart. There may be further restarts, because
    # late signals of srun can reach the next step. It has the same name as the killed step.
    assert end.restarts >= 2, log
    assert 'DUE TO PREEMPTION' in log
    resumptions = re.findall(r'^0: resuming at step ', log, re.MULTILINE)
    assert len(resumptions) >= 2
    # A process that is killed by SIGKILL, signal 9, has the exit code 128 + 9.
    assert 'process 1 on 127.0.0.2 ended with exit code 137' in log
    # By default, 3 crashes are retried, so the fourth would end the job.
    assert f'job {job} crashed (1 of at most 4 times) and is requeued' in log
    assert f'job {job} is done' in log

    assert_same_run(training.directory / 'disturbed', training.directory / 'undisturbed')

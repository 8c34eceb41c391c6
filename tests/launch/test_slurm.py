"""launch/slurm.py and launch/slurm.sbatch: command lines, and jobs of a real Slurm on loopback."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.launch import launchers
from tests.launch.launchers import AWKWARD, ROOT, dry_run
from tests.launch.slurm import Jobs

TRAIN = ('--', 'train', '--config=small', '--workdir=runs/small')


def submitted(tmp_path: Path, *arguments: str) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments of the sbatch that a dry run prints, as a shell reads its line."""
    at = arguments.index('--')
    venv = {'QKATTN_VENV': str(tmp_path / 'a venv')}
    text = dry_run('slurm', *arguments[:at], command=arguments[at + 1 :], **venv)
    head, _, script = text.partition('\n\n# ')
    assert script.partition('\n')[2] == (ROOT / 'launch/slurm.sbatch').read_text()
    script = '#!/bin/sh\nenv >variables\nprintf "%s\\0" "$@" >arguments\n'
    launchers.stand_in(tmp_path / 'sbatch', script)
    environment = launchers.before_path(tmp_path)
    subprocess.run(['bash', '-euc', head], cwd=tmp_path, env=environment, check=True)
    lines = (tmp_path / 'variables').read_text().splitlines()
    variables = dict(line.split('=', 1) for line in lines if line.startswith('QKATTN_'))
    return variables, (tmp_path / 'arguments').read_text().split('\0')[:-1]


def test_a_dry_run_prints_the_script_and_a_command_that_a_shell_can_run(tmp_path):
    flags = ['--nodes=2', '--gpus_per_node=8', '--processes_per_node=4', '--job_name=a b']
    variables, arguments = submitted(tmp_path, *flags, *TRAIN, *AWKWARD)
    assert variables['QKATTN_VENV'] == str(tmp_path / 'a venv')
    assert variables['QKATTN_RETRIES'] == '3'
    options = ['--nodes=2', '--ntasks-per-node=4', '--gpus-per-node=8', '--job-name=a b']
    script = str(ROOT / 'launch/slurm.sbatch')
    assert arguments == [*options, script, *TRAIN[1:], *AWKWARD]
    study = ('--', 'ablate', '--workdir', 'runs/study')
    variables, arguments = submitted(tmp_path, '--workers=8', '--retries=0', *study)
    assert variables['QKATTN_RETRIES'] == '0'
    assert arguments[:3] == ['--nodes=1', '--ntasks-per-node=1', '--array=1-8']
    assert arguments[4:] == list(study[1:])


@pytest.fixture
def stand_in(cluster, tmp_path):
    """Jobs whose processes run the shell script stand_in.sh of the directory as qkattn."""
    program = tmp_path / 'venv/bin/python'
    launchers.stand_in(program, '#!/usr/bin/env bash\nshift 2\n. ./stand_in.sh\n')
    return Jobs(cluster, tmp_path, tmp_path / 'venv')


def behave(jobs: Jobs, script: str) -> None:
    """What the processes of a job do: $1 is the command, SLURM_PROCID the rank."""
    (jobs.directory / 'stand_in.sh').write_text(script)


# A process that saves when it is asked to, as training does.
SAVES = """
trap 'exit 75' TERM
touch started-$SLURM_PROCID-${SLURM_RESTART_COUNT:-0}
for _ in {1..600}; do sleep .1; done
"""


def fails(rank: int, code: int) -> str:
    """A script whose process `rank` fails once the other has begun, which saves and ends.

    A process that has not begun dies of the SIGTERM of srun, which counts as a crash.
    """
    begun = f'started-{1 - rank}-${{SLURM_RESTART_COUNT:-0}}'
    failure = f'until [[ -e {begun} ]]; do sleep .1; done; exit {code}'
    return f'if [[ $SLURM_PROCID = {rank} ]]; then {failure}; fi\n{SAVES}'


def started(jobs: Jobs, job: str, restart: int = 0, processes: int = 2) -> None:
    """Waits until all processes of a start have begun."""
    files = [jobs.directory / f'started-{rank}-{restart}' for rank in range(processes)]
    jobs.cluster.wait(job, lambda _: all(file.exists() for file in files))


def test_every_process_gets_the_arguments_unchanged(stand_in):
    behave(stand_in, 'printf "%s\\0" "$@" $JAX_COORDINATOR_PORT >$SLURM_JOB_ID-$SLURM_PROCID')
    jobs = [stand_in.submit('--nodes=2', *TRAIN, *AWKWARD) for _ in range(2)]
    ports = Counter()
    for job in jobs:
        assert stand_in.cluster.end(job) == ('COMPLETED', '0:0', 0), stand_in.log(job)
        for rank in range(2):
            text = (stand_in.directory / f'{job}-{rank}').read_text()
            *arguments, port, _ = text.split('\0')
            assert arguments == [*TRAIN[1:], *AWKWARD]
            ports[int(port)] += 1
    assert list(ports.values()) == [2, 2], 'one port per job'
    assert 1024 < min(ports) and max(ports) < 32768


@pytest.mark.parametrize(
    ('rank', 'code', 'restarts', 'words'),
    [(1, 1, 1, 'crashed 2 times'), (0, 2, 0, 'has a wrong setting or directory')],
)
def test_a_crash_of_one_process_is_retried_and_a_wrong_setting_is_not(
    rank, code, restarts, words, stand_in
):
    behave(stand_in, fails(rank, code))
    job = stand_in.submit('--nodes=2', '--retries=1', *TRAIN)
    assert stand_in.cluster.end(job) == ('FAILED', f'{code}:0', restarts), stand_in.log(job)
    log = stand_in.log(job)
    assert log.count('process 1 on 127.0.0.2 ended with exit code 1\n') == 2 * restarts
    assert log.count(f'job {job} crashed (1 of at most 2 times) and is requeued') == restarts
    assert f'job {job} {words} and is not requeued' in log


def test_a_job_that_is_asked_to_stop_or_preempted_goes_on_and_may_still_crash(stand_in):
    """Slurm sends SIGTERM to the processes before the time limit, as scancel --signal does."""
    behave(
        stand_in,
        f"""case $SLURM_RESTART_COUNT in
        '' | 1)
            {SAVES}
            ;;
        2) exit 3 ;;
        *) echo finished ;;
        esac""",
    )
    job = stand_in.submit('--nodes=2', '--retries=1', *TRAIN)
    started(stand_in, job)
    stand_in.cluster.call('scancel', '--signal=TERM', job)
    started(stand_in, job, restart=1)
    stand_in.preempt(job)
    assert stand_in.cluster.end(job) == ('COMPLETED', '0:0', 3), stand_in.log(job)
    log = stand_in.log(job)
    assert 'stopped with a checkpoint and is requeued' in log
    assert log.count('crashed (1 of at most 2 times)') == 1
    assert '0: finished' in log and '1: finished' in log and 'restart 3' in log


@pytest.mark.slow
def test_a_job_is_requeued_three_minutes_before_its_time_limit(stand_in):
    """Limits are whole minutes, and Slurm looks at them about once a minute."""
    behave(stand_in, f'[[ -z $SLURM_RESTART_COUNT ]] || exit 0; {SAVES.replace("600", "2400")}')
    job = stand_in.submit('--nodes=2', '--time=4', *TRAIN)
    assert stand_in.cluster.end(job) == ('COMPLETED', '0:0', 1), stand_in.log(job)
    assert f'job {job} stopped with a checkpoint and is requeued' in stand_in.log(job)


def test_a_cancelled_job_stays_cancelled(stand_in):
    behave(stand_in, SAVES)
    job = stand_in.submit(*TRAIN)
    started(stand_in, job, processes=1)
    stand_in.cluster.call('scancel', job)
    assert stand_in.cluster.end(job)[::2] == ('CANCELLED', 0), stand_in.log(job)
    assert 'requeued' not in stand_in.log(job)


def test_a_worker_that_crashes_requeues_itself_alone(stand_in):
    """The last task of an array has the array's own number."""
    behave(stand_in, '[[ $SLURM_ARRAY_TASK_ID$SLURM_RESTART_COUNT != 2 ]]')
    array = stand_in.submit('--workers=2', '--', 'ablate', '--workdir=x')
    ends = [stand_in.cluster.end(f'{array}_{worker}') for worker in (1, 2)]
    assert ends == [('COMPLETED', '0:0', 0), ('COMPLETED', '0:0', 1)]

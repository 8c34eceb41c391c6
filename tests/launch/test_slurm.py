"""launch/slurm.py and launch/slurm.sbatch: command lines, and jobs of a real Slurm on loopback."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.launch.slurm import LAUNCHER, ROOT, Jobs

TRAIN = ('--', 'train', '--config=small', '--workdir=runs/small')

# What a shell, a launcher or sbatch could change on the way to the processes.
ARGUMENTS = [
    'two words',
    "it's",
    '"quoted"',
    '$HOME `id` $(id)',
    '*',
    'a\\b\\n',
    '',
    '-x',
    '#!',
    '&;|',
]
ARGUMENTS += ['one\ntwo\n', '%j %%', 'ünï', '--', '--config.variants=(\'qk/vo\', "qk/no_o")']


# Command lines, without Slurm


def launched(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **variables}
    return subprocess.run([LAUNCHER, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (('--nodes=0', *TRAIN), "argument --nodes: '0' is not a whole number of at least 1; "),
        (('--processes_per_node=x', *TRAIN), "argument --processes_per_node: 'x' is not a whole"),
        (('--retries=-1', *TRAIN), "argument --retries: '-1' is not a whole number of at least 0"),
        (('--nods=2', *TRAIN), 'unrecognized arguments: --nods=2; --help lists the flags'),
        (('--partition', *TRAIN), 'argument --partition: expected one argument; '),
        (TRAIN[1:], 'unrecognized arguments: train '),
        (('--nodes=2',), 'no command; give it behind --'),
        (('--nodes=2', '--'), 'the command behind -- is missing; valid are train and ablate'),
        (('--', 'evaluate', '--workdir=x'), "the command behind -- is 'evaluate'; valid are "),
        (('--', 'train', '--config=small'), 'the command has no --workdir=DIRECTORY'),
        (('--workers=2', *TRAIN), '--workers=2 share a study, but the command is train\n'),
    ],
    ids=str,
)
def test_wrong_arguments_are_one_sentence_and_code_2(arguments, sentence):
    done = launched(*arguments)
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr.startswith(sentence) and done.stderr.count('\n') == 1


def test_what_is_not_installed_is_said_in_one_sentence(tmp_path):
    done = launched(*TRAIN, QKATTN_VENV=str(tmp_path))
    assert (done.returncode, done.stderr) == (
        2,
        f'{tmp_path} has no bin/python; run launch/venv.sh or set QKATTN_VENV\n',
    )
    (tmp_path / 'bin').mkdir()
    for name in ('python', 'python3'):
        (tmp_path / 'bin' / name).symlink_to(sys.executable)
    done = launched(*TRAIN, QKATTN_VENV=str(tmp_path), PATH=str(tmp_path / 'bin'))
    assert done.returncode == 2
    assert done.stderr.startswith('sbatch is not installed; ')
    assert done.stderr.count('\n') == 1


def submitted(tmp_path: Path, *arguments: str) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments of the sbatch that a dry run prints, as a shell reads its line."""
    done = launched('--dry_run', *arguments, QKATTN_VENV=str(tmp_path / 'a venv'))
    assert (done.returncode, done.stderr) == (0, '')
    head, _, script = done.stdout.partition('\n\n# ')
    assert script.partition('\n')[2] == (ROOT / 'launch/slurm.sbatch').read_text()
    stand_in = tmp_path / 'sbatch'
    stand_in.write_text('#!/bin/sh\nenv >variables\nprintf "%s\\0" "$@" >arguments\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
    subprocess.run(['bash', '-euc', head], cwd=tmp_path, env=environment, check=True)
    lines = (tmp_path / 'variables').read_text().splitlines()
    variables = dict(line.split('=', 1) for line in lines if line.startswith('QKATTN_'))
    return variables, (tmp_path / 'arguments').read_text().split('\0')[:-1]


def test_a_dry_run_prints_the_script_and_a_command_that_a_shell_can_run(tmp_path):
    flags = ['--nodes=2', '--gpus_per_node=8', '--processes_per_node=4', '--job_name=a b']
    variables, arguments = submitted(tmp_path, *flags, *TRAIN, *ARGUMENTS)
    assert variables['QKATTN_VENV'] == str(tmp_path / 'a venv')
    assert variables['QKATTN_RETRIES'] == '3'
    options = ['--nodes=2', '--ntasks-per-node=4', '--gpus-per-node=8', '--job-name=a b']
    script = str(ROOT / 'launch/slurm.sbatch')
    assert arguments == [*options, script, *TRAIN[1:], *ARGUMENTS]


def test_workers_are_an_array(tmp_path):
    variables, arguments = submitted(
        tmp_path, '--workers=8', '--retries=0', '--', 'ablate', '--workdir', 'runs/study'
    )
    assert variables['QKATTN_RETRIES'] == '0'
    assert arguments[:3] == ['--nodes=1', '--ntasks-per-node=1', '--array=1-8']
    assert arguments[4:] == ['ablate', '--workdir', 'runs/study']


@pytest.mark.skipif(shutil.which('shellcheck') is None, reason='shellcheck is not installed')
def test_shellcheck_finds_nothing():
    scripts = [*ROOT.glob('launch/*.sh'), *ROOT.glob('launch/*.sbatch'), ROOT / '.ci/run']
    # SC2317: versions differ in whether a function that only a trap calls is reachable.
    command = ['shellcheck', '--exclude=SC2317', *scripts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Jobs


@pytest.fixture
def stand_in(cluster, tmp_path):
    """Jobs whose processes run the shell script stand_in.sh of the directory as qkattn."""
    venv = tmp_path / 'venv'
    (venv / 'bin').mkdir(parents=True)
    program = venv / 'bin/python'
    program.write_text('#!/usr/bin/env bash\nshift 2\n. ./stand_in.sh\n')
    program.chmod(0o755)
    return Jobs(cluster, tmp_path, venv)


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
    jobs = [stand_in.submit('--nodes=2', *TRAIN, *ARGUMENTS) for _ in range(2)]
    ports = Counter()
    for job in jobs:
        assert stand_in.cluster.end(job) == ('COMPLETED', '0:0', 0), stand_in.log(job)
        for rank in range(2):
            text = (stand_in.directory / f'{job}-{rank}').read_text()
            *arguments, port, _ = text.split('\0')
            assert arguments == [*TRAIN[1:], *ARGUMENTS]
            ports[int(port)] += 1
    assert list(ports.values()) == [2, 2], 'one port per job'
    assert 1024 < min(ports) and max(ports) < 32768


def test_a_crash_of_one_process_is_retried_a_bounded_number_of_times(stand_in):
    behave(stand_in, fails(rank=1, code=1))
    job = stand_in.submit('--nodes=2', '--retries=1', *TRAIN)
    assert stand_in.cluster.end(job) == ('FAILED', '1:0', 1), stand_in.log(job)
    log = stand_in.log(job)
    assert log.count('process 1 on 127.0.0.2 ended with exit code 1') == 2
    assert f'job {job} crashed (1 of at most 2 times) and is requeued' in log
    assert f'job {job} crashed 2 times and is not requeued' in log


def test_a_wrong_setting_that_one_process_sees_is_never_retried(stand_in):
    behave(stand_in, fails(rank=0, code=2))
    job = stand_in.submit('--nodes=2', *TRAIN)
    assert stand_in.cluster.end(job) == ('FAILED', '2:0', 0), stand_in.log(job)
    assert f'job {job} has a wrong setting or directory and is not requeued' in stand_in.log(job)


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

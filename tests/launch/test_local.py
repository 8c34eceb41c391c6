"""launch/local.py: command lines; and jobs of small stand-ins for qkattn's processes."""

import importlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launchers import LAUNCH, PROGRAM, dry_run, starts_of, write_program
from tests.processes import is_running, wait_until

TRAIN = ('train', '--config=small', '--workdir=runs/small')


def start_job(directory: Path, plan: str, *flags: str) -> subprocess.Popen:
    """Starts a job of two processes, which are stand-ins for qkattn, by launch/local.py.

    Line n of `plan` has a word for each process, which says what it does at start n. A number is
    an exit code. 'saves' waits for SIGTERM, prints 'saved', and ends with 75. 'ignores' waits, and
    ignores SIGTERM.
    """
    (directory / 'plan').write_text(plan)
    write_program(directory / 'venv/bin/python', PROGRAM)
    command = [sys.executable, LAUNCH / 'local.py', '--processes=2', *flags, '--', *TRAIN]
    env = {**os.environ, 'QKATTN_VENV': str(directory / 'venv'), 'HOME': str(directory)}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen(command, cwd=directory, env=env, **pipes)


# `unread` is a pipe whose reading end is closed.


def test_output_of_a_process_is_read_to_its_end_if_nobody_reads_ours(monkeypatch, unread):
    monkeypatch.syspath_prepend(LAUNCH)
    local = importlib.import_module('local')
    process_output = io.BytesIO(b'a\nb\n')

    local._copy(process_output, unread.buffer.raw, '[0] ')

    assert process_output.read() == b''


def test_a_message_that_nobody_reads_does_not_fail(monkeypatch, unread):
    monkeypatch.syspath_prepend(LAUNCH)
    local = importlib.import_module('local')
    real_write = os.write

    def write_to_unread(file_descriptor, text):
        return real_write(unread.fileno(), text)

    monkeypatch.setattr(os, 'write', write_to_unread)
    local.say('starting again')


CPU_DEVICES = "JAX_PLATFORMS=cpu XLA_FLAGS='--xla_a=1 --xla_force_host_platform_device_count=4'"


@pytest.mark.parametrize(
    ('flag', 'setting_of_rank'),
    [
        ('--gpus_per_process=1', ['CUDA_VISIBLE_DEVICES=4', 'CUDA_VISIBLE_DEVICES=5']),
        ('--devices_per_process=4', [CPU_DEVICES, CPU_DEVICES]),
    ],
)
def test_a_dry_run_prints_what_would_be_started(flag, setting_of_rank):
    """A line for each of two processes has its rank, its variables and its command."""
    argument = "--config.name=two $HOME 'words'"
    # Like shlex, the launcher writes each single quote as '"'"'.
    quoted_argument = "'--config.name=two $HOME '\"'\"'words'\"'\"''"
    variables = {'QKATTN_VENV': '/v', 'CUDA_VISIBLE_DEVICES': '4,5,6', 'XLA_FLAGS': '--xla_a=1'}

    text = dry_run('local', '--processes=2', flag, command=(*TRAIN, argument), **variables)

    # The launcher has chosen a free port, at which the processes of the job meet.
    port = re.search(r'127\.0\.0\.1:(\d+)', text)[1]
    lines = text.splitlines()
    assert len(lines) == 2
    # With one GPU each, the two processes take the first two of CUDA_VISIBLE_DEVICES.
    for rank in (0, 1):
        assert lines[rank] == (
            f'[{rank}] JAX_COORDINATOR_ADDRESS=127.0.0.1:{port} JAX_NUM_PROCESSES=2 '
            f'JAX_PROCESS_ID={rank} {setting_of_rank[rank]} '
            f'/v/bin/python -m qkattn train --config=small --workdir=runs/small {quoted_argument}'
        )


# A line of the plan has the exit codes of the two processes at one start.
@pytest.mark.parametrize(
    ('plan', 'exit_code', 'num_starts', 'message'),
    [
        pytest.param('75 75\n0 0', 0, 2, 'starting again', id='saved'),
        pytest.param('75-late 2', 2, 1, '', id='wrong setting'),
        pytest.param('7 75-late\n7 75-late', 7, 2, 'no retry left of 1', id='crash'),
        pytest.param('1 0\n75 75\n0 0', 0, 3, '', id='crash, then saved'),
    ],
)
def test_a_job_is_started_again_by_its_exit_code(plan, exit_code, num_starts, message, tmp_path):
    """A job ends with the exit code of the process that failed first.

    After 75, a checkpoint is saved and the job starts again. After 2, a wrong setting, it does
    not. Any other code except 0 is a crash, and one retry is allowed here. With '-late', a process
    ends half a second later.
    """
    job = start_job(tmp_path, plan, '--retries=1')
    output, errors = job.communicate(timeout=60)

    assert job.returncode == exit_code, errors
    assert message in errors

    # At each start, both processes print their arguments and an error, after their rank.
    arguments = 'arguments qkattn train --config=small --workdir=runs/small'
    lines = output.splitlines()
    assert len(lines) == 2 * num_starts
    assert lines.count(f'[0] {arguments}') == num_starts
    assert lines.count(f'[1] {arguments}') == num_starts
    assert '[0] error' in errors.splitlines()
    assert '[1] error' in errors.splitlines()


def wait_until_started(directory: Path) -> None:
    """Waits until both processes of a job are ready for signals."""
    wait_until(lambda: len(starts_of(directory)) == 2)


def any_process_is_running(directory: Path) -> bool:
    """Whether a process of the job, or a child that it has left behind, is running."""
    pids = []
    for start in starts_of(directory):
        pids += start['pids']
    return any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    ('plan', 'sent_signal', 'exit_code', 'num_saved'),
    [
        pytest.param('saves saves', signal.SIGINT, 75, 2, id='both save'),
        pytest.param('saves ignores', signal.SIGTERM, 128 + signal.SIGKILL, 1, id='one is killed'),
        pytest.param('dies 1', None, 1, 0, id='one crashes'),
        pytest.param('leaves leaves', None, 0, 0, id='children are left behind'),
        pytest.param('saves saves', signal.SIGKILL, -signal.SIGKILL, 0, id='launcher is killed'),
    ],
)
def test_no_process_of_a_job_is_left_running(plan, sent_signal, exit_code, num_saved, tmp_path):
    # The two words of `plan` say what the two processes do:
    # 'saves' waits for SIGTERM, prints 'saved' and ends with 75.
    # 'ignores' ignores SIGTERM, so SIGKILL follows after the 2 s of --grace.
    # 'dies' waits, and SIGTERM ends it.
    # 'leaves' ends with 0 and leaves a child process behind.
    job = start_job(tmp_path, plan, '--grace=2', '--retries=0')
    wait_until_started(tmp_path)
    if sent_signal is not None:
        job.send_signal(sent_signal)
    output, errors = job.communicate(timeout=30)

    assert job.returncode == exit_code, errors
    assert output.count('saved') == num_saved
    wait_until(lambda: not any_process_is_running(tmp_path))


@pytest.mark.parametrize(
    ('plan', 'num_interrupts', 'exit_code', 'num_saved'),
    [
        pytest.param('saves saves', 2, 75, 2, id='both save'),
        pytest.param('ignores ignores', 3, 128 + signal.SIGKILL, 0, id='both are killed'),
    ],
)
def test_a_third_interrupt_kills_the_processes(
    plan, num_interrupts, exit_code, num_saved, tmp_path
):
    """The first Ctrl-C asks both processes to save, and the third one kills them.

    On SIGTERM, a process that 'saves' prints 'saved' and ends with 75. One that 'ignores' goes on.
    """
    job = start_job(tmp_path, plan, '--retries=0')
    wait_until_started(tmp_path)
    for _ in range(num_interrupts):
        job.send_signal(signal.SIGINT)
        time.sleep(0.1)
    output, errors = job.communicate(timeout=30)

    assert job.returncode == exit_code, errors
    assert output.count('saved') == num_saved
    # The second interrupt says what a third one does.
    assert 'press Ctrl-C again to kill them' in errors

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
    """Starts a job of two processes, each of which does what the plan says; see `PROGRAM`."""
    (directory / 'plan').write_text(plan)
    write_program(directory / 'venv/bin/python', PROGRAM)
    command = [sys.executable, LAUNCH / 'local.py', '--processes=2', *flags, '--', *TRAIN]
    env = {**os.environ, 'QKATTN_VENV': str(directory / 'venv'), 'HOME': str(directory)}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen(command, cwd=directory, env=env, **pipes)


def test_output_of_a_process_is_read_to_its_end_where_nobody_reads_ours(monkeypatch, unread):
    monkeypatch.syspath_prepend(LAUNCH)
    local = importlib.import_module('local')
    local._copy(source := io.BytesIO(b'a\nb\n'), unread.buffer.raw, '[0] ')
    assert source.read() == b''
    # Nor does the launcher's own message fail.
    write = os.write
    monkeypatch.setattr(os, 'write', lambda number, text: write(unread.fileno(), text))
    local.say('starting again')


@pytest.mark.parametrize(
    ('flag', 'settings'),
    [
        ('--gpus_per_process=1', ('CUDA_VISIBLE_DEVICES=4', 'CUDA_VISIBLE_DEVICES=5')),
        (
            '--devices_per_process=4',
            ("JAX_PLATFORMS=cpu XLA_FLAGS='--xla_a=1 --xla_force_host_platform_device_count=4'",)
            * 2,
        ),
    ],
)
def test_a_dry_run_prints_what_would_be_started(flag, settings):
    hostile = "--config.name=two $HOME 'words'"
    variables = {'QKATTN_VENV': '/v', 'CUDA_VISIBLE_DEVICES': '4,5,6', 'XLA_FLAGS': '--xla_a=1'}
    text = dry_run('local', '--processes=2', flag, command=(*TRAIN, hostile), **variables)
    port = re.search(r'127\.0\.0\.1:(\d+)', text)[1]
    quoted = "'--config.name=two $HOME '\"'\"'words'\"'\"''"
    assert text.splitlines() == [
        f'[{rank}] JAX_COORDINATOR_ADDRESS=127.0.0.1:{port} JAX_NUM_PROCESSES=2 '
        f'JAX_PROCESS_ID={rank} {setting} '
        f'/v/bin/python -m qkattn train --config=small --workdir=runs/small {quoted}'
        for rank, setting in enumerate(settings)
    ]


# The plan, the exit code of the job, how often it is started, a part of standard error.
@pytest.mark.parametrize(
    ('plan', 'code', 'num_starts', 'words'),
    [
        # Line n of the plan: how the two processes end at start n (75: saved, start me again).
        # Then the exit code of the job, the number of starts, and words of its errors.
        ('75 75\n0 0', 0, 2, 'starting again'),
        # The others save and end with 75, or kill themselves: the first failure counts.
        ('75-late 2', 2, 1, ''),
        ('7 75-late\n7 75-late', 7, 2, 'no retry left of 1'),
        ('1 0\n75 75\n0 0', 0, 3, ''),
    ],
)
def test_a_job_is_started_again_by_its_exit_code(plan, code, num_starts, words, tmp_path):
    job = start_job(tmp_path, plan, '--retries=1')
    out, errors = job.communicate(timeout=60)
    assert job.returncode == code, errors
    assert words in errors
    arguments = 'arguments qkattn train --config=small --workdir=runs/small'
    lines = [f'[{rank}] {arguments}' for rank in (0, 1)] * num_starts
    assert sorted(out.splitlines()) == sorted(lines)
    assert {'[0] error', '[1] error'} <= set(errors.splitlines())


@pytest.mark.parametrize(
    ('plan', 'number', 'code', 'saved'),
    [
        ('saves saves', signal.SIGINT, 75, 2),
        ('saves ignores', signal.SIGTERM, 128 + signal.SIGKILL, 1),
        ('dies 1', None, 1, 0),  # the first waits for a process that has ended
        ('leaves leaves', None, 0, 0),
        ('saves saves', signal.SIGKILL, -signal.SIGKILL, 0),
    ],
)
def test_processes_and_children_that_do_not_end_in_time_are_killed(
    plan, number, code, saved, tmp_path
):
    """A child that a process leaves behind is killed too, since it holds the standard output.

    The parameters: the plan, the signal to the job, its exit code, how many processes save.
    """
    job = start_job(tmp_path, plan, '--grace=2', '--retries=0')
    wait_until(lambda: len(starts_of(tmp_path)) == 2)
    if number is not None:
        job.send_signal(number)
    out, errors = job.communicate(timeout=30)
    assert (job.returncode, out.count('saved')) == (code, saved), errors
    wait_until(
        lambda: not any(is_running(pid) for start in starts_of(tmp_path) for pid in start['pids'])
    )


@pytest.mark.parametrize(
    ('interrupts', 'code', 'saved'), [(2, 75, 2), (3, 128 + signal.SIGKILL, 0)]
)
def test_a_third_interrupt_kills_processes_that_save(interrupts, code, saved, tmp_path):
    # Both processes save when asked to stop, or ignore that.
    job = start_job(tmp_path, 'saves saves' if saved else 'ignores ignores', '--retries=0')
    wait_until(lambda: len(starts_of(tmp_path)) == 2)
    for _ in range(interrupts):
        job.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, errors = job.communicate(timeout=30)
    assert (job.returncode, out.count('saved')) == (code, saved), errors
    assert 'press Ctrl-C again to kill them' in errors

"""launch/local.py: command lines; and jobs of small stand-ins for qkattn's processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launchers import LAUNCH, dry_run, stand_in, until

LAUNCHER = LAUNCH / 'local.py'
TRAIN = ('train', '--config=small', '--workdir=runs/small')

# A process that reads what to do in its n-th start from plan.json: [[rank 0, rank 1], ...].
PROCESS = """#!{python} -S
import json, os, signal, sys, time
rank = int(os.environ.get('JAX_PROCESS_ID', '0'))
try:
    start = len(open(f'starts.{{rank}}').readlines())
except FileNotFoundError:
    start = 0
with open(f'starts.{{rank}}', 'a') as file:
    print(os.getpid(), file=file)
does = json.load(open('plan.json'))[start][rank]
if 'saves' in does:
    def save(number, frame):
        time.sleep(0.3)
        print('saved', flush=True)
        os._exit(does['saves'])
    signal.signal(signal.SIGTERM, save)
elif 'ignores' in does:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('arguments', *sys.argv[2:], flush=True)
print('error', file=sys.stderr, flush=True)
if 'exit' in does:
    time.sleep(does.get('after', 0))
    os._exit(does['exit'])
time.sleep(60)
"""


def start(directory: Path, plan: list, *flags: str) -> subprocess.Popen:
    (directory / 'plan.json').write_text(json.dumps(plan))
    stand_in(directory / 'venv/bin/python', PROCESS.format(python=sys.executable))
    return subprocess.Popen(
        [sys.executable, LAUNCHER, *flags, '--', *TRAIN],
        cwd=directory,
        env={**os.environ, 'QKATTN_VENV': str(directory / 'venv')},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(directory: Path) -> list[int]:
    return [int(line) for path in directory.glob('starts.*') for line in path.read_text().split()]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    return False


def test_a_dry_run_prints_what_would_be_started():
    flags = ('--processes=2', '--devices_per_process=4', '--gpus_per_process=1')
    hostile = "--config.name=two $HOME 'words'"
    variables = {'QKATTN_VENV': '/v', 'CUDA_VISIBLE_DEVICES': '4,5,6', 'XLA_FLAGS': '--xla_a=1'}
    text = dry_run('local', *flags, command=(*TRAIN, hostile), **variables)
    port = re.search(r'127\.0\.0\.1:(\d+)', text)[1]
    quoted = "'--config.name=two $HOME '\"'\"'words'\"'\"''"
    assert text.splitlines() == [
        f'[{rank}] JAX_COORDINATOR_ADDRESS=127.0.0.1:{port} JAX_NUM_PROCESSES=2 '
        f'JAX_PROCESS_ID={rank} JAX_PLATFORMS=cpu '
        "XLA_FLAGS='--xla_a=1 --xla_force_host_platform_device_count=4' "
        f'CUDA_VISIBLE_DEVICES={gpu} '
        f'/v/bin/python -m qkattn train --config=small --workdir=runs/small {quoted}'
        for rank, gpu in enumerate('45')
    ]


@pytest.mark.parametrize(
    ('plan', 'code', 'starts', 'words'),
    [
        ([[{'exit': 0}, {'exit': 0}]], 0, 1, ''),
        ([[{'exit': 75}, {'exit': 75}], [{'exit': 0}, {'exit': 0}]], 0, 2, 'starting again'),
        ([[{'exit': 2, 'after': 0.5}, {'exit': 2}]], 2, 1, ''),
        # The others save and end with 75, or kill themselves: the first failure counts.
        ([[{'exit': 75, 'after': 0.5}, {'exit': 2}]], 2, 1, ''),
        ([[{'exit': 7}, {'exit': 75, 'after': 0.5}]] * 2, 7, 2, 'no retry is left of 1'),
        ([[{'exit': 1}, {'exit': 0}], [{'exit': 75}, {'exit': 75}], [{'exit': 0}] * 2], 0, 3, ''),
    ],
    ids=['done', '75', '2', '2 first', 'crashes', 'crash and 75'],
)
def test_a_job_is_started_again_by_its_exit_code(plan, code, starts, words, tmp_path):
    job = start(tmp_path, plan, '--processes=2', '--retries=1')
    out, errors = job.communicate(timeout=60)
    assert (job.returncode, words in errors) == (code, True), errors
    assert len(pids(tmp_path)) == 2 * starts
    arguments = 'arguments qkattn train --config=small --workdir=runs/small'
    assert sorted(out.splitlines()) == sorted([f'[{r}] {arguments}' for r in (0, 1)] * starts)
    assert {'[0] error', '[1] error'} <= set(errors.splitlines())


SAVES = {'saves': 75}


@pytest.mark.parametrize(
    ('plan', 'number', 'code', 'saved'),
    [
        ([SAVES, SAVES], signal.SIGTERM, 75, 2),
        ([SAVES, SAVES], signal.SIGINT, 75, 2),
        ([SAVES, {'ignores': True}], signal.SIGTERM, 128 + signal.SIGKILL, 1),
        ([{}, {'exit': 1}], None, 1, 0),  # the first waits for a process that has ended
        ([SAVES, SAVES], signal.SIGKILL, -signal.SIGKILL, 0),
    ],
)
def test_all_may_save_and_who_does_not_end_in_time_is_killed(plan, number, code, saved, tmp_path):
    job = start(tmp_path, [plan], '--processes=2', '--grace=2', '--retries=0')
    until(lambda: len(pids(tmp_path)) == 2)
    time.sleep(0.3)  # they install their handlers
    if number is not None:
        job.send_signal(number)
    out, errors = job.communicate(timeout=30)
    assert (job.returncode, out.count('saved')) == (code, saved), errors
    until(lambda: not any(map(alive, pids(tmp_path))))

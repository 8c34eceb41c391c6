"""The parent of a study's workers: how many it starts, and what it does when they end."""

import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import types

import pytest

from qkattn.jobs import children, cli, machine, signals
from qkattn.study import local_workers, plan, worker
from qkattn.study.arms import build_arms
from tests.processes import ROOT, is_running, wait_until
from tests.study.test_plan import STUDY, study_with

# The parents are forked from a process that has imported everything.
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['tests.study.test_local_workers'])


# A worker that trains nothing. Its arguments are its behaviour, its directory, and its number.
WORKER = """
import os, pathlib, sys, time
from qkattn.jobs import children

behaviour = sys.argv[1]
path = pathlib.Path(sys.argv[2])
number = int(sys.argv[3])
pipe = children.pipe_to_parent()
(path / f'start{number}.{os.getpid()}').touch()
pipe.recv()
assert children.pipe_to_parent() is None
if behaviour == 'crash' and number == 0:
    raise RuntimeError('broken')
if behaviour == 'refuse':
    print('d_model=90 is wrong')
    sys.exit(2)
waits_for_signal = behaviour in ('wait for SIGTERM', 'wait for SIGKILL')
time.sleep(1000 if waits_for_signal else 1)
(path / 'done').touch()
print('no end of line', end='')
"""


def run_two_workers(behaviour, path) -> None:
    """Runs the parent of two workers, and exits with its exit code.

    Each worker runs the program WORKER, which trains nothing. The test makes up a machine with room
    for two workers, and a study with two runs left.

    Args:
        behaviour: What the workers do: 'crash' (only worker 0), 'refuse' (the study),
            'wait for SIGTERM' or 'wait for SIGKILL'.
        path: Directory of the study. All output goes to the file `errors` there.
    """
    # Standard output (1) and standard error (2) go to a file.
    log = os.open(path / 'errors', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

    # The last argument of the first worker is 0, and the last argument of the second is 1.
    numbers = itertools.count()
    make_child = children.Child

    def make_numbered_child(command, *arguments):
        """Replaces children.Child: adds a number to the arguments of the command."""
        return make_child([*command, str(next(numbers))], *arguments)

    children.Child = make_numbered_child
    local_workers.COMMAND = [sys.executable, '-c', WORKER, behaviour, str(path)]
    os.environ['PYTHONPATH'] = str(ROOT)

    def runs_without_result(study, arms, path):
        """Replaces the plan of the study: two runs are left until a worker is done."""
        if (path / 'done').exists():
            return []
        return [types.SimpleNamespace(config=0), types.SimpleNamespace(config=1)]

    worker.runs_without_result = runs_without_result

    # A machine with room for two workers, which share a core.
    core = min(os.sched_getaffinity(0))
    machine.usable_cores = lambda: [core, core]
    local_workers._gpus = lambda: []
    local_workers.count_workers = lambda study, arms, max_workers, left: 2

    try:
        with signals.exit_on_signal():
            local_workers.run(STUDY, path, [], max_workers=2)
    except Exception as error:
        cli.exit_with(*cli.outcome(error))


def test_a_process_that_cannot_be_started_leaves_no_signal_blocked():
    with pytest.raises(FileNotFoundError):
        children.Child(['/none'], [0], {})
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_is_started_without_a_warning():
    """JAX warns if a process that has used it is forked, so workers are started without a fork."""
    source = """
import jax, sys
from qkattn.jobs.children import Child

jax.devices()  # after which JAX warns of forks
Child([sys.executable, '-c', ''], [0], {}).close()  # runs an empty program
"""
    parent = subprocess.run(
        [sys.executable, '-c', source], cwd=ROOT, capture_output=True, text=True
    )
    assert parent.returncode == 0
    assert parent.stderr == ''


def pids_of_workers(path) -> list[int]:
    """The process IDs of the workers that have started: 12 for a file start0.12."""
    return [int(file.suffix.removeprefix('.')) for file in path.glob('start*')]


def wait_until_two_workers_have_started(path) -> None:
    wait_until(lambda: len(pids_of_workers(path)) == 2)


def wait_until_no_worker_is_running(path) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids_of_workers(path)))


def start_parents(directory, behaviours) -> dict:
    """Starts a parent of two workers for each behaviour, and returns the processes.

    The directory of a parent has the name of its behaviour.
    """
    parents = {}
    for behaviour in behaviours:
        path = directory / behaviour
        path.mkdir()
        parents[behaviour] = FORKS.Process(target=run_two_workers, args=(behaviour, path))
        parents[behaviour].start()
    return parents


@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_the_parent_handles_workers_that_crash_refuse_or_are_signalled(tmp_path):
    """The exit code and the output of the parent process tell how its workers ended.

    Four parents run at the same time. Each has two workers, 0 and 1.
    """
    parents = start_parents(tmp_path, ['crash', 'refuse', 'wait for SIGTERM', 'wait for SIGKILL'])
    try:
        # A signal is sent only to the parent. Its workers end too.
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            behaviour = f'wait for {signal_number.name}'
            path = tmp_path / behaviour
            wait_until_two_workers_have_started(path)
            os.kill(parents[behaviour].pid, signal_number)
            parents[behaviour].join(60)
            wait_until_no_worker_is_running(path)
        for parent in parents.values():
            parent.join(60)
    finally:
        for parent in parents.values():
            parent.kill()

    # Exit code 2 means a wrong setting, 75 asks for another start, and -9 means SIGKILL.
    logs = {behaviour: (tmp_path / behaviour / 'errors').read_text() for behaviour in parents}
    assert parents['crash'].exitcode == 0, logs
    assert parents['refuse'].exitcode == 2, logs
    assert parents['wait for SIGTERM'].exitcode == 75, logs
    assert parents['wait for SIGKILL'].exitcode == -9, logs

    # Worker 0 crashed. Worker 1 went on. The parent adds an end of line to its last output.
    assert '[0] RuntimeError: broken\n' in logs['crash'], logs
    assert 'worker 0 crashed (exit code 1)\n' in logs['crash']
    assert '[1] no end of line\n' in logs['crash']

    # The last line is the reason for the refusal, which a worker printed.
    assert logs['refuse'].splitlines()[-1] == 'd_model=90 is wrong'

    # After SIGTERM, the parent waits until its workers have ended.
    assert 'and the workers have saved; the same command resumes' in logs['wait for SIGTERM']


@pytest.mark.parametrize(
    # `num_gpus` is None for an accelerator that workers cannot share.
    # `max_workers` is the number that the user gives, or None. `free_memory` is in bytes.
    ('num_cores', 'num_gpus', 'max_workers', 'runs_left', 'free_memory', 'expected'),
    [
        # One run is left now, but later each of the three tuned arms will have runs.
        pytest.param(2, 0, None, 1, math.inf, 2, id='a run for each of three arms will follow'),
        pytest.param(8, 0, None, 3, math.inf, 3, id='limited by runs'),
        pytest.param(2, 0, 3, 3, math.inf, 2, id='limited by cores'),
        # A worker takes more than 1 GiB, so 2 GiB are not enough for two.
        pytest.param(2, 0, None, 3, 2 * 2**30, 1, id='limited by memory'),
        pytest.param(2, 0, 2, 3, 2 * 2**30, 2, id='a given number is not limited by memory'),
        # The study has a mesh of two GPUs, so each worker takes two.
        pytest.param(8, 4, None, 3, math.inf, 2, id='limited by GPUs'),
        # There is always at least one worker.
        pytest.param(8, 1, 2, 3, math.inf, 1, id='too few GPUs'),
        pytest.param(1, 8, None, 3, math.inf, 1, id='each worker has a core of its own'),
        pytest.param(8, None, None, 3, math.inf, 1, id='an accelerator that cannot be divided'),
    ],
)
def test_the_number_of_workers_is_limited_by_the_machine_and_the_runs(
    monkeypatch, num_cores, num_gpus, max_workers, runs_left, free_memory, expected
):
    """Workers share the runs of a study. A worker takes a core and the GPUs of one mesh."""
    # A machine with these cores, GPUs and memory.
    cores = list(range(num_cores))
    gpus = None if num_gpus is None else [str(gpu) for gpu in range(num_gpus)]
    monkeypatch.setattr(machine, 'usable_cores', lambda: cores)
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: gpus)
    monkeypatch.setattr(machine, 'free_memory', lambda: free_memory)

    # A study of three arms, of which the first `runs_left` have a run without results.
    variants = ('qk/vo', 'shared_qk/vo', 'merged/vo')
    study = study_with(variants=variants, mesh={'data': 2})
    arms = build_arms(study)
    runs = plan.runs(study, arms, lambda run: None)[:runs_left]

    number = local_workers.count_workers(study, arms, max_workers, runs)

    assert number == expected

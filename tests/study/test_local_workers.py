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


# A worker that trains nothing: what it does, its directory, and its number.
WORKER = """
import os, pathlib, sys, time
from qkattn.jobs import children

work, path, number = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
pipe = children.pipe_to_parent()
(path / f'start{number}.{os.getpid()}').touch()
pipe.recv()
assert children.pipe_to_parent() is None
if work == 'crash' and number == 0:
    raise RuntimeError('broken')
if work == 'wrong':
    print('d_model=90 is wrong')
    sys.exit(2)
time.sleep(1000 if work in ('asked', 'killed') else 1)
(path / 'done').touch()
print('no end of line', end='')
"""


def run_workers(work, path) -> None:
    """The parent of two workers that do `work`."""
    log = os.open(path / 'errors', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    numbers = itertools.count()
    make_child = children.Child
    core = min(os.sched_getaffinity(0))
    os.environ['PYTHONPATH'] = str(ROOT)
    machine.usable_cores = lambda: [core] * 2
    runs = [types.SimpleNamespace(config=number) for number in range(2)]
    worker.runs_without_result = lambda study, arms, path: [] if (path / 'done').exists() else runs
    local_workers._gpus = lambda: []
    local_workers.COMMAND = [sys.executable, '-c', WORKER, work, str(path)]
    children.Child = lambda line, *rest: make_child([*line, str(next(numbers))], *rest)
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
    lines = [
        'import jax, sys',
        'from qkattn.jobs.children import Child',
        'jax.devices()  # after which JAX warns of forks',
        "Child([sys.executable, '-c', ''], [0], {}).close()",
    ]
    started = subprocess.run(
        [sys.executable, '-c', '\n'.join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert (started.returncode, started.stderr) == (0, '')


def pids_of_workers(path) -> list[int]:
    return [int(file.suffix[1:]) for file in path.glob('start*')]


@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_the_parent_handles_workers_that_crash_are_refused_asked_or_killed(tmp_path):
    parents = {}
    for work in ('crash', 'wrong', 'asked', 'killed'):
        (tmp_path / work).mkdir()
        parents[work] = FORKS.Process(target=run_workers, args=(work, tmp_path / work))
        parents[work].start()
    try:
        # A request reaches the parent alone, which passes it on; kill -9 cannot be passed on.
        signals_of_work = {'asked': signal.SIGTERM, 'killed': signal.SIGKILL}
        for work, signal_number in signals_of_work.items():
            path = tmp_path / work
            wait_until(lambda path=path: len(pids_of_workers(path)) == 2)
            os.kill(parents[work].pid, signal_number)
            parents[work].join(60)
            wait_until(lambda path=path: not any(map(is_running, pids_of_workers(path))))
        for process in parents.values():
            process.join(60)
    finally:
        for process in parents.values():
            process.kill()
    logs = {work: (tmp_path / work / 'errors').read_text() for work in parents}
    codes = {work: process.exitcode for work, process in parents.items()}
    assert codes == {'crash': 0, 'wrong': 2, 'asked': 75, 'killed': -9}, logs
    assert '[0] RuntimeError: broken\n' in logs['crash'], logs
    assert 'worker 0 crashed (exit code 1)\n' in logs['crash']  # the other goes on
    assert '[1] no end of line\n' in logs['crash']
    assert logs['wrong'].splitlines()[-1] == 'd_model=90 is wrong'
    assert 'and the workers have saved; the same command resumes' in logs['asked']


@pytest.mark.parametrize(
    ('number', 'gpus', 'max_workers', 'runs', 'free', 'most'),
    [
        (2, 0, None, 1, math.inf, 2),  # a study of three arms, which go on
        (8, 0, None, 3, math.inf, 3),
        (2, 0, 3, 3, math.inf, 2),
        (8, 4, None, 3, math.inf, 2),
        (8, 1, 2, 3, math.inf, 1),
        (1, 8, None, 3, math.inf, 1),  # each worker has cores of its own
        (8, None, None, 3, math.inf, 1),
        (2, 0, None, 3, 2**31, 1),
        (2, 0, 2, 3, 2**31, 2),  # asked for by number
    ],
)
def test_the_number_of_workers_is_limited_by_runs_cores_accelerators_and_memory(
    monkeypatch, number, gpus, max_workers, runs, free, most
):
    """`number` cores, `gpus` accelerators and `free` bytes of memory; None: not known."""
    monkeypatch.setattr(machine, 'free_memory', lambda: free)
    monkeypatch.setattr(machine, 'usable_cores', lambda: list(range(number)))
    names = None if gpus is None else list(map(str, range(gpus)))
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: names)
    variants = ('qk/vo', 'shared_qk/vo', 'merged/vo')
    study = study_with(variants=variants, mesh={'data': 2})  # of two GPUs
    arms = build_arms(study)
    left = plan.runs(study, arms, lambda run: None)[:runs]
    assert local_workers.count_workers(study, arms, max_workers, left) == most

"""The parent of a study's workers: how many it starts, and what it does when they end."""

import dataclasses
import itertools
import math
import multiprocessing
import os
import signal
import sys
import types

import pytest

from qkattn.config import MeshConfig
from qkattn.errors import ConfigError
from qkattn.jobs import children, cli, machine, signals
from qkattn.study import local_workers, plan, worker
from qkattn.study.arms import build_arms
from qkattn.study.local_workers import Remaining
from tests.processes import ROOT, is_running, until
from tests.study.test_plan import STUDY

# The parents are forked from a process that has imported everything.
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['tests.study.test_local_workers'])


# A worker that trains nothing: what it does, its directory, and which start of one it is.
WORKER = """
import os, pathlib, sys, time
from qkattn.jobs import children

work, path, number = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
pipe = children.parent()
(path / f'start{number}.{os.getpid()}').touch()
pipe.recv()
assert children.parent() is None
pipe.send(('lease', None, 3, {}))
if work == 'crash' and number in (0, 3, 4):
    raise RuntimeError(f'broken {number}')
if work == 'wrong':
    pipe.send(('error', 'd_model=90 is wrong'))
    sys.exit(2)
time.sleep(1000 if work in ('asked', 'killed') else 1)
(path / 'done').touch()
print('no end of line', end='')
"""


def run_workers(work, path) -> None:
    """The parent of three workers that do `work`."""
    log = os.open(path / 'errors', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    started, make_child = itertools.count(), children.Child
    core = min(os.sched_getaffinity(0))
    os.environ['PYTHONPATH'] = str(ROOT)
    machine.usable_cores = lambda: [core] * 3
    runs = [types.SimpleNamespace(config=number) for number in range(2)]
    worker.left_of = lambda study, arms, path: [] if (path / 'done').exists() else runs
    local_workers._gpus = lambda: []
    local_workers.COMMAND = [sys.executable, '-c', WORKER, work, str(path)]
    children.Child = lambda line, *rest: make_child([*line, str(next(started))], *rest)
    local_workers.RETRIES = 2
    local_workers.limit = lambda study, arms, wanted, left: (3, None)
    try:
        with signals.exit_on_signal():
            local_workers.run(
                STUDY, lambda: [], path, wanted=3, meanwhile=(path / 'meanwhile').touch
            )
    except Exception as error:
        cli.exit_with(*cli.outcome(error))


def pids(path) -> list[int]:
    return [int(file.suffix[1:]) for file in path.glob('start*')]


@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_workers_that_end_in_any_way(tmp_path):
    parents, ends = {}, {}
    for work in ('crash', 'wrong', 'asked', 'killed', 'done'):
        path = tmp_path / work
        path.mkdir()
        parents[work] = FORKS.Process(target=run_workers, args=(work, path))
        parents[work].start()
    try:
        # A request reaches the parent alone, which passes it on; kill -9 cannot be passed on.
        for work, number in (('asked', signal.SIGTERM), ('killed', signal.SIGKILL)):
            path = tmp_path / work
            until(lambda path=path: len(pids(path)) == 3)
            os.kill(parents[work].pid, number)
            parents[work].join(60)
            until(lambda path=path: not any(map(is_running, pids(path))))
        for work, process in parents.items():
            process.join(60)
            path = tmp_path / work
            ends[work] = process.exitcode, len(pids(path)), (path / 'errors').read_text()
    finally:
        for process in parents.values():
            process.kill()
    assert {work: end[:2] for work, end in ends.items()} == {
        'crash': (0, 5),
        'wrong': (2, 3),
        'asked': (75, 3),
        'killed': (-9, 3),
        'done': (0, 3),
    }, ends
    assert (tmp_path / 'done' / 'meanwhile').exists()
    logs = {work: end[2] for work, end in ends.items()}
    assert '[0] RuntimeError: broken 0\n' in logs['crash'] and 'retry 1 of 2' in logs['crash']
    assert logs['crash'].count('no retry is left of 2') == 1
    assert logs['wrong'].count('d_model=90 is wrong') == 1
    assert 'and the workers have saved; the same command resumes' in logs['asked']
    assert logs['done'].count('3 of 3 runs done\n') == 1 and '[2] no end of line\n' in logs['done']


@pytest.fixture
def have(monkeypatch):
    """have(8, gpus=[...], free=1e9) -> so many cores, accelerators and bytes."""

    def have(number: int, gpus: list[str] | None, free: float = math.inf) -> None:
        monkeypatch.setattr(machine, 'free_memory', lambda: free)
        monkeypatch.setattr(machine, 'usable_cores', lambda: list(range(number)))
        monkeypatch.setattr(machine, 'accelerators', lambda platforms: gpus)

    return have


@pytest.mark.parametrize(
    ('number', 'gpus', 'wanted', 'runs', 'free', 'most', 'note'),
    [
        (2, [], None, 3, math.inf, 2, None),
        (8, [], None, 3, math.inf, 3, '--workers=auto: there are 3 runs left, so 3 workers'),
        (2, [], 3, 3, math.inf, 2, '--workers=3: there is room on 2 cores, so 2 workers'),
        (8, [], 5, 0, math.inf, 1, '--workers=5: there are 0 runs left, so 1 worker'),
        (8, ['0', '1', '2', '3'], None, 3, math.inf, 2, None),
        (8, ['0'], 2, 3, math.inf, 1, '--workers=2: there is room on 1 GPU, so 1 worker'),
        (8, None, None, 3, math.inf, 1, None),
        (2, [], None, 3, 2**31, 1, '--workers=auto: there is memory for workers of 1.0 GiB, so 1'),
        (2, [], 2, 3, 2**31, 2, None),  # asked for by number
    ],
)
def test_workers_are_no_more_than_there_is_room_and_work_for(
    have, tmp_path, number, gpus, wanted, runs, free, most, note
):
    have(number, gpus, free)
    mesh = MeshConfig(data=2 if gpus and len(gpus) > 1 else 1)
    study = dataclasses.replace(
        STUDY,
        variants=('qk/vo', 'shared_qk/vo', 'merged/vo'),
        base=dataclasses.replace(STUDY.base, mesh=mesh),
    )
    arms = build_arms(study)
    left = plan.runs(study, arms, lambda run: None)[:runs]
    allowed, reason = local_workers.limit(study, arms, wanted, left)
    assert allowed == most and (reason or '').startswith(note or '') and bool(reason) == bool(note)
    if runs:
        described = f'workers: {most}' + (f' ({reason})' if note else '')
        assert local_workers.describe(study, arms, wanted, str(tmp_path)) == described


@pytest.mark.parametrize('text', ['0', '-1', 'two', '1.5', '', '²'])
def test_a_number_of_workers_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=f'--workers={text} must be auto or a number'):
        local_workers.parse(text)
    assert local_workers.parse('auto') is None and local_workers.parse('12') == 12


def test_time_left_follows_from_the_work_that_is_done():
    remaining = Remaining()
    assert remaining.text(0.0) == ''
    left = {'a': 100.0, 'b': 100.0, 'c': 200.0}
    remaining.leased(0, 'a', 3, left, 10.0)
    remaining.leased(1, 'c', 3, left, 10.0)
    assert remaining.text(15.0) == '0 of 3 runs done'
    remaining.leased(0, 'b', 3, {'b': 100.0, 'c': 200.0}, 20.0)
    assert remaining.text(20.0) == '1 of 3 runs done, 00:30 left'
    remaining.leased(1, 'c', 3, {'b': 100.0, 'c': 200.0}, 20.0)  # lost, and begun again
    assert remaining.text(20.0) == '1 of 3 runs done, 00:30 left'
    remaining.leased(0, 'd', 5, {'d': 10.0}, 40.0)  # the plan may grow
    assert remaining.text(40.0) == '4 of 5 runs done, 00:01 left'
    remaining.leased(0, None, 5, {}, 50.0)
    assert remaining.done() == (5, 5) and remaining.text(50.0) == '5 of 5 runs done'

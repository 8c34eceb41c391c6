"""The parent of a study's workers: where they run, and what it does when they end."""

import dataclasses
import itertools
import math
import multiprocessing
import os
import signal
import sys
import time
import types

import pytest

from qkattn.config import MeshConfig
from qkattn.run import cli, cores, signals
from qkattn.run.records import read_json
from qkattn.study import crew, plan, room, ways, worker
from qkattn.study.arms import build_arms
from tests.processes import ROOT
from tests.study.test_plan import STUDY

# The parents are forked from a process that has imported everything.
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['tests.study.test_crew'])


# A worker that trains nothing: what it does, its directory, and the how-manieth it is.
WORKER = """
import os, pathlib, sys, time
from qkattn.run import children

work, path, number = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
pipe = children.parent()
(path / f'start{number}.{os.getpid()}').touch()
while (order := pipe.recv())[0] != 'train':
    with open(path / 'orders', 'a') as file:
        file.write(f'{number} {order[0]} {order[1]}\\n')
    pipe.send(('ready', 1, 1.0))
assert children.parent() is None
pipe.send(('lease', None, 3, {}))
if work == 'crash' and number in (0, 3, 4):
    raise RuntimeError(f'broken {number}')
if work == 'wrong':
    pipe.send(('error', 'd_model=90 is wrong'))
    sys.exit(2)
if work == 'too_large':
    pipe.send(('step', 1, 2, 40))
time.sleep(100 if work in ('asked', 'killed') else 1)
(path / 'done').touch()
"""


def run_crew(work, path) -> None:
    """The parent of three workers that do `work`."""
    log = os.open(path / 'errors', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    started, make_child = itertools.count(), crew.Child
    core = min(os.sched_getaffinity(0))
    os.environ['PYTHONPATH'] = str(ROOT)
    free = math.inf if work == 'at_once' else 100.0
    cores.usable, cores.free_memory = lambda: [core] * 3, lambda: free
    runs = [types.SimpleNamespace(config=number) for number in range(2)]
    worker.left_of = lambda study, arms, path: [] if (path / 'done').exists() else runs
    crew.least_memory, crew.room.gpus = lambda config: 1, lambda: []
    crew.COMMAND = [sys.executable, '-c', WORKER, work, str(path)]
    crew.Child = lambda line, *rest: make_child([*line, str(next(started))], *rest)
    crew.RETRIES, crew.room.limit = 2, lambda study, arms, wanted, left: (3, None)
    try:
        with signals.leaving_at_once():
            wanted = None if work in ('in_turn', 'at_once') else 3
            crew.run(STUDY, lambda: [], path, wanted, meanwhile=(path / 'meanwhile').touch)
    except Exception as error:
        cli.leave(*cli.outcome(error))


def pids(path) -> list[int]:
    return [int(file.suffix[1:]) for file in path.glob('start*')]


def wait_for(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_workers_that_end_in_any_way(tmp_path):
    parents, ends = {}, {}
    for work in ('crash', 'wrong', 'too_large', 'asked', 'killed', 'in_turn', 'at_once'):
        path = tmp_path / work
        path.mkdir()
        parents[work] = FORKS.Process(target=run_crew, args=(work, path))
        parents[work].start()
    try:
        # A request reaches the parent alone, which passes it on; kill -9 cannot be passed on.
        for work, number in (('asked', signal.SIGTERM), ('killed', signal.SIGKILL)):
            path = tmp_path / work
            wait_for(lambda path=path: len(pids(path)) == 3)
            os.kill(parents[work].pid, number)
            parents[work].join(60)
            wait_for(lambda path=path: not any(map(is_running, pids(path))))
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
        'too_large': (0, ends['too_large'][1]),  # the third may not have begun
        'asked': (75, 3),
        'killed': (-9, 3),
        'in_turn': (0, 4),
        'at_once': (0, 4),
    }, ends
    for work in ('in_turn', 'at_once'):
        orders = [line.split() for line in (tmp_path / work / 'orders').read_text().splitlines()]
        prepared = [(worker, run) for worker, order, run in orders if order == 'prepare']
        # One process, and three that compile the programs of both runs.
        assert sorted(prepared) == [('0', '0'), ('1', '0'), ('2', '1'), ('3', '0')]
        assert [seconds for _, order, seconds in orders if order == 'time'].count('0.3') == 4
        # In turn, one of each way has also computed, which says what memory it takes.
        computed = [worker for worker, order, least in orders if (order, least) == ('time', '0.0')]
        assert sorted(computed) == ([] if work == 'at_once' else ['0', '1'])
        found = read_json(tmp_path / work / ways.NAME, {})
        assert found['processes'] == 3 and (tmp_path / work / 'meanwhile').exists()
    assert '[0] RuntimeError: broken 0\n' in ends['crash'][2]
    assert (
        'retry 1 of 2' in ends['crash'][2] and ends['crash'][2].count('no retry is left of 2') == 1
    )
    assert ends['wrong'][2].count('d_model=90 is wrong') == 1
    assert ends['too_large'][2].count('3 workers of 0.0 GiB each need more than the 0.0 GiB') == 1
    assert 'and the workers have saved; the same command resumes' in ends['asked'][2]


@pytest.fixture
def machine(monkeypatch):
    """machine(8, gpus=[...]) -> so many cores, and accelerators."""

    def have(number: int, gpus: list[str] | None) -> None:
        monkeypatch.setattr(cores, 'usable', lambda: list(range(number)))
        monkeypatch.setattr(cores, 'accelerators', lambda platforms: gpus)

    return have


@pytest.mark.parametrize(
    ('number', 'gpus', 'wanted', 'most', 'note'),
    [
        (2, [], None, 2, None),
        (8, [], None, 3, None),
        (2, [], 3, 2, '--workers=3: there is room on 2 cores, so 2 workers will do'),
        (8, [], 5, 3, '--workers=5: there are 3 runs left, so 3 workers will do'),
        (1, [], 2, 1, '--workers=2: there is room on 1 core, so 1 worker will do'),
        (8, ['0', '1', '2', '3'], None, 2, None),
        (8, ['0'], 2, 1, '--workers=2: there is room on 1 GPU, so 1 worker will do'),
        (8, None, None, 1, None),
    ],
)
def test_workers_are_no_more_than_there_is_room_and_work_for(
    machine, number, gpus, wanted, most, note
):
    machine(number, gpus)
    mesh = MeshConfig(data=2 if gpus and len(gpus) > 1 else 1)
    study = dataclasses.replace(
        STUDY,
        variants=('qk/vo', 'shared_qk/vo', 'merged/vo'),
        base=dataclasses.replace(STUDY.base, mesh=mesh),
    )
    arms = build_arms(study)
    left = plan.runs(study, arms, lambda run: None)
    assert room.limit(study, arms, wanted, left) == (most, note)


def test_a_last_run_is_counted_in_the_singular(machine):
    machine(8, [])
    arms = build_arms(STUDY)
    for left, said in (([], 'are 0 runs'), (plan.runs(STUDY, arms, lambda run: None)[:1], 'is 1')):
        study = dataclasses.replace(STUDY, variants=('qk/vo',))
        _, note = room.limit(study, arms[:1], 5, left)
        assert f'there {said}' in note and note.endswith('so 1 worker will do')


def test_a_dry_run_says_what_would_be_done(machine, tmp_path, monkeypatch):
    arms = build_arms(STUDY)
    machine(4, [])
    assert room.describe(STUDY, arms, None, None) == (
        'workers: 1 or 2, by a measurement before the first run'
    )
    assert room.describe(STUDY, arms, 4, str(tmp_path)) == (
        'workers: 2 (--workers=4: there are 2 runs left, so 2 workers will do)'
    )
    monkeypatch.setattr(ways, 'machine', lambda: {'cpu': 'A', 'cores': 4})
    ways.record(tmp_path, {1: 0.5, 2: 1.5}, 1, 1, 1.0)
    assert room.describe(STUDY, arms, None, str(tmp_path)).startswith('workers: 1, as measured')
    machine(4, None)
    assert room.describe(STUDY, arms, None, None) == 'workers: 1'

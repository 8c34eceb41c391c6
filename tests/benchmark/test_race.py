"""Contestants in processes of their own, timed in turns."""

import pytest

from qkattn.benchmark import contestant as contestants
from qkattn.benchmark.race import Contestant, race
from qkattn.run.cores import usable


@pytest.fixture
def contestant(tmp_path):
    """contestant('a', ...) -> one that appends its name to a file, and that file."""
    file = tmp_path / 'calls'

    def make(name, work='noted', process='', **settings):
        if work == 'noted':
            settings |= {'file': str(file), 'letter': name}
        work = f'tests.benchmark.works:{work}'
        own = {'name': name, 'work': work, 'settings': settings, 'process': process}
        return Contestant(**own, cores=1, extra={'line': name})

    make.file = file
    return make


def test_rounds_are_interleaved_and_each_contestant_has_a_bound_process(contestant):
    rows = race([contestant('a'), contestant('b')], rounds=3, seconds=0)
    # A call to warm up and a timed one while contestants are built, side by side; then the rounds.
    calls = contestant.file.read_text()
    assert sorted(calls[:4]) == ['a', 'a', 'b', 'b'] and calls[4:] == 3 * 'ab'
    assert [row.name for row in rows] == ['a', 'b'] and all(len(row.rounds) == 3 for row in rows)
    (one, *cores), (other, *_) = (row.extra['here'] for row in rows)
    assert one != other and len(cores) == 1
    assert rows[0].settings['cores'] == 1 and rows[0].extra['line'] == 'a'


def test_memory_stays_with_processes_that_run_own_programs(monkeypatch):
    kept = []
    monkeypatch.setattr(contestants, 'keep_freed_memory', lambda: kept.append('kept'))
    monkeypatch.setattr(contestants.importlib, 'import_module', lambda name: kept.append(name))
    for name in ('qkattn', 'qkattn.benchmark.peers.own_parts:stack', 'functional'):
        assert 'failed' in contestants._built(name, {})[1]
    peers = 'qkattn.benchmark.peers.'
    assert kept == ['kept', f'{peers}own', 'kept', f'{peers}own_parts', f'{peers}jax_gpt']


def test_contestants_are_timed_on_the_same_cores(contestant):
    """Whatever cores they were built on."""
    race([contestant(n, 'located', file=str(contestant.file)) for n in 'abc'], rounds=2, seconds=0)
    lines = contestant.file.read_text().splitlines()
    assert len(lines) == 12 and set(lines[-6:]) == {str(usable()[-1])}
    assert len(set(lines)) == min(len(usable()), 3)


def test_contestants_may_share_a_process_and_seconds_are_those_of_a_step(contestant):
    own = [contestant('a', process='p'), contestant('b'), contestant('c', process='p', steps=1e6)]
    a, b, c = race(own, rounds=2, seconds=0)
    assert a.extra['here'] == c.extra['here'] != b.extra['here']
    assert c.median < a.median / 1e3


def test_a_contestant_that_fails_leaves_the_others(contestant):
    own = [contestant('a'), contestant('x', 'broken'), contestant('y', 'dying')]
    a, broken, dying = race(own, rounds=3, seconds=0)
    assert len(a.rounds) == 3
    assert (list(broken.rounds), broken.extra) == ([], {'failed': 'ValueError: no such kernel'})
    assert (list(dying.rounds), dying.extra) == ([], {'failed': 'its process ended with code 3'})

"""The choice among the ways to use the cores of a machine."""

import pytest

from qkattn.errors import ConfigError
from qkattn.run.records import read_json, write_json
from qkattn.study import ways

MACHINE = {'cpu': 'A', 'cores': 2}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(ways, 'machine', lambda: MACHINE)


@pytest.mark.parametrize(
    ('cores', 'most', 'compared'),
    [
        (1, 1, [1]),
        (2, 8, [1, 2]),
        (4, 8, [1, 2, 4]),
        (16, 99, [1, 4, 8, 16]),
        (16, 5, [1, 4, 5]),
        (64, 2, [1, 2]),
    ],
)
def test_one_process_one_per_core_and_groups_between_are_compared(cores, most, compared):
    assert ways.candidates(cores, most) == compared


@pytest.mark.parametrize(
    ('seconds', 'runs', 'best'),
    [
        ({1: 1.0, 2: 1.0}, 8, 2),  # threads bring nothing
        ({1: 0.5, 2: 1.0}, 8, 1),  # they bring all: one process needs less memory
        ({1: 0.6, 2: 1.0}, 8, 2),
        ({1: 0.6, 2: 1.0}, 3, 1),  # of three runs the second core would wait for the last
        ({1: 0.6, 2: 1.0}, 2, 2),
        ({1: 1.0, 2: 1.1, 4: 2.5}, 8, 2),
    ],
)
def test_the_way_that_ends_first_is_chosen(seconds, runs, best):
    assert ways.chosen(seconds, runs) == best


@pytest.mark.parametrize(
    ('seconds', 'runs', 'clear'),
    [
        ({1: 1.0, 2: 1.0}, 8, True),
        ({1: 0.6, 2: 1.0}, 8, False),
        ({1: 0.6, 2: 1.0}, 3, False),  # 1.8 against 2
        ({1: 1.0}, 8, True),
    ],
)
def test_a_second_round_is_for_ways_that_are_close(seconds, runs, clear):
    assert ways.is_clear(seconds, runs) is clear


def test_the_choice_is_said_with_its_figures():
    assert ways.text({1: 0.6, 2: 1.0}, 2, 8) == (
        '2 processes on 2 cores; measured: 1 process 0.6 s per step, 2 processes 0.5 s per step'
    )


def test_a_choice_is_used_again_on_the_same_machine_alone(tmp_path, monkeypatch):
    assert ways.recorded(tmp_path) is None
    ways.record(tmp_path, {1: 0.6, 2: 1.0}, 2, 1000, 3.5)
    found = ways.recorded(tmp_path)
    assert found == {
        'machine': MACHINE,
        'ways': [
            {'processes': 1, 'seconds_per_step': 0.6},
            {'processes': 2, 'seconds_per_step': 1.0},
        ],
        'processes': 2,
        'peak_bytes': 1000,
        'seconds': 3.5,
    }
    assert ways.speedup(found) == pytest.approx(1.2)
    monkeypatch.setattr(ways, 'machine', lambda: {**MACHINE, 'cores': 4})
    assert ways.recorded(tmp_path) is None


def test_a_damaged_choice_is_refused_with_what_to_do(tmp_path):
    ways.record(tmp_path, {1: 0.6}, 1, 1000, 3.5)
    path = tmp_path / ways.NAME
    write_json(path, read_json(path, {}) | {'processes': 'two'})
    with pytest.raises(ConfigError, match=r"workers.json.*'processes'.*remove it"):
        ways.recorded(tmp_path)


@pytest.mark.parametrize('text', ['0', '-1', 'two', '1.5', '', '²'])
def test_a_number_of_workers_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=f'--workers={text} must be auto or a number'):
        ways.parse(text)
    assert ways.parse('auto') is None and ways.parse('12') == 12

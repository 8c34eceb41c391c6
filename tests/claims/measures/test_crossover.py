"""Seconds of one matrix and of two: recorded, and read beside the counts."""

import json

import pytest

from qkattn.claims.decided import Speaks
from qkattn.claims.measures import crossover


@pytest.fixture
def directory(tmp_path):
    (tmp_path / 'measures').mkdir()
    return tmp_path


def test_every_shape_is_timed_in_pairs(directory, monkeypatch):
    monkeypatch.setattr(crossover, 'pick', lambda scale, smoke, cpu, gpu: SMALL[type(smoke)])
    crossover.record(directory, 'smoke')
    found = json.loads((directory / 'measures/crossover.json').read_text())
    measured = found['measured']
    assert found.keys() == {'device', 'measured', 'crc32'}
    assert [(of['D'], of['H'], of['T']) for of in measured] == [(4, 1, 3), (4, 3, 3), (4, 4, 3)]
    assert all(len(of['ratios']) == 4 and min(of['ratios']) > 0 for of in measured)


SMALL = {int: 4, tuple: (3,)}


def test_ratios_stand_beside_the_counted_ones_and_decide_nothing(directory):
    measured = [
        {'D': 64, 'H': 16, 'T': 32, 'ratios': [1.9, 2.0, 2.1]},
        {'D': 64, 'H': 16, 'T': 96, 'ratios': [2.9, 3.0, 3.1]},
        {'D': 64, 'H': 64, 'T': 32, 'ratios': [1.4, 1.5, 1.6]},  # counted 0.6
        {'D': 64, 'H': 48, 'T': 32, 'ratios': [0.7, 1.0, 1.4]},
    ]
    text = json.dumps({'device': 'a device', 'measured': measured})
    (directory / 'measures/crossover.json').write_text(text)
    *rows, order = crossover.read(directory)
    assert [row.expected for row in rows] == pytest.approx([2.4, 20 / 7, 0.6, 0.8])
    assert [row.value for row in rows] == pytest.approx([2, 3, 1.5, 1], abs=0.01)
    assert (order.value, order.expected) == (1, 0) and 'of 3 with' in order.what
    assert {row.speaks for row in (*rows, order)} == {Speaks.BESIDE}

"""Targets read one number from what was measured, and say how far it is from its bound."""

import pytest

from qkattn.benchmark.measurement import Group, Measurement
from qkattn.benchmark.targets import TARGETS, Target, lines

ROWS = [
    Measurement('base', {}, [1.0, 2.0, 4.0], {'tokens': 10, 'size': 40}),
    Measurement('a', {}, [1.1, 2.4, 4.4], {'tokens': 10, 'size': 60}),
    Measurement('b', {}, [3.0, 2.0, 4.0], {'tokens': 5}),
    Measurement('failed', {}, [], {'failed': 'out of memory'}),
]
GROUPS = [Group('s', 'one', ROWS), Group('other', 'one', ROWS[1:]), Group('s', 'two', ROWS[1:])]


def target(**fields):
    return Target(**{'text': 'x', 'limit': 1.05, 'suite': 's', 'over': 'base', **fields})


@pytest.mark.parametrize(
    ('fields', 'number'),
    [
        ({'row': 'a'}, 1.1),  # the median of ratios round by round
        ({'row': 'b'}, 1.0),
        ({}, 1.1),  # the worst of all rows
        ({'sense': 'at least'}, 1.0),
        ({'row': 'a', 'of': 'size/tokens'}, 1.5),
        ({'of': 'size/tokens', 'over': ''}, 6.0),
        ({'row': 'a', 'of': 'size/seconds', 'over': ''}, 25.0),
        ({'row': 'a', 'over': '', 'group': 'tw*'}, 2.4),
        ({'row': 'failed'}, None),
        ({'row': 'a', 'over': 'failed'}, None),
        ({'group': 'three'}, None),
        ({'group': 'two'}, None),  # without the row that it is divided by
    ],
)
def test_the_number_of_a_target(fields, number):
    measured = target(**fields).measured(GROUPS)
    assert measured == (None if number is None else pytest.approx(number))


def test_a_line_says_by_how_much_a_target_is_missed():
    assert target(row='a').line(GROUPS) == 'x: 1.1, at most 1.05: missed by 4.8%'
    assert target(row='a', limit=1.1001).line(GROUPS) == 'x: 1.1, at most 1.1001: met'
    most = target(row='a', sense='at least', limit=2)
    assert most.line(GROUPS) == 'x: 1.1, at least 2: missed by 45.0%'
    assert target(row='failed').line(GROUPS) is None


def test_targets_of_the_other_kind_of_machine_are_left_out():
    name = 'vmap, 8 trials'
    rows = [Measurement('one run', {}, [1.0]), Measurement(name, {}, [0.5])]
    groups = [Group('stacks', 'seconds per step and trial', rows)]
    assert lines(groups, on_gpu=False) == []
    (line,) = lines(groups, on_gpu=True)
    assert line.endswith('0.5, at most 0.25: missed by 100.0%')
    assert len({(target.text, target.where) for target in TARGETS}) == len(TARGETS)

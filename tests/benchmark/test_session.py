"""What a benchmark writes, keeps and refuses; the numbers of its tables."""

import dataclasses
import json

import pytest

from qkattn.benchmark import plot, printed_groups, session, summary
from qkattn.benchmark.measurement import Group, Measurement
from qkattn.benchmark.session import SCALES, Options, Session
from qkattn.benchmark.shape import MEDIUM, RECIPE
from qkattn.config import Config, from_json
from qkattn.errors import ReportError
from qkattn.model import cost
from tests import damages

ROWS = [
    Measurement('fast', {}, [0.1, 0.2, 0.3], {'tokens': 10, 'flops': 4e9, 'peak_flops': 8e10}),
    Measurement('slow', {}, [0.4, 0.4, 0.4], {'tokens': 10, 'flops': 8e9, 'peak_flops': 8e10}),
    Measurement('gone', {}, [], {'failed': 'ValueError: no'}),
]
GROUP = Group('steps', 'rows', ROWS, 'fast')


@pytest.fixture
def begin(tmp_path):
    """begin() -> a session in the same directory, and how often it measured."""

    def session_in(**options):
        own = Session(tmp_path, Options(scale=SCALES['smoke'], **options))
        own.suite = 'steps'
        return own

    return session_in


def counted():
    calls = []

    def rows():
        calls.append(1)
        return ROWS

    return calls, rows


def test_a_session_that_was_stopped_goes_on(begin, tmp_path, monkeypatch):
    first = begin()
    first.record('a', lambda: ROWS, reference='fast')
    with pytest.raises(KeyboardInterrupt):
        first.record('b', lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert session.check(tmp_path) == 6  # tables are written with every group
    calls, rows = counted()
    second = begin()
    second.record('c', rows)  # in another order: what comes later in the directory is kept
    assert [g['title'] for g in session.read(tmp_path)['groups']] == ['c', 'a']
    assert second.record('a', rows).rows == ROWS and second.record('b', rows).rows == ROWS
    assert len(calls) == 2
    assert [g.name for g in second.groups] == ['steps: c', 'steps: a', 'steps: b']

    begin(again=True).record('a', rows)
    assert len(calls) == 3
    # Of another commit, nothing is kept.
    facts = {**second.facts, 'git': {**second.facts['git'], 'commit': 'other'}}
    monkeypatch.setattr(session.machine, 'facts', lambda: facts)
    begin().record('a', rows)
    assert len(calls) == 4


def test_suites_of_a_session_write_one_file(begin, tmp_path):
    whole = begin()
    for suite in ('steps', 'input'):
        whole.of(suite).record('a', lambda: ROWS)
    names = [group.name for group in whole.groups]
    assert names == ['steps: a', 'input: a']
    assert [g['suite'] for g in session.read(tmp_path)['groups']] == ['steps', 'input']


def test_numbers_of_a_table():
    fast, slow, gone = ROWS
    assert fast.median == 0.2 and fast.quartiles == (pytest.approx(0.15), pytest.approx(0.25))
    assert gone.median is gone.quartiles is None
    columns = {column.key: column for column in summary.COLUMNS}
    of_slow = {key: column.value(slow, GROUP) for key, column in columns.items()}
    # Round by round: 4, 2, 4 / 3.
    assert of_slow['ratio'] == pytest.approx(2) and of_slow['predicted'] == 2
    assert of_slow['ratio_first_quartile'] == pytest.approx(5 / 3)
    assert of_slow['ratio_third_quartile'] == pytest.approx(3) and of_slow['excess'] == 1
    assert of_slow['tokens_per_second'] == pytest.approx(25)
    assert of_slow['utilisation'] == pytest.approx(0.25)
    text = summary.text(GROUP)
    assert 'ratios to fast' in text and 'ValueError: no' in text and 'compile' not in text
    rows = summary.csv_table([GROUP]).splitlines()
    assert rows[2].startswith('steps: rows / slow,0.4,0.4,0.4,') and len(rows) == 4


def test_tables_and_figures_are_those_of_the_measurements(begin, tmp_path):
    own = begin()
    own.record('a', lambda: ROWS, reference='fast')
    lines = [
        dataclasses.replace(row, extra={**row.extra, 'line': row.name, 'context': 8})
        for row in ROWS[:2]
    ]
    own.record('b', lambda: lines, x='context')
    assert session.finish(tmp_path) == ['benchmark.json', 'table.md', 'table.csv', 'steps.png']
    assert (tmp_path / 'steps.png').read_bytes()[1:4] == b'PNG'
    assert session.check(tmp_path) == 12
    table = tmp_path / 'table.csv'
    table.write_text(table.read_text().replace('0.4', '0.3'))
    with pytest.raises(ReportError, match='table.csv is not what benchmark.json gives'):
        session.check(tmp_path)
    session.finish(tmp_path)
    assert session.check(tmp_path) == 12
    for damage, message in (
        ('{', 'is not a benchmark'),
        (damages.NESTED, 'is not a benchmark.*nested too deeply'),
        ({'schema': 2, 'groups': []}, 'schema 2'),
    ):
        (tmp_path / 'benchmark.json').write_text(
            damage if isinstance(damage, str) else json.dumps(damage)
        )
        with pytest.raises(ReportError, match=message):
            session.check(tmp_path)


@pytest.mark.parametrize(('tokens', 'label'), [({'tokens': 10}, 'µs per token'), ({}, 's')])
def test_lines_are_drawn_over_the_numbers_that_were_measured(tokens, label):
    rows = [
        Measurement(f'{n} layers', {}, [0.1 * n], {**tokens, 'line': 'own', 'layers': n})
        for n in (4, 12, 48)
    ]
    (ax,) = plot._figure([Group('depth', 'a', rows, x='layers')]).axes
    assert [text.get_text() for text in ax.get_xticklabels()] == ['4', '12', '48']
    assert ax.get_ylabel() == label


def test_tables_in_pages_are_those_of_the_measurements(begin, tmp_path):
    page = tmp_path / 'page.md'
    names = ('steps: a', 'targets', 'steps: b')
    empty = '\n'.join(f'<!-- benchmark: cpu | {name} -->\n<!-- end -->' for name in names[:2])
    page.write_text(empty)
    assert printed_groups.check_page(page) == 2  # not measured yet
    measured = Session(tmp_path / 'cpu', begin().options)
    measured.suite = 'steps'
    measured.record('a', lambda: ROWS)
    with pytest.raises(ReportError, match='has other tables than its benchmarks give'):
        printed_groups.check_page(page)
    printed_groups.check_page(page, write=True)
    assert '| slow | 400 | 400 | 400 | 25 | 25.0% |' in page.read_text()
    assert printed_groups.check_page(page) == 2
    page.write_text(page.read_text().replace('400', '300', 1))
    with pytest.raises(ReportError):
        printed_groups.check_page(page)
    page.write_text(empty.replace(names[0], names[2]))
    with pytest.raises(ReportError, match="no group that matches 'steps: b'"):
        printed_groups.check_page(page)


@pytest.mark.parametrize('shape', [RECIPE, MEDIUM], ids=str)
def test_a_shape_counts_what_its_model_does(shape):
    model = from_json(Config, shape.config()).model
    assert shape.parameters == cost.measured(model, 'total')
    assert shape.flops == shape.tokens * cost.training_flops_per_token(model)
    assert shape.flops == 3 * shape.tokens * cost.measured(model, 'flops')

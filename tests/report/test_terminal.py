"""What a terminal shows of a report fits into it."""

from pathlib import Path

import pytest

from qkattn.report.tables import WIDTH, fitted, terminal_text, width_of_terminal
from qkattn.verdict import find, load_study


@pytest.mark.parametrize('width', [80, WIDTH])
def test_a_study_fits_and_has_its_verdicts(study, width):
    loaded = load_study(study)
    text = terminal_text(loaded, find(loaded), Path('runs/study/report.html'), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    (titles,) = (line for line in lines if line.startswith('variant  '))
    assert 'difference in test loss' in titles and 'verdict' in titles
    assert lines[-2:] == [
        'all columns, notes and settings: runs/study/table.txt',
        'report: runs/study/report.html',
    ]


@pytest.mark.parametrize('width', [60, 95, 100])
def test_columns_that_do_not_fit_are_left_out_in_turn(width):
    titles = [('name', True), ('a' * 30, False), ('b' * 36, False), ('c|d', False)]
    table = fitted(titles, [['x' * 80, '1', '2', '3'], ['y', '4', '5', '6']], width)
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    assert ('b' * 36 in table) == (width >= 95)
    assert 'a' * 30 in table and lines[-1].split() == [
        'y',
        *{60: '46', 95: '45', 100: '456'}[width],
    ]
    assert (
        lines[-2].split()[0] == f'{"x" * ((width // 4 - 1) // 2)}…{"x" * ((width // 4 - 1) // 2)}'
    )


@pytest.mark.parametrize(('columns', 'width'), [('80', 80), ('200', 100)])
def test_a_report_is_as_wide_as_the_terminal_up_to_100(columns, width, monkeypatch):
    monkeypatch.setenv('COLUMNS', columns)
    assert width_of_terminal() == width

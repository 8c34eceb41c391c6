"""Export and pages of claims: files, answers, tables, figures, blocks, and what a check finds."""

import dataclasses
import json
import re

import pytest

from experiments.claims import export, pages
from experiments.claims.claim import ClaimVerdict, Kind, Row, Speaks
from experiments.claims.export import ANSWERS, CLAIMS, Answer, read_answers, read_claims, write
from experiments.claims.pages import claim_figure, group_parts, has_figure
from experiments.claims.studies import Results
from qkattn.errors import ReportError, RunDirectoryError
from qkattn.report.figures import style
from tests.experiments.claims import conftest
from tests.report.conftest import row_names

STORED = {claim.name: claim for claim in read_claims(conftest.CLAIMS)}
STORED_ANSWERS = read_answers(conftest.CLAIMS)
FAILS = {'verdict': ClaimVerdict.FAILS, 'statement': '<b>x</b> & $y$ | `z`', 'condition': None}
NEEDS = {'needed': '48 seeds in place of 12', 'missing': ('study x has no results',)}
OPEN = {'verdict': ClaimVerdict.UNDECIDED, 'condition': None}
MISSING = dataclasses.replace(STORED['B4'], seconds=5025.0, **NEEDS, **OPEN)
HERE = {'verdict': ClaimVerdict.FAILS_HERE, 'condition': None}
# One of each verdict and kind, in the order of their names.
SHOWN = (
    *(STORED['A1'], STORED['A2'], MISSING, dataclasses.replace(STORED['B6'], **HERE)),
    *(dataclasses.replace(STORED['C1'], **FAILS), STORED['C3']),
)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A directory of claims whose figures are not rendered."""
    directory = tmp_path_factory.mktemp('claims')
    write(directory, CLAIMS, SHOWN)
    write(directory, ANSWERS, STORED_ANSWERS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(style, 'render', lambda figure, kind: b'')
        pages.write_page(directory)
    return directory


def test_claims_and_answers_are_read_as_written_with_numbers_of_rows_in_six_digits(tmp_path):
    write(tmp_path, CLAIMS, STORED.values())
    assert read_claims(tmp_path) == tuple(STORED.values())
    assert read_answers(tmp_path) == ()

    # Numbers of rows have six significant digits, or one behind the point where they are large.
    # Whole numbers, and `attention`, which is no number of a row, are as they were.
    row = dataclasses.replace(
        STORED_ANSWERS[0].rows[0], value=1234567.0, low=0.01234567891, high=1234567.891
    )
    write(tmp_path, ANSWERS, [*STORED_ANSWERS, Answer('a', 'b', 0.1234567, (row,))])
    *same, answer = read_answers(tmp_path)
    kept = answer.rows[0]
    assert tuple(same) == STORED_ANSWERS
    assert answer.attention == 0.1234567
    assert (kept.value, kept.low, kept.high) == (1234567.0, 0.0123457, 1234567.9)
    with pytest.raises(ReportError, match='claims.json does not exist; make it again with python'):
        read_claims(tmp_path / 'none')


def test_a_claims_file_that_was_altered_or_holds_a_wrong_field_is_refused(tmp_path):
    path = write(tmp_path, CLAIMS, STORED.values())
    path.write_text(path.read_text().replace('"seconds": 1', '"seconds": 11', 1))
    with pytest.raises(RunDirectoryError, match='is damaged .*; make it again with'):
        read_claims(tmp_path)

    # A file that was written by hand: fields of the row and of the claim, and what the refusal
    # says.
    for changes_of_row, changes_of_claim, sentence in (
        ({'speaks': 'yes'}, {}, "B2: 'yes' is not a valid Speaks"),
        ({'value': None}, {}, "B2: field 'value' is None, expected float"),
        ({}, {'verdict': 'true'}, "B2: 'true' is not a valid ClaimVerdict"),
    ):
        claim = dataclasses.asdict(STORED['B2'])
        claim['rows'][0].update(changes_of_row)
        claim.update(changes_of_claim)
        path.write_text(json.dumps([claim]))
        with pytest.raises(RunDirectoryError, match=re.escape(sentence)):
            read_claims(tmp_path)


def test_a_claim_made_again_may_differ_by_rounding_alone():
    """`mismatch` names the first field that differs, or returns None.

    The text `needed`, '48 seeds, to find 0.0042 nats/token', may differ by one seed and in the
    last digit of the difference.
    """
    rows = STORED['B2'].rows
    # Claim, changes of its second row, changes of the claim, and the field that is named.
    for name, changes_of_row, changes_of_claim, field in (
        # Time, commit and machine are not compared.
        ('B2', {}, {'seconds': 1.0, 'commit': 'b', 'hardware': 'c'}, None),
        ('B2', {'value': rows[1].value * (1 + 1e-7)}, {}, None),
        ('B2', {'value': rows[1].value * (1 + 1e-4)}, {}, 'rows.1.value of B2'),
        ('A1', {'value': 9e-13}, {}, None),  # within the tolerance of the check
        ('A1', {'value': 9e-12}, {}, 'rows.1.value of A1'),
        ('B2', {'decision': 'worse'}, {}, 'rows.1.decision of B2'),
        ('B2', {}, {'verdict': ClaimVerdict.FAILS}, 'verdict of B2'),
        ('B2', {}, {'rows': rows[:-1]}, 'rows.3.quantity of B2'),
        ('B2', {}, {'needed': '49 seeds, to find 0.0041 nats/token'}, None),
        ('B2', {}, {'needed': '60 seeds, to find 0.0041 nats/token'}, 'needed of B2'),
        ('B2', {}, {'needed': '48 seeds, to find 0.9 nats/token'}, 'needed of B2'),
    ):
        claim = dataclasses.replace(STORED[name], needed='48 seeds, to find 0.0042 nats/token')
        first, second, *others = claim.rows
        changed_rows = (first, dataclasses.replace(second, **changes_of_row), *others)
        made_again = dataclasses.replace(claim, **{'rows': changed_rows} | changes_of_claim)
        message = export.mismatch(claim, made_again)
        if field is None:
            assert message is None
        else:
            assert message.startswith(field)


def test_a_page_has_a_row_for_each_claim(written):
    page = (written / 'claims.md').read_text()
    links = re.findall(r'^\| \[(\w+)\]\(#(\w+)\)', page, re.M)
    assert links == [(claim.name, claim.name.lower()) for claim in SHOWN]


def test_a_page_has_a_section_for_each_claim(written):
    page = (written / 'claims.md').read_text()
    assert re.findall(r'^## (\w\d)$', page, re.M) == [claim.name for claim in SHOWN]
    section = page.split('## B4\n')[1].split('\n## ')[0]
    for part in ('; needs 48 seeds', 'time: 1:23:45', '(./plots/b4_differences.png)'):
        assert part in section
    assert MISSING.missing[0] in section


def test_a_page_begins_with_the_numbers_of_verdicts(written):
    start = (written / 'claims.md').read_text().partition('\n|')[0]
    assert '6 claims at cpu scale: 1 holds, 1 holds under a condition, 1 fails' in start
    assert MISSING.missing[0] in start


def test_statements_are_escaped(written):
    page = (written / 'claims.md').read_text()
    assert '| ✕ fails |' in page
    assert '<b>' not in page
    assert '&lt;b>x&lt;/b> & $y$' in page


def test_blocks_for_other_pages_link_to_the_page_of_each_group(written):
    cells = (
        '[B4](claims_b.md#b4)',
        MISSING.title,
        '○ undecided, needs 48 seeds in place of 12',
        '+0.0089 [+0.0057, +0.0129] nats/token, query_free/vo',
    )
    lines = {'verdicts': f'| {" | ".join(cells)} |', 'b': '# B. Is W_Q needed?'}
    for part, line in lines.items():
        assert line in pages.BLOCKS[f'claims_{part}'](written, 'results')
    assert '| drop W_Q | -25 % |' in pages.BLOCKS['answers'](written, 'results')


def test_differences_have_a_sign():
    """Also those of D2, whose arms have more parameters at the same shape; a count has none."""
    assert all(pages.amount(row)[0] in '+-' for row in STORED['D2'].rows)
    assert pages.amount(STORED['A2'].rows[0])[0] not in '+-'


def test_a_table_of_a_claim_has_the_columns_that_are_filled():
    (table,) = pages._tables(STORED['D2'])
    state = ('length', 'tokens', 'loss, nats/token', 'yardstick')
    titles = ('arm', 'doubled', 'value', 'verdict', *state, 'for or against the claim')
    assert table.partition('\n')[0] == f'| {" | ".join(titles)} |'


def test_answers_print_no_difference_whose_verdict_is_withheld(tmp_path):
    """The masked model, whose verdicts are all withheld, has no column, and change c no row."""

    def row(model, value, decision, **fields):
        context = {'model': model, 'size': 'd_model=96', 'corpus': 'stdlib', 'tokens': '1'}
        return Row(
            'a/b',
            kind='matched',
            context=context,
            unit='nats/token',
            speaks='beside',
            value=value,
            decision=decision,
            study='lm',
            **fields,
        )

    withheld = row('masked LM', 0.125, 'no verdict')
    marked = row('decoder', 0.25, 'worse', is_short=True, length='at this length')
    settled = row('decoder', 0.5, 'worse', length='settled')
    write(tmp_path, CLAIMS, SHOWN)
    answers = {'a': (marked, withheld), 'b': (settled,), 'c': (withheld,)}
    write(tmp_path, ANSWERS, [Answer(name, 'a/b', None, rows) for name, rows in answers.items()])
    lines = pages.answers_markdown(tmp_path, '.').splitlines()
    assert lines[0] == '|  | size of attention | decoder, equal count | verdict |'
    assert lines[2:4] == [
        '| a | - | +0.250† | worse at this length |',
        '| b | - | +0.500 | worse, settled |',
    ]
    assert not lines[4]
    assert '†: a loss above' in lines[5]
    assert 'Masked' not in lines[5]


@pytest.mark.stored
def test_answers_have_a_row_of_longer_training(committed, monkeypatch):
    """Here the same study stands for both lengths."""
    studies = {'studies': ('lm_added',), 'longer_studies': ('lm_added',)}
    model = dataclasses.replace(export.MODELS['decoder'], **studies)
    monkeypatch.setattr(export, 'MODELS', {'decoder': model})
    monkeypatch.setattr(export, 'CHANGES', {'products': 'double/double'})
    (answer,) = export.answers(Results(committed / 'claims/cpu'))
    short = answer.row('decoder', Kind.MATCHED)
    longer = answer.row('decoder', Kind.LONGER)
    assert longer.value == short.value
    assert (short.length, longer.length) == ('at this length', None)


@pytest.fixture
def longer_answers(tmp_path):
    """A directory with one answer that was trained for two lengths, and one for the first alone."""

    def row(kind, value, length=None):
        context = {'model': 'decoder', 'size': 'd_model=96', 'corpus': 'stdlib', 'tokens': '1'}
        return Row(
            'a/b',
            kind=kind,
            context=context,
            unit='nats/token',
            speaks='beside',
            value=value,
            low=value - 0.01,
            high=value + 0.01,
            decision='worse',
            study='lm',
            length=length,
        )

    rows = (row('matched', 0.5, 'at this length: shrinks'), row('longer', 0.25))
    answers = [
        Answer('drop W_Q', 'a/b', -0.25, rows),
        Answer('Q = K', 'a/b', -0.25, (row('matched', 0.75, 'at this length'),)),
    ]
    write(tmp_path, ANSWERS, answers)
    return tmp_path


def test_answers_have_a_column_for_four_times_the_steps(longer_answers):
    text = pages.answers_markdown(longer_answers, '.')
    assert text.startswith(
        '|  | size of attention | decoder, equal count | verdict | decoder, 4 times the steps |'
    )
    assert 'worse at this length: shrinks | +0.250<br>[+0.240, +0.260] |' in text
    assert '4 times the steps: the same difference in a study of its own' in text


def test_the_short_table_of_answers_has_a_column_for_four_times_the_steps(longer_answers):
    lines = pages.short_answers_markdown(longer_answers).splitlines()
    assert lines[0].endswith('| verdict | 4 times the steps |')
    assert lines[2].endswith('| worse at this length: shrinks | +0.250 [+0.240, +0.260] |')
    assert lines[3].endswith('| worse at this length | - |')


def test_the_figure_of_answers_has_a_panel_for_four_times_the_steps(longer_answers):
    drawing = pages.answers_figure(read_answers(longer_answers))
    first, longer = drawing.figure().axes
    assert first.get_title(loc='left') == 'equal parameter count'
    assert longer.get_title(loc='left') == 'equal count, 4 times the steps'
    assert row_names(first) == ['drop W_Q: worse', 'Q = K: worse']
    assert row_names(longer) == ['drop W_Q: worse']


def test_claims_with_differences_have_figures(written):
    files = {path.name for path in (written / 'plots').iterdir()}
    assert [claim.name for claim in SHOWN if has_figure(claim)] == ['B4', 'C3']
    assert files == {'answers.png', 'b4_differences.png', 'c3_differences.png'}


def test_figures_show_the_numbers_of_the_rows():
    figure = claim_figure(STORED['E4']).figure()
    marks = [points for ax in figure.axes for points in ax.collections]
    means = [points.get_offsets()[0][0] for points in marks if points.get_label() == 'mean']
    # `group_parts` has a row of each kind for every context.
    differences = group_parts(STORED['E4'].rows)
    drawn = []
    for kind in (Kind.SAME_SHAPE, Kind.MATCHED):
        drawn += [parts[kind].value for parts in differences if kind in parts]
    assert means == drawn
    assert len(drawn) > 10


def test_a_figure_shows_what_is_reported_at_its_shape():
    same, equal = claim_figure(STORED['B2']).figure().axes
    low, high = same.get_xlim()
    assert low < 0 and high > 0.015  # what is reported, beyond the interval
    labels = [[line.get_label() for line in ax.lines] for ax in (same, equal)]
    assert ['reported' in each for each in labels] == [True, False]  # it is of one shape


def no_o(kind=Kind.MATCHED, speaks=Speaks.OPEN, value=0.1, decision=None, **context):
    """A row of a difference of qk/no_o."""
    return Row('qk/no_o', kind, context, value, speaks, 'nats/token', decision=decision)


def test_lines_of_a_figure_have_names_that_differ():
    rows = [no_o(model='a', size=size) for size in '123']
    drawing = claim_figure(dataclasses.replace(STORED['B4'], rows=tuple(rows)))
    assert row_names(drawing.figure().axes[0]) == ['size 1', 'size 2', 'size 3']
    drawing = claim_figure(dataclasses.replace(STORED['B4'], rows=tuple(rows[:1])))
    assert row_names(drawing.figure().axes[0]) == ['qk/no_o']


def test_of_two_rows_of_one_kind_the_one_that_decides_is_shown(tmp_path):
    # Kind of the row, what it says of the claim (BESIDE: it decides nothing), and its value.
    rows = [
        no_o(Kind.SAME_SHAPE, Speaks.FOR, 0.1, 'worse', shape='equal'),
        no_o(Kind.MATCHED, Speaks.BESIDE, 0.2, shape='equal'),
        no_o(Kind.SAME_SHAPE, Speaks.BESIDE, 0.3, shape='matched'),
        no_o(Kind.MATCHED, Speaks.OPEN, 0.4, 'undecided', shape='matched'),
    ]
    (parts,) = group_parts(rows)
    assert [parts[kind].value for kind in (Kind.SAME_SHAPE, Kind.MATCHED)] == [0.1, 0.4]
    assert parts[Kind.MATCHED].context == {}
    write(tmp_path, CLAIMS, [dataclasses.replace(STORED['B4'], rows=tuple(rows))])
    assert '| worse / undecided |' in pages.group_markdown(tmp_path, '.', 'b')

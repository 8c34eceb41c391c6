"""Export and pages of claims: files, answers, tables, figures, blocks, and what a check finds."""

import dataclasses
import json
import re

import numpy as np
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
from tests.studies import tuned_arm, write_tuned

STORED = {claim.name: claim for claim in read_claims(conftest.CLAIMS)}
STORED_ANSWERS = read_answers(conftest.CLAIMS)
UNDECIDED = dataclasses.replace(
    STORED['B4'],
    verdict=ClaimVerdict.UNDECIDED,
    condition=None,
    meaning='not known whether W_Q * W_K is needed',
    seconds=5025.0,
    needed='48 seeds in place of 12',
    missing=('study x has no results',),
)
FAILS_HERE = dataclasses.replace(
    STORED['B6'], verdict=ClaimVerdict.FAILS_HERE, condition=None, meaning=None
)
FAILS = dataclasses.replace(
    STORED['C1'],
    verdict=ClaimVerdict.FAILS,
    condition=None,
    statement='<b>x</b> & $y$ | `z`',
)
# Claims of all kinds, in the order of their names: A1, A2, B4, B6, C1, C3.
SHOWN = (STORED['A1'], STORED['A2'], UNDECIDED, FAILS_HERE, FAILS, STORED['C3'])


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A directory with the claims in `SHOWN` and their page. The figures are empty files."""
    directory = tmp_path_factory.mktemp('claims')
    write(directory, CLAIMS, SHOWN)
    write(directory, ANSWERS, STORED_ANSWERS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(style, 'render', lambda figure, kind: b'')
        pages.write_page(directory)
    return directory


def test_claims_are_read_as_written(tmp_path):
    write(tmp_path, CLAIMS, STORED.values())
    assert read_claims(tmp_path) == tuple(STORED.values())
    assert read_answers(tmp_path) == ()


def test_answers_are_read_with_numbers_of_rows_in_six_digits(tmp_path):
    """The numbers in the rows of an answer are rounded to six digits when written.

    An answer is about a change of attention. Its rows have differences in loss.
    """
    row = dataclasses.replace(
        STORED_ANSWERS[0].rows[0], value=1234567.0, low=0.01234567891, high=1234567.891
    )
    answer = Answer('name', 'variant', attention=0.1234567, rows=(row,))
    write(tmp_path, ANSWERS, [*STORED_ANSWERS, answer])

    *stored_answers, answer_read = read_answers(tmp_path)

    # The numbers of the committed answers are rounded already, so nothing changes.
    assert tuple(stored_answers) == STORED_ANSWERS

    # `attention` is a field of the answer and not of a row, so it is not rounded.
    assert answer_read.attention == 0.1234567
    row_read = answer_read.rows[0]
    # Digits before the decimal point are always kept. A large number also keeps one decimal.
    assert row_read.value == 1234567.0
    assert row_read.low == 0.0123457
    assert row_read.high == 1234567.9


def test_a_directory_without_claims_is_refused(tmp_path):
    with pytest.raises(ReportError, match='claims.json does not exist; make it again with python'):
        read_claims(tmp_path / 'none')


def test_an_altered_claims_file_is_refused(tmp_path):
    path = write(tmp_path, CLAIMS, STORED.values())
    altered = path.read_text().replace('"seconds": 1', '"seconds": 11', 1)
    path.write_text(altered)
    with pytest.raises(RunDirectoryError, match='is damaged .*; make it again with'):
        read_claims(tmp_path)


@pytest.mark.parametrize(
    ('changes_of_row', 'changes_of_claim', 'message'),
    [
        ({'speaks': 'yes'}, {}, "B2: 'yes' is not a valid Speaks"),
        ({'value': None}, {}, "B2: field 'value' is None, expected float"),
        ({}, {'verdict': 'true'}, "B2: 'true' is not a valid ClaimVerdict"),
    ],
)
def test_a_claims_file_with_a_wrong_field_is_refused(
    changes_of_row, changes_of_claim, message, tmp_path
):
    """A claims file with an invalid value is refused, and the message names the claim B2.

    The file is not written by `write`, which would add a checksum.
    """
    claim = dataclasses.asdict(STORED['B2'])
    first_row = claim['rows'][0]
    first_row.update(changes_of_row)
    claim.update(changes_of_claim)
    (tmp_path / CLAIMS).write_text(json.dumps([claim]))

    with pytest.raises(RunDirectoryError, match=re.escape(message)):
        read_claims(tmp_path)


def mismatch_after(name, changes_of_second_row, changes_of_claim):
    """The message of `export.mismatch` on a stored claim and a changed copy of this claim."""
    claim = dataclasses.replace(STORED[name], needed='48 seeds, to find 0.0042 nats/token')
    first, second, *others = claim.rows
    second = dataclasses.replace(second, **changes_of_second_row)
    changed = dataclasses.replace(claim, rows=(first, second, *others))
    changed = dataclasses.replace(changed, **changes_of_claim)
    return export.mismatch(claim, changed)


VALUE = STORED['B2'].rows[1].value


@pytest.mark.parametrize(
    ('name', 'changes_of_second_row', 'changes_of_claim'),
    [
        pytest.param(
            'B2', {}, {'seconds': 1.0, 'commit': 'b', 'hardware': 'c'}, id='time and machine'
        ),
        pytest.param('B2', {'value': VALUE * (1 + 1e-7)}, {}, id='rounding'),
        pytest.param('A1', {'value': 9e-13}, {}, id='tolerance of an exact check'),
        pytest.param(
            'B2',
            {},
            {'needed': '49 seeds, to find 0.0041 nats/token'},
            id='one seed',
        ),
    ],
)
def test_a_claim_made_again_may_differ_by_rounding(name, changes_of_second_row, changes_of_claim):
    assert mismatch_after(name, changes_of_second_row, changes_of_claim) is None


@pytest.mark.parametrize(
    ('name', 'changes_of_second_row', 'changes_of_claim', 'field'),
    [
        ('B2', {'value': VALUE * (1 + 1e-4)}, {}, 'rows.1.value of B2'),
        ('A1', {'value': 9e-12}, {}, 'rows.1.value of A1'),
        ('B2', {'decision': 'worse'}, {}, 'rows.1.decision of B2'),
        ('B2', {}, {'verdict': ClaimVerdict.FAILS}, 'verdict of B2'),
        ('B2', {}, {'rows': STORED['B2'].rows[:-1]}, 'rows.3.quantity of B2'),
        ('B2', {}, {'needed': '60 seeds, to find 0.0041 nats/token'}, 'needed of B2'),
        ('B2', {}, {'needed': '48 seeds, to find 0.9 nats/token'}, 'needed of B2'),
    ],
)
def test_the_first_field_that_differs_is_named(
    name, changes_of_second_row, changes_of_claim, field
):
    message = mismatch_after(name, changes_of_second_row, changes_of_claim)
    assert message.startswith(field)


def test_a_page_has_a_row_for_each_claim(written):
    page = (written / 'claims.md').read_text()
    names_and_anchors = re.findall(r'^\| \[(\w+)\]\(#(\w+)\)', page, re.M)
    assert names_and_anchors == [(claim.name, claim.name.lower()) for claim in SHOWN]
    for _, anchor in names_and_anchors:
        assert f'<a id="{anchor}"></a>\n\n## ' in page


def test_a_page_has_a_section_for_each_claim(written):
    page = (written / 'claims.md').read_text()
    names = re.findall(r'^## (\w\d): [A-Z]', page, re.M)
    assert names == [claim.name for claim in SHOWN]


def test_the_section_of_an_undecided_claim_says_what_is_needed(written):
    page = (written / 'claims.md').read_text()
    section = page.split('## B4: ')[1].split('\n## ')[0]
    assert '; needs 48 seeds' in section
    assert 'study x has no results' in section
    assert 'time, h:m:s: 1:23:45' in section
    assert '(./plots/b4_differences.png)' in section


def test_a_page_begins_with_the_numbers_of_verdicts(written):
    page = (written / 'claims.md').read_text()
    start = page.partition('\n|')[0]
    assert '6 claims at cpu scale: 1 holds, 1 holds under a condition, 1 fails' in start
    assert 'study x has no results' in start


def test_statements_are_escaped(written):
    page = (written / 'claims.md').read_text()
    assert '| ✕ fails |' in page
    assert '<b>' not in page
    assert '&lt;b>x&lt;/b> & $y$' in page


def test_the_table_of_verdicts_links_to_the_page_of_each_group(written):
    text = pages.BLOCKS['claims_verdicts'](written, 'results')
    cells = (
        '[B4](claims_b.md#b4)',
        UNDECIDED.title,
        '○ undecided',
        r'not known whether W_Q \* W_K is needed; needs 48 seeds in place of 12',
        '+0.0089 [+0.0057, +0.0129] nats/token, query_free/vo',
    )
    line = f'| {" | ".join(cells)} |'
    assert line in text


def test_the_section_of_a_claim_says_what_its_verdict_means(written):
    page = (written / 'claims.md').read_text()
    assert '\n\nThis means: not known whether W_Q \\* W_K is needed.\n\n' in page


def test_a_claim_without_a_meaning_shows_none(written):
    text = pages.BLOCKS['claims_verdicts'](written, 'results')
    section = pages.BLOCKS['claims_b'](written, 'results').split('\n## B6: ')[1]
    assert '| ⊗ fails in this setting | - |' in text
    assert 'This means' not in section


def test_the_page_of_a_group_begins_with_a_title_and_an_introduction(written):
    start = pages.BLOCKS['claims_b'](written, 'results').partition('\n## ')[0]
    assert '# B. Is W_Q needed?' in start
    assert pages.GROUPS['b'].introduction in start
    assert '[Claims](claims.md) explains' in start
    # claims.md has all groups, so it does not link to itself.
    assert '(claims.md)' not in (written / 'claims.md').read_text()


def test_the_decisive_row_is_shown_with_its_context():
    assert pages.decisive(STORED['C1']) == '0, asymmetry of A[n] (part: symmetry)'
    assert pages.decisive(STORED['C7']) == '0, entries of A, W_Q W_K^T that differ'


def test_the_table_of_answers_has_a_row_for_each_change(written):
    assert '| drop W_Q | -25 % |' in pages.BLOCKS['answers'](written, 'results')


def test_differences_have_a_sign():
    """Differences at the baseline's shape have a sign even if the arms have more parameters."""
    for row in STORED['D2'].rows:
        assert pages.amount(row).startswith(('+', '-'))


def test_the_arm_of_a_decisive_row_has_a_dagger_below_its_yardstick():
    # The translators fall short of theirs, the decoders do not.
    assert 'encoder_variant=qk/no_v† (' in pages.decisive(STORED['C4'])
    assert '†' not in pages.decisive(STORED['B4'])


def test_a_count_has_no_sign():
    count = STORED['A2'].rows[0]
    assert not pages.amount(count).startswith(('+', '-'))


def test_a_table_of_a_claim_has_the_columns_that_are_filled():
    tables = pages._tables(STORED['D2'])
    assert len(tables) == 1
    header = tables[0].splitlines()[0]
    assert header == (
        '| arm | doubled | value | verdict | length | tokens | loss, nats/token | yardstick '
        '| for or against the claim |'
    )


def answer_row(value, *, model='decoder', kind=Kind.MATCHED, **fields):
    """A row of an answer: the difference in loss between the variant a/b and the baseline.

    Args:
        value: The difference in loss. If it is positive, a/b is worse.
        model: The kind of model. Each kind has its own column in the table of answers.
        kind: How a/b is compared with the baseline. MATCHED means at equal parameter count.
        **fields: Further fields of the row, such as decision='worse'.
    """
    context = {'model': model, 'size': 'd_model=96', 'corpus': 'stdlib', 'tokens': '1'}
    return Row(
        quantity='a/b',
        kind=kind,
        context=context,
        value=value,
        unit='nats/token',
        speaks=Speaks.BESIDE,  # the row is shown, but is no evidence for or against a claim
        study='lm',
        **fields,
    )


def test_answers_print_no_difference_whose_verdict_is_withheld(tmp_path):
    """The table of answers omits a difference in loss whose verdict is withheld ('no verdict').

    Here the answers are about the changes of attention a, b and c.
    """
    # Rows are about a decoder unless `model` is given. is_short means: loss above the yardstick,
    # which is the loss of a simple model.
    withheld = answer_row(0.125, model='masked LM', decision='no verdict')
    short = answer_row(0.25, decision='worse', is_short=True, length='at this length')
    settled = answer_row(0.5, decision='worse', length='settled')
    answers = [
        Answer('a', 'a/b', attention=None, rows=(short, withheld)),
        Answer('b', 'a/b', attention=None, rows=(settled,)),
        Answer('c', 'a/b', attention=None, rows=(withheld,)),
    ]
    write(tmp_path, CLAIMS, SHOWN)
    write(tmp_path, ANSWERS, answers)

    lines = pages.answers_markdown(tmp_path, '.').splitlines()

    # The masked LM has no column, and c has no row. The dagger † marks the row with is_short.
    heading, _, row_of_a, row_of_b, empty_line, caption = lines[:6]
    assert heading == '|  | size of attention | decoder, equal count | verdict |'
    assert row_of_a == '| a | - | +0.250† | worse at this length |'
    assert row_of_b == '| b | - | +0.500 | worse, settled |'
    assert not empty_line

    # The caption explains the dagger, and does not mention the masked LM.
    assert '†: a loss above' in caption
    assert 'Masked' not in caption


@pytest.mark.stored
def test_answers_have_a_row_of_longer_training(committed, monkeypatch):
    """An answer has a row for the usual training, and a row for training four times as long.

    Here both rows come from the study lm_added, so both have the same difference.
    """
    model = dataclasses.replace(
        export.MODELS['decoder'], studies=('lm_added',), longer_studies=('lm_added',)
    )
    monkeypatch.setattr(export, 'MODELS', {'decoder': model})
    # The only change of attention is 'products', with the variant double/double.
    monkeypatch.setattr(export, 'CHANGES', {'products': 'double/double'})

    answers = export.answers(Results(committed / 'claims/cpu'))

    assert len(answers) == 1
    short_row = answers[0].row('decoder', Kind.MATCHED)
    longer_row = answers[0].row('decoder', Kind.LONGER)
    assert longer_row.value == short_row.value
    # `length` says whether longer training confirms the difference of the short row.
    assert short_row.length == 'at this length'
    assert longer_row.length is None


def write_study_of_length(directory, num_steps, seeds):
    """Writes a tuned study in which query_free/vo is worse than qk/vo by about 0.05."""
    records = []
    for variant, lowest_loss in {'qk/vo': 2.0, 'query_free/vo': 2.05}.items():
        losses = [lowest_loss + 0.001 * index for index in range(len(seeds))]
        length = {'num_steps': num_steps, 'num_tokens': num_steps * 768}
        records += tuned_arm(variant, losses=losses, seeds=seeds, **length)
    write_tuned(directory, records, seeds=list(seeds))
    base = json.loads((directory / 'study.json').read_text())['base']
    base['train']['num_steps'] = num_steps
    write_tuned(directory, records, seeds=list(seeds), base=base)


def test_studies_that_train_longer_are_exported_with_the_claims(tmp_path, monkeypatch):
    """An export has each study that says whether a difference is settled.

    The arm query_free/vo is worse by 0.05 in lm_dropped. Two studies train it four times as long:
    lm_long, whose differences are answers, and another study beside them.
    """
    workdir = tmp_path / 'workdir'
    write_study_of_length(workdir / 'lm_dropped', 400, seeds=range(8))
    write_study_of_length(workdir / 'lm_long', 1600, seeds=range(56, 64))
    write_study_of_length(workdir / 'mine', 1600, seeds=range(64, 72))
    monkeypatch.setattr(export, 'CHANGES', {'drop W_Q': 'query_free/vo'})
    claim = dataclasses.replace(STORED['B4'], studies=('lm_dropped',))

    export.export([claim], Results(workdir), tmp_path / 'kept')

    # `check` of the export finds the same answers, as every study that they need is there.
    answers = export.answers(Results(workdir))
    assert answers == export.answers(Results(tmp_path / 'kept'))
    assert answers[0].row('decoder', Kind.MATCHED).length == 'settled'
    assert answers[0].row('decoder', Kind.LONGER) is not None
    directories = {path.parent.name for path in tmp_path.glob('kept/*/study.json')}
    assert directories == {'lm_dropped', 'lm_long', 'mine'}


def worse_row(value, **fields):
    """A row of an arm that is worse by `value`, with the 95 % interval value +- 0.01."""
    low = value - 0.01
    high = value + 0.01
    return answer_row(value, low=low, high=high, decision='worse', **fields)


@pytest.fixture
def longer_answers(tmp_path):
    """A directory with two answers, on the changes 'drop W_Q' and 'Q = K' of a decoder.

    Both changes are worse than the baseline. For 'drop W_Q', the difference in loss is 0.5, and
    0.25 after 4 times the steps.
    """

    rows_of_drop = (
        worse_row(0.5, length='at this length: shrinks to +0.2500 at 4 times the steps'),
        worse_row(0.25, kind=Kind.LONGER),
    )
    rows_of_sharing = (worse_row(0.75, length='at this length'),)
    # attention=-0.25 means that a change saves a quarter of the parameters of attention.
    answers = [
        Answer('drop W_Q', 'a/b', attention=-0.25, rows=rows_of_drop),
        Answer('Q = K', 'a/b', attention=-0.25, rows=rows_of_sharing),
    ]
    write(tmp_path, ANSWERS, answers)
    return tmp_path


def test_answers_have_a_column_for_four_times_the_steps(longer_answers):
    text = pages.answers_markdown(longer_answers, '.')
    assert text.startswith(
        '|  | size of attention | decoder, equal count | decoder, 4 times the steps | verdict |'
    )
    assert '| +0.250<br>[+0.240, +0.260] | worse at this length: shrinks |' in text
    assert '4 times the steps: the difference at equal parameter count in a longer study' in text


def test_the_short_table_of_answers_has_a_column_for_four_times_the_steps(longer_answers):
    lines = pages.short_answers_markdown(longer_answers).splitlines()
    assert lines[0].endswith('| 4 times the steps | verdict |')
    assert lines[2].endswith('| +0.250 [+0.240, +0.260] | worse at this length: shrinks |')
    assert lines[3].endswith('| - | worse at this length |')


def test_the_figure_of_answers_shows_four_times_the_steps_below_each_difference(longer_answers):
    drawing = pages.answers_figure(read_answers(longer_answers))

    (ax,) = drawing.figure().axes
    assert row_names(ax) == ['drop W_Q: worse', 'Q = K: worse']
    (hollow,) = [marks for marks in ax.collections if marks.get_label() == '4 times the steps']
    ((x, y),) = hollow.get_offsets()
    assert x == 0.25
    assert 0 < y < 1  # between the first row and the second


def test_a_hollow_marker_has_the_style_of_its_own_verdict(tmp_path):
    """'drop W_Q' is worse, but undecided after 4 times the steps, as 'drop W_O' is throughout."""
    undecided = dataclasses.replace(worse_row(0.0), decision='undecided')
    longer = dataclasses.replace(undecided, kind=Kind.LONGER)
    answers = [
        Answer('drop W_Q', 'a/b', attention=-0.25, rows=(worse_row(0.5), longer)),
        Answer('drop W_O', 'a/b', attention=-0.25, rows=(undecided,)),
    ]
    write(tmp_path, ANSWERS, answers)

    (ax,) = pages.answers_figure(read_answers(tmp_path)).figure().axes

    marks = {mark.get_label(): mark for mark in ax.collections}
    hollow_color = marks['4 times the steps'].get_edgecolor()
    assert np.array_equal(hollow_color, marks['undecided'].get_facecolor())
    assert not np.array_equal(hollow_color, marks['worse'].get_facecolor())


def test_answers_without_decoders_have_no_verdicts(tmp_path):
    context = {'model': 'masked LM', 'size': 'd_model=96', 'corpus': 'stdlib', 'tokens': '4,096'}
    row = dataclasses.replace(worse_row(0.5), context=context)
    write(tmp_path, ANSWERS, [Answer('Q = K', 'a/b', attention=None, rows=(row,))])

    text = pages.answers_markdown(tmp_path, '.')

    assert text.startswith('|  | size of attention | masked LM, equal count |\n')


def test_the_figure_of_answers_shows_the_margin_and_daggers(tmp_path):
    row = dataclasses.replace(worse_row(0.75, length='at this length'), is_short=True)
    write(tmp_path, ANSWERS, [Answer('Q = K', 'a/b', attention=-0.25, rows=(row,))])

    figure = pages.answers_figure(read_answers(tmp_path)).figure()

    (ax,) = figure.axes
    assert row_names(ax) == ['Q = K†: worse']
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    # The studies of the decoders declare a margin of 0.01.
    assert '±0.01, equivalent inside' in labels


def test_claims_with_differences_have_figures(written):
    files = {path.name for path in (written / 'plots').iterdir()}
    names = [claim.name for claim in SHOWN if has_figure(claim)]
    assert names == ['B4', 'C3']
    assert files == {'answers.png', 'b4_differences.png', 'c3_differences.png'}


def test_figures_show_the_numbers_of_the_rows():
    """The figure of a claim has a point for each difference of the claim.

    The first panel has differences at the baseline's shape (SAME_SHAPE). The second panel has
    differences at equal parameter count (MATCHED).
    """
    claim = STORED['E4']
    # A group has the rows of one variant and one setting. Its keys are the kinds of rows.
    groups = group_parts(claim.rows)
    expected_means = []
    for kind in (Kind.SAME_SHAPE, Kind.MATCHED):
        for rows_by_kind in groups:
            if kind in rows_by_kind:
                expected_means.append(rows_by_kind[kind].value)

    means = []
    for ax in claim_figure(claim).figure().axes:
        for points in ax.collections:
            if points.get_label() == 'mean':
                # Each collection has one point (x, y). x is the difference, and y is the line.
                x, _ = points.get_offsets()[0]
                means.append(x)

    assert means == expected_means
    assert len(means) > 10


def test_a_figure_shows_what_is_reported_at_its_shape():
    """A reported range is drawn only in the panel of the shape at which it was reported.

    For B2, the range is reported at the baseline's shape, and ends at 0.015.
    """
    same_shape, equal_count = claim_figure(STORED['B2']).figure().axes

    low, high = same_shape.get_xlim()
    assert low < 0
    assert high > 0.015
    assert 'reported' in [line.get_label() for line in same_shape.lines]
    assert 'reported' not in [line.get_label() for line in equal_count.lines]


def no_o(kind=Kind.MATCHED, speaks=Speaks.OPEN, value=0.1, decision=None, **context):
    """A row with a difference between qk/no_o and the baseline."""
    return Row('qk/no_o', kind, context, value, speaks, 'nats/token', decision=decision)


def test_lines_of_a_figure_are_named_by_what_differs():
    rows = (no_o(model='a', size='1'), no_o(model='a', size='2'), no_o(model='a', size='3'))
    drawing = claim_figure(dataclasses.replace(STORED['B4'], rows=rows))
    assert row_names(drawing.figure().axes[0]) == ['size 1', 'size 2', 'size 3']


def test_the_only_line_of_a_figure_is_named_by_its_variant():
    rows = (no_o(model='a', size='1'),)
    drawing = claim_figure(dataclasses.replace(STORED['B4'], rows=rows))
    assert row_names(drawing.figure().axes[0]) == ['qk/no_o']


def test_of_two_rows_of_one_kind_the_deciding_one_is_shown(tmp_path):
    """If two rows have the same kind of difference, a page shows the row that decides the claim.

    A row that speaks BESIDE decides nothing.
    """
    rows = (
        no_o(Kind.SAME_SHAPE, Speaks.FOR, value=0.1, decision='worse', shape='equal'),
        no_o(Kind.MATCHED, Speaks.BESIDE, value=0.2, shape='equal'),
        no_o(Kind.SAME_SHAPE, Speaks.BESIDE, value=0.3, shape='matched'),
        no_o(Kind.MATCHED, Speaks.OPEN, value=0.4, decision='undecided', shape='matched'),
    )

    groups = group_parts(rows)

    # Groups ignore `shape` in the context, so all rows of qk/no_o are in one group.
    assert len(groups) == 1
    rows_by_kind = groups[0]
    assert rows_by_kind[Kind.SAME_SHAPE].value == 0.1
    assert rows_by_kind[Kind.MATCHED].value == 0.4
    # Grouping removes `shape` from the context.
    assert rows_by_kind[Kind.MATCHED].context == {}

    # The page shows the verdicts of the two deciding rows, first SAME_SHAPE and then MATCHED.
    write(tmp_path, CLAIMS, [dataclasses.replace(STORED['B4'], rows=rows)])
    assert '| worse / undecided |' in pages.group_markdown(tmp_path, '.', 'b')

"""Export and pages of claims: files, answers, tables, figures, blocks, and what a check finds."""

import dataclasses
import json
import re
import shutil

import pytest

from qkattn.claims import export, pages
from qkattn.claims.claim import ClaimVerdict, Kind, Row, Speaks
from qkattn.claims.export import ANSWERS, CLAIMS, Answer, read_answers, read_claims, write
from qkattn.claims.pages import claim_figure, compared, has_figure
from qkattn.claims.studies import Results
from qkattn.errors import ReportError, RunDirectoryError
from qkattn.report.figures import style
from qkattn.report.verify import check_page
from tests.claims import conftest
from tests.report.conftest import row_names
from tests.report.test_golden import described

STORED = {claim.name: claim for claim in read_claims(conftest.CLAIMS)}
MADE = read_answers(conftest.CLAIMS)
FAILS = {'verdict': ClaimVerdict.FAILS, 'statement': '<b>x</b> & $y$ | `z`', 'condition': None}
MISSING = dataclasses.replace(
    STORED['B2'],
    needed='48 seeds in place of 12',
    missing=('study x has no results; train it',),
    seconds=5025.0,
)
# One of each verdict and kind, in the order of their names.
SHOWN = (
    *(STORED['A1'], STORED['A2'], MISSING, STORED['B3']),
    *(dataclasses.replace(STORED['C1'], **FAILS), STORED['E4']),
)
LINES = {
    'claims_verdicts': f'| [B2](claims_b.md#b2) | {MISSING.title} | '
    '○ undecided, needs 48 seeds in place of 12 | '
    '-0.0052 [-0.0114, -0.0018] nats/token, query_free/vo |',
    'claims_b': '# B. Is W_Q needed?',
    'answers': '| drop W_Q | -25 % |',
}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A directory of claims whose figures are not rendered."""
    directory = tmp_path_factory.mktemp('claims')
    write(directory, CLAIMS, SHOWN)
    write(directory, ANSWERS, MADE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(style, 'render', lambda figure, kind: b'')
        pages.write_page(directory)
    return directory


@pytest.fixture(scope='module')
def page(written):
    return (written / 'claims.md').read_text()


def test_files_are_read_as_they_were_written_in_six_digits(tmp_path):
    write(tmp_path, CLAIMS, STORED.values())
    assert read_claims(tmp_path) == tuple(STORED.values())
    assert read_answers(tmp_path) == ()
    assert read_answers(write(tmp_path, ANSWERS, MADE).parent) == MADE
    row = dataclasses.replace(MADE[0].rows[0], value=1234567.0, low=0.01234567891, high=1234567.891)
    write(tmp_path, ANSWERS, [Answer('a', 'b', 0.1234567, (row,))])
    (answer,) = read_answers(tmp_path)
    kept = answer.rows[0]
    assert (kept.value, kept.low, kept.high) == (1234567.0, 0.0123457, 1234567.9)
    assert answer.attention == 0.1234567
    with pytest.raises(ReportError, match='claims.json does not exist; make it again with python'):
        read_claims(tmp_path / 'none')


def test_what_was_altered_or_does_not_fit_is_named(tmp_path):
    path = write(tmp_path, CLAIMS, STORED.values())
    text = path.read_text()
    for number in ('"value": 3', '"low": -0', '"seconds": 1'):
        path.write_text(text.replace(number, f'{number}1', 1))
        assert path.read_text() != text
        with pytest.raises(RunDirectoryError, match='is damaged .*; make it again with'):
            read_claims(tmp_path)
    for in_row, values, sentence in (
        (True, {'speaks': 'yes'}, "B2: 'yes' is not a valid Speaks"),
        (True, {'value': None}, "B2: field 'value' is None, expected float"),
        (False, {'verdict': 'true'}, "B2: 'true' is not a valid ClaimVerdict"),
        (False, {'rule': 3}, "B2: field 'rule' is 3, expected str"),
    ):
        claim = dataclasses.asdict(STORED['B2'])
        (claim['rows'][0] if in_row else claim).update(values)
        path.write_text(json.dumps([claim]))
        with pytest.raises(RunDirectoryError, match=re.escape(sentence)):
            read_claims(tmp_path)


def test_what_is_made_again_differs_by_rounding_alone():
    def changed(name, **values):
        """What of row 1, where it has such fields, or of the claim is not the same."""
        claim = dataclasses.replace(STORED[name], needed='48 seeds')
        if values.keys() <= {'value', 'decision'}:
            rows = list(claim.rows)
            rows[1] = dataclasses.replace(rows[1], **values)
            values = {'rows': tuple(rows)}
        return export.mismatch(claim, dataclasses.replace(claim, **values))

    value = STORED['B2'].rows[1].value
    rows = STORED['B2'].rows[:-1]
    for name, values, start in (
        ('B2', {'seconds': 1.0, 'commit': 'b', 'hardware': 'c'}, None),
        ('B2', {'value': value * (1 + 1e-7)}, None),
        ('B2', {'value': value * (1 + 1e-4)}, 'value of row 1 of B2'),
        ('A1', {'value': 9e-13}, None),  # within the tolerance of the check
        ('A1', {'value': 9e-12}, 'value of row 1 of A1'),
        ('B2', {'decision': 'worse'}, 'decision of row 1 of B2'),
        ('B2', {'verdict': ClaimVerdict.FAILS}, 'verdict of B2'),
        ('B2', {'rows': rows}, 'number of rows of B2'),
        ('B2', {'needed': '49 seeds'}, None),
        ('B2', {'needed': '60 seeds'}, 'needed of B2'),
    ):
        message = changed(name, **values)
        assert message.startswith(start) if start else message is None


def test_answers_are_from_the_study_that_shows_them_best(tmp_path):
    """One study that learned on many tokens, one on few, and one of equal shapes."""
    for name, source in (
        ('lm_dropped', conftest.CLAIMS / 'lm_dropped'),
        ('sharing', conftest.RESULTS / 'fair_small'),
        ('overparameterised', conftest.CLAIMS / 'overparameterised'),
    ):
        shutil.copytree(source, tmp_path / name)
    made = {answer.variant: answer for answer in export.answers(Results(tmp_path))}
    dropped, doubled = made['qk/no_o'], made['double/double']
    rows = [
        made[variant].row('decoder', kind)
        for variant in ('qk/no_o', 'qk/k_is_v')
        for kind in (Kind.REMOVED, Kind.MATCHED)
    ]
    assert [(row.study, row.decision == 'no verdict') for row in rows] == [
        ('lm_dropped', False),
        ('lm_dropped', False),
        ('sharing', True),
        ('sharing', True),
    ]
    assert [row.kind for row in doubled.rows] == [Kind.REMOVED]
    assert [dropped.attention, doubled.attention] == [-1 / 4, 3 / 4]


def test_a_page_has_a_row_and_a_section_for_each_claim(page):
    links = re.findall(r'^\| \[(\w+)\]\(#(\w+)\)', page, re.M)
    assert links == [(claim.name, claim.name.lower()) for claim in SHOWN]
    assert re.findall(r'^## (\w\d)$', page, re.M) == [claim.name for claim in SHOWN]
    start, section = page.partition('\n|')[0], page.split('## B2\n')[1].split('\n## ')[0]
    assert '6 claims at cpu scale: 1 holds, 1 holds under a condition, 1 fails' in start
    for part in ('would be decided by 48 seeds', 'time: 1:23:45', '(./plots/b2_differences.png)'):
        assert part in section
    assert MISSING.missing[0] in start and MISSING.missing[0] in section
    assert '| ✕ fails |' in page and '<b>' not in page and '&lt;b>x&lt;/b> & $y$' in page


def test_the_laws_of_a_scaling_study_stand_at_the_end(tmp_path):
    described(tmp_path / 'scaling')
    write(tmp_path, CLAIMS, SHOWN[:1])
    laws = pages.claims_markdown(tmp_path, '.', 'laws')
    # A law, the worth of a parameter, the note.
    for part in ('## Scaling laws', '1.600 [1.598, 1.601]', '1.200 [1.200, 1.200]', 'N parameters'):
        assert part in laws


def test_figures_show_the_numbers_of_the_rows(written):
    files = {path.name for path in (written / 'plots').iterdir()}
    assert [claim.name for claim in SHOWN if has_figure(claim)] == ['B2', 'E4']
    assert files == {'answers.png', 'b2_differences.png', 'e4_differences.png'}
    figure = claim_figure(STORED['E4']).figure
    marks = [points for ax in figure.axes for points in ax.collections]
    means = [points.get_offsets()[0][0] for points in marks if points.get_label() == 'mean']
    lines, kinds = compared(STORED['E4'].rows), (Kind.REMOVED, Kind.MATCHED)
    drawn = [line.rows[kind].value for kind in kinds for line in lines if kind in line.rows]
    assert means == drawn and len(drawn) > 10


def test_lines_of_a_figure_have_the_shortest_names_and_the_row_that_decides():
    def row(kind=Kind.MATCHED, speaks=Speaks.OPEN, value=0.1, decision=None, **context):
        return Row('qk/no_o', kind, context, value, speaks, 'nats/token', decision=decision)

    rows = [row(model=m, size=s, again=m) for m, s in (('a', '1'), ('b', '2'), ('b', '3'))]
    drawing = claim_figure(dataclasses.replace(STORED['B4'], rows=tuple(rows)))
    assert row_names(drawing.figure.axes[0]) == ['size 1', 'size 2', 'size 3']
    rows = [
        row(Kind.REMOVED, Speaks.FOR, 0.1, 'worse', shape='equal'),
        row(Kind.MATCHED, Speaks.BESIDE, 0.2, shape='equal'),
        row(Kind.REMOVED, Speaks.BESIDE, 0.3, shape='matched'),
        row(Kind.MATCHED, Speaks.OPEN, 0.4, 'undecided', shape='matched'),
    ]
    (line,) = compared(rows)
    assert [line.rows[kind].value for kind in (Kind.REMOVED, Kind.MATCHED)] == [0.1, 0.4]
    assert (line.context, line.decision) == ({}, 'worse / undecided')


def test_blocks_of_markdown_pages_are_written_and_checked(written, tmp_path):
    kept = shutil.copytree(written, tmp_path / 'kept')
    changes = {
        'claims_verdicts': ('B2', 'B9'),
        'claims_b': ('52', '55'),
        'answers': ('-25 %', '-26 %'),
    }
    for block, change in changes.items():
        page = kept / f'{block}.md'
        page.write_text(f'before 1.5\n<!-- {block}: . -->\n<!-- end -->\n')
        with pytest.raises(ReportError, match=f'{block}.md is not what its studies give'):
            check_page(page, pages.BLOCKS)
        assert check_page(page, pages.BLOCKS, write=True) == 1
        text = page.read_text()
        assert text.startswith('before 1.5\n') and LINES[block] in text
        assert check_page(page, pages.BLOCKS) == 1
        page.write_text(text.replace(*change, 1))
        with pytest.raises(ReportError, match='not what its studies give'):
            check_page(page, pages.BLOCKS)
    (kept / CLAIMS).unlink()
    (kept / ANSWERS).unlink()  # an empty block before there are results
    for block in changes:
        page.write_text(f'<!-- {block}: . -->\n<!-- end -->\n')
        assert check_page(page, pages.BLOCKS) == 1

"""Export and pages of claims: files, answers, tables, figures, blocks, and what a check finds."""

import dataclasses
import json
import re
import shutil

import pytest

from qkattn.claims import export, pages
from qkattn.claims.claim import ClaimVerdict, Kind, Row, Speaks
from qkattn.claims.export import ANSWERS, CLAIMS, Answer, read_answers, read_claims, write
from qkattn.claims.figures import claim_figures, compared, curves, figure_stems
from qkattn.claims.studies import Results
from qkattn.errors import ReportError, RunDirectoryError
from qkattn.report.figures import style
from qkattn.report.figures.style import style_sheet
from qkattn.report.verify import check_page
from tests.claims import conftest
from tests.report.conftest import row_names
from tests.report.test_golden import described

STORED = {claim.name: claim for claim in read_claims(conftest.CLAIMS)}
HOSTILE = '<b>x</b> & $y$ | `z`'
ABOUT = {'model': 'decoder', 'size': 'd_model=64', 'corpus': 'stdlib', 'tokens': '9'}
ROWS = [
    Row(variant, kind, ABOUT | {'model': model}, x, Speaks.BESIDE, 'nats/token', low, high,
        arm=variant, decision=decision, study='lm_dropped')
    for variant, kind, model, x, low, high, decision in (
        ('shared_qk/vo', Kind.MATCHED, 'decoder', 0.062, 0.057, 0.072, 'worse'),
        ('shared_qk/vo', Kind.REMOVED, 'masked LM', 0.17, 0.16, 0.18, None),
        ('full_size/vo', Kind.MATCHED, 'decoder', 0.03, 0.02, 0.04, 'no verdict'),
    )
]  # fmt: skip
MADE = (
    Answer('Q = K', 'shared_qk/vo', -0.25, (ROWS[0], ROWS[1])),
    Answer('full size', 'full_size/vo', 1.5, (ROWS[2],)),
)
FAILS = dataclasses.replace(
    STORED['C1'], verdict=ClaimVerdict.FAILS, statement=HOSTILE, condition=None
)
MISSING = dataclasses.replace(
    STORED['B2'],
    lacking='needs 48 seeds',
    needed='48 seeds in place of 12',
    missing=('study x has no results; train it',),
    seconds=5025.0,
)
# One of each verdict and kind, in the order of their names.
SHOWN = tuple(
    (STORED | {'C1': FAILS, 'B2': MISSING})[n] for n in ('A1', 'A2', 'B2', 'B3', 'C1', 'E4')
)
LINES = {
    'claims_verdicts': f'| [B2](claims_b.md#b2) | {MISSING.title} | ○ undecided: needs 48 seeds | '
    '-0.0052 [-0.0114, -0.0018] nats/token, query_free/vo |',
    'claims_b': '# B. Is W_Q needed?',
    'answers': '| Q = K | -25 % | - | +0.062<br>±0.010 | worse '
    '| +0.170<br>±0.010 | - | - | - |\n'
    '| full size | +150 % | - | +0.030†<br>±0.010 | no verdict | - | - | - | - |',
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


@pytest.fixture
def kept(written, tmp_path):
    """A directory of claims, and a page with each block."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    for name in LINES:
        (tmp_path / f'{name}.md').write_text(f'before 1.5\n<!-- {name}: . -->\n<!-- end -->\n')
    return tmp_path


def section(page, name):
    return page.split(f'## {name}\n')[1].split('\n## ')[0]


def numbers(text):
    """Signed decimals of a text, without those of names, versions and code."""
    return set(re.findall(r'(?<![\w.=:#-])[-+]?\d+\.\d+(?:e[-+]?\d+)?', text))


def test_files_are_read_as_they_were_written_in_six_digits(tmp_path):
    write(tmp_path, CLAIMS, STORED.values())
    assert read_claims(tmp_path) == tuple(STORED.values())
    assert read_answers(tmp_path) == ()
    assert read_answers(write(tmp_path, ANSWERS, MADE).parent) == MADE
    row = dataclasses.replace(ROWS[0], value=1234567.0, low=0.01234567891, high=1234567.891)
    write(tmp_path, ANSWERS, [Answer('a', 'b', 0.1234567, (row,))])
    (answer,) = read_answers(tmp_path)
    (found,) = answer.rows
    assert (found.value, found.low, found.high) == (1234567.0, 0.0123457, 1234567.9)
    assert answer.attention == 0.1234567
    with pytest.raises(ReportError, match='claims.json does not exist; make it again with python'):
        read_claims(tmp_path / 'none')


@pytest.mark.parametrize('number', ['"value": 3', '"low": -0', '"seconds": 1', '"decisive": 0'])
def test_an_altered_number_is_found(tmp_path, number):
    path = write(tmp_path, CLAIMS, STORED.values())
    text = path.read_text()
    assert number in text
    path.write_text(text.replace(number, f'{number}1', 1))
    with pytest.raises(RunDirectoryError, match='is damaged .*; make it again with'):
        read_claims(tmp_path)


@pytest.mark.parametrize(
    ('where', 'values', 'sentence'),
    [
        ('rows', {'speaks': 'yes'}, "B2: row 0: 'yes' is not a valid Speaks"),
        ('rows', {'kind': 'both'}, "B2: row 0: 'both' is not a valid Kind"),
        ('rows', {'value': None}, "B2: row 0: field 'value' is None, expected float"),
        ('claim', {'verdict': 'true'}, "B2: 'true' is not a valid ClaimVerdict"),
        ('claim', {'decisive': 4}, 'B2: decisive is 4, but there are 4 rows'),
        ('claim', {'rule': 3}, "B2: field 'rule' is 3, expected str"),
    ],
)
def test_what_does_not_fit_is_named_by_claim_and_row(tmp_path, where, values, sentence):
    claim = dataclasses.asdict(STORED['B2'])
    (claim if where == 'claim' else claim['rows'][0]).update(values)
    (tmp_path / CLAIMS).write_text(json.dumps([claim]))
    with pytest.raises(RunDirectoryError, match=re.escape(sentence)):
        read_claims(tmp_path)


def test_what_is_made_again_differs_by_rounding_alone():
    old, exact = STORED['B2'], STORED['A1']

    def changed(claim, row=None, **values):
        if row is not None:
            rows = list(claim.rows)
            rows[row] = dataclasses.replace(rows[row], **values)
            values = {'rows': tuple(rows)}
        return export.mismatch(claim, dataclasses.replace(claim, **values))

    assert changed(old, seconds=1.0, commit='b', hardware='c', command='d') is None
    assert changed(old, 1, value=old.rows[1].value * (1 + 1e-7)) is None
    assert changed(old, 1, value=old.rows[1].value * (1 + 1e-4)).startswith('value of row 1 of B2')
    assert changed(exact, 0, value=9e-13) is None  # within the tolerance of the check
    assert changed(exact, 0, value=9e-12).startswith('value of row 0 of A1')
    assert changed(old, 0, decision='worse').startswith('decision of row 0 of B2')
    assert changed(old, verdict=ClaimVerdict.FAILS).startswith('verdict of B2')
    assert changed(old, rows=old.rows[:-1], decisive=0).startswith('number of rows of B2')
    short = dataclasses.replace(old, needed='48 seeds')
    assert changed(short, needed='49 seeds') is None and changed(short, needed='60 seeds')


@pytest.fixture(scope='module')
def results(committed, tmp_path_factory):
    """One study that learned on many tokens, one on few, and one that did not."""
    directory = tmp_path_factory.mktemp('answers')
    shutil.copytree(conftest.CLAIMS / 'lm_stdlib', directory / 'lm_dropped')
    shutil.copytree(committed / 'claims/cpu/sharing', directory / 'sharing')
    shutil.copytree(conftest.RESULTS / 'fair_small', directory / 'decoder')
    return Results(directory)


def test_answers_are_from_the_study_that_shows_them_best(results):
    made = {answer.variant: answer for answer in export.answers(results)}
    shared, dropped = made['shared_qk/vo'], made['qk/no_o']
    cells = [(a.row('decoder', k)) for a in (shared, dropped) for k in (Kind.REMOVED, Kind.MATCHED)]
    assert [row.study for row in cells] == ['sharing', 'lm_dropped', 'decoder', 'lm_dropped']
    assert [row.decision for row in cells] == [None, 'worse', 'no verdict', 'undecided']
    assert shared.row('masked LM', Kind.MATCHED) is None
    for arm in results.study('lm_dropped').findings.arms:
        if not arm.is_baseline:
            row, difference = made[arm.variant].row('decoder', Kind.MATCHED), arm.difference
            expected = [difference.mean, difference.low, difference.high]
            assert [row.value, row.low, row.high] == expected
            assert row.context['tokens'] == '4,096,000' and row.context['corpus'] == 'stdlib'
    quarter = ('query_free/vo', 'key_free/vo', 'shared_qk/vo', 'qk/no_v', 'qk/no_o', 'qk/k_is_v')
    assert {variant: answer.attention for variant, answer in made.items()} == {
        **dict.fromkeys((*quarter, 'qk/vo?num_kv_heads=2'), -1 / 4),
        'qk/vo?num_kv_heads=1': -3 / 8,
        'shared_qk/k_is_v': -1 / 2,
        'qk/vo?num_heads=1': 0.0,
    }


def test_claims_have_a_row_each_that_links_to_sections(page):
    links = re.findall(r'^\| \[(\w+)\]\(#(\w+)\)', page, re.M)
    assert links == [(claim.name, claim.name.lower()) for claim in SHOWN]
    assert re.findall(r'^## (\w\d)$', page, re.M) == [claim.name for claim in SHOWN]
    for verdict in ('● holds', '◐ holds only if nothing stands', '✕ fails', '○ undecided: needs'):
        assert f'| {verdict}' in page
    start = page.partition('\n|')[0]
    assert '6 claims at cpu scale: 1 holds, 1 holds under a condition, 1 fails' in start
    assert MISSING.missing[0] in start and MISSING.missing[0] in section(page, 'B2')
    assert '<b>' not in page and '&lt;b>x&lt;/b> & $y$' in page


def test_a_section_says_who_how_where_and_with_which_numbers(page):
    text = ' '.join(section(page, 'B2').split())
    for part in (
        *(MISSING.source, MISSING.rule, MISSING.reported, MISSING.command, MISSING.commit),
        *('would be decided by 48 seeds in place of 12', 'time: 1 h 24 min', 'hardware: 1 x cpu'),
        *('| -0.0052 [-0.0114, -0.0018] | -0.0125 [-0.0479, -0.0070] |', 'open "as reported"'),
        'All rows: model decoder, size d_model=48, corpus stdlib, steps 500.',
        *('(./plots/b2_differences.png)', '| growth of the difference from 50% of the steps on |'),
    ):
        assert part in text, part
    assert '| 500 | 4.736e-16 | 0 | 0.5727 |' in section(page, 'B3')
    assert '| 3.612e-16 | 0 ± 1e-12 | for |' in section(page, 'A1')
    assert 'plots' not in section(page, 'A1')


def test_every_printed_number_is_one_of_the_claims(page):
    rows = [row for claim in SHOWN for row in claim.rows]
    known = numbers(' '.join(f'{pages.amount(row)} {pages._expected(row)} {row.x}' for row in rows))
    known |= numbers(str([(c.rule, c.reported, c.models, c.source, c.lacking) for c in SHOWN]))
    known |= numbers(str([(c.statement, c.title, c.needed) for c in SHOWN]))
    assert len(numbers(page)) > 60 and numbers(page) <= known
    values = {float(text) for row in rows for text in numbers(pages.amount(row))}
    data = [x for row in rows for x in (row.value, row.low, row.high) if x is not None]
    assert all(min(abs(v - x) for x in data) <= max(5.1e-5, 1e-3 * abs(v)) for v in values)


def test_the_laws_of_a_scaling_study_stand_at_the_end(tmp_path):
    described(tmp_path / 'scaling')
    write(tmp_path, CLAIMS, SHOWN[:1])
    laws = pages.claims_markdown(tmp_path, '.', 'laws')
    # A law, the worth of a parameter, the note.
    for part in ('## Scaling laws', '1.600 [1.599, 1.600]', '1.200 [1.200, 1.200]', 'N parameters'):
        assert part in laws


def test_figures_show_the_numbers_of_the_rows(written):
    files = {path.name for path in (written / 'plots').iterdir()}
    stems = ['answers', *(stem for claim in SHOWN for stem in figure_stems(claim))]
    assert stems == ['answers', 'b2_differences', 'b3_curves', 'e4_differences']
    assert files == {f'{stem}.png' for stem in stems}
    (figure,) = claim_figures(STORED['E4'])
    means = [
        points.get_offsets()[0][0]
        for ax in figure.figure.axes
        for points in ax.collections
        if points.get_label() == 'mean'
    ]
    lines = compared(STORED['E4'].rows)
    drawn = [line.rows[kind].value for kind in (Kind.REMOVED, Kind.MATCHED) for line in lines
             if kind in line.rows]  # fmt: skip
    assert means == drawn and len(drawn) > 10
    (figure,) = claim_figures(STORED['B3'])
    with style_sheet():
        figure.figure.draw_without_rendering()
    axes = figure.figure.axes
    assert [ax.get_title(loc='left') for ax in axes] == ['float64', 'float32', 'bfloat16']
    assert {(ax.get_xscale(), ax.get_yscale()) for ax in axes} == {('symlog', 'log')}
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in axes}) == 1
    assert list(axes[0].lines[2].get_xydata()[-1]) == [500, STORED['B3'].decisive_row.value]
    names = [text.get_text() for text in figure.figure.legends[0].get_texts()]
    assert names == ['rounding alone', 'rounding, trained', 'trained apart']


def test_lines_of_a_figure_have_the_shortest_names_that_tell_them_apart():
    about = {'kind': Kind.MATCHED, 'value': 0.1, 'speaks': Speaks.OPEN, 'unit': 'nats/token'}
    contexts = [
        {'model': m, 'size': s, 'again': m} for m, s in (('a', '1'), ('b', '2'), ('b', '3'))
    ]
    rows = tuple(Row('x', context=context, **about) for context in contexts)
    (figure,) = claim_figures(dataclasses.replace(STORED['B4'], rows=rows, decisive=None))
    assert row_names(figure.figure.axes[0]) == ['size 1', 'size 2', 'size 3']


def test_rows_of_both_shapes_are_one_line_and_the_deciding_row_is_shown():
    def row(kind, speaks, value, decision=None, **context):
        return Row('arm', kind, context, value, speaks, arm='qk/no_o', decision=decision)

    rows = [
        row(Kind.REMOVED, Speaks.FOR, 0.1, 'worse', shape='equal'),
        row(Kind.MATCHED, Speaks.BESIDE, 0.2, shape='equal'),
        row(Kind.REMOVED, Speaks.BESIDE, 0.3, shape='matched'),
        row(Kind.MATCHED, Speaks.OPEN, 0.4, 'undecided', shape='matched'),
    ]
    (line,) = compared(rows)
    assert [line.rows[kind].value for kind in (Kind.REMOVED, Kind.MATCHED)] == [0.1, 0.4]
    assert (line.context, line.decision) == ({}, 'worse / undecided')


def test_many_lines_have_a_panel_for_each_value_of_a_context():
    rows = STORED['B3'].rows
    assert [axis.context for axis in curves(rows)] == ['float64', 'float32', 'bfloat16']
    few = [row for row in rows if row.context['precision'] != 'float64']
    assert [len(lines) for lines in curves(few).values()] == [6]


@pytest.mark.parametrize(
    ('block', 'old', 'changed'),
    [('claims_verdicts', 'B2', 'B9'), ('claims_b', '-0.0052', '-0.0053'), ('answers', '62', '63')],
)
def test_blocks_of_markdown_pages_are_written_and_checked(kept, block, old, changed):
    page = kept / f'{block}.md'
    with pytest.raises(ReportError, match=f'{block}.md is not what its studies give'):
        check_page(page, pages.BLOCKS)
    assert check_page(page, pages.BLOCKS, write=True) == 1
    text = page.read_text()
    assert text.startswith('before 1.5\n') and LINES[block] in text
    assert check_page(page, pages.BLOCKS) == 1
    page.write_text(text.replace(old, changed, 1))
    with pytest.raises(ReportError, match='not what its studies give'):
        check_page(page, pages.BLOCKS)
    (kept / CLAIMS).unlink()
    (kept / ANSWERS).unlink()  # an empty block before there are results
    page.write_text(f'<!-- {block}: . -->\n<!-- end -->\n')
    assert check_page(page, pages.BLOCKS) == 1


def test_cells_have_signs_of_differences_and_what_decides():
    row = ROWS[0]
    assert pages.amount(row) == '+0.0620 [+0.0570, +0.0720]' and pages._spoken([row]) == '-'
    decided = dataclasses.replace(row, speaks=Speaks.OPEN, relation='not_worse')
    assert pages._spoken([row, decided]) == 'open "not worse"'
    assert pages.amount(dataclasses.replace(row, kind=Kind.MEASURED, low=None)) == '0.0620'


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [(0.2, '< 1 s'), (3.4, '3 s'), (59.2, '59 s'), (90, '2 min'), (5025, '1 h 24 min')],
)
def test_durations(seconds, text):
    assert pages.duration(seconds) == text

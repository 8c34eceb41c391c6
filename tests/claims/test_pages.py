"""Pages of claims: tables, numbers, figures, blocks, what is missing, and what a check finds."""

import dataclasses
import re
import shutil

import pytest

from qkattn.claims.answers import Answer, write_answers
from qkattn.claims.decided import ClaimVerdict, Kind, Row, Speaks, read_claims, write_claims
from qkattn.claims.figures import claim_figures, overview
from qkattn.claims.pages import BLOCKS, claims_markdown, drawings, duration, write_page
from qkattn.claims.shown import amount, compared, expected
from qkattn.errors import ReportError, RunDirectoryError
from qkattn.report.figures import style
from qkattn.report.figures.style import Rendered, style_sheet
from qkattn.report.verify import check_page
from tests.claims.decided_claims import claims
from tests.report.conftest import row_names
from tests.report.test_golden import described

BLANK = Rendered(b'', b'', '', '<svg></svg>')
ROWS = [
    Row(variant, kind, {'model': model, 'size': 'd_model=64', 'corpus': 'stdlib', 'tokens': '9'}, x,
        Speaks.BESIDE, 'nats/token', x - 0.01, x + 0.01, arm=variant, word=word, study='lm_dropped')
    for variant, kind, model, x, word in (
        ('shared_qk/vo', Kind.MATCHED, 'decoder', 0.062, 'worse'),
        ('shared_qk/vo', Kind.REMOVED, 'masked LM', 0.17, None),
        ('full_size/vo', Kind.MATCHED, 'decoder', 0.03, 'no verdict'),
    )
]  # fmt: skip
ANSWERS = (
    Answer('Q = K', 'shared_qk/vo', -0.25, (ROWS[0], ROWS[1])),
    Answer('full size', 'full_size/vo', 1.5, (ROWS[2],)),
)
LINES = {
    'claims': '| [B2](#b2) | in short, B2 | ○ undecided: needs 48 seeds | '
    '-0.0022 [-0.0062, +0.0030] nats/token, query_free/vo |',
    'claims_verdicts': '| [B2](claims_b.md#b2) | in short, B2 | ○ undecided: needs 48 seeds | '
    '-0.0022 [-0.0062, +0.0030] nats/token, query_free/vo |',
    'claims_b': '# B. Is W_Q needed?',
    'answers': '| Q = K | -25 % | - | +0.062<br>±0.010 | worse '
    '| +0.170<br>±0.010 | - | - | - |\n'
    '| full size | +150 % | - | +0.030†<br>±0.010 | no verdict | - | - | - | - |',
}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A directory of claims whose figures are not rendered."""
    directory = tmp_path_factory.mktemp('claims')
    write_claims(directory, claims())
    write_answers(directory, ANSWERS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(style, 'render', lambda drawing: BLANK)
        write_page(directory)
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


def claim_named(name):
    (claim,) = (claim for claim in claims() if claim.name == name)
    return claim


def section(page, name):
    return page.split(f'### {name}\n')[1].split('\n### ')[0]


def numbers(text):
    """Signed decimals of a text, without those of names, versions and code."""
    return set(re.findall(r'(?<![\w.=:#-])[-+]?\d+\.\d+(?:e[-+]?\d+)?', text))


def test_claims_have_a_row_each_that_links_to_sections(page):
    links = re.findall(r'^\| \[(\w+)\]\(#(\w+)\)', page, re.M)
    assert links == [(claim.name, claim.name.lower()) for claim in claims()]
    assert re.findall(r'^### (\w+)$', page, re.M) == [claim.name for claim in claims()]
    for verdict in ('● holds', '◐ holds only if r is above 16', '✕ fails', '○ undecided: '):
        assert f'| {verdict}' in page


def test_a_section_says_who_how_where_and_with_which_numbers(page):
    text = ' '.join(section(page, 'B2').split())
    for part in (
        *('training loss differs by 0.01', 'would be decided by 48 seeds in place of 12'),
        *('The arm at equal parameter count is equivalent', '1 h 24 min', '1 x cpu (2 cores)'),
        *('experiments.claims --scale=cpu --claims=B2', '0123456789ab', 'open "not better"'),
        *('+0.0102 [+0.0062, +0.0154]', '-0.0124 [-0.0164, -0.0072]', 'model decoder, steps 500'),
    ):
        assert part in text
    assert '(./plots/b2_differences.png)' in text and 'plots' not in section(page, 'A1')


def test_every_printed_number_is_one_of_the_claims(page):
    rows = [row for claim in claims() for row in claim.rows]
    known = numbers(' '.join(f'{amount(row)} {expected(row)} {row.x}' for row in rows))
    known |= numbers(' '.join(f'{c.statement} {c.reported} {c.needed}' for c in claims()))
    assert len(numbers(page)) > 60 and numbers(page) <= known
    values = {float(text) for row in rows for text in numbers(amount(row))}
    data = [x for row in rows for x in (row.value, row.low, row.high) if x is not None]
    assert all(min(abs(v - x) for x in data) <= max(5.1e-5, 1e-3 * abs(v)) for v in values)


def test_what_is_missing_stands_at_the_top_and_in_its_section(page):
    sentence = 'overparameterised/study.json does not exist; get it with python -m'
    assert sentence in page.partition('\n|')[0]
    assert sentence in section(page, 'D2') and sentence not in section(page, 'B2')


def test_the_laws_of_a_scaling_study_stand_at_the_end(tmp_path):
    described(tmp_path / 'scaling')
    write_claims(tmp_path, claims()[:1])
    laws = claims_markdown(tmp_path, '.').rpartition('## ')[2]
    assert laws.startswith('Scaling laws')
    # A law, the worth of a parameter, the note.
    for part in ('1.600 [1.599, 1.600]', '1.200 [1.200, 1.200]', 'N parameters'):
        assert part in laws


def test_text_is_escaped(page):
    assert '<b>' not in page and '&lt;b>x&lt;/b> & $y$' in page


def test_figures_show_the_numbers_of_the_rows(written, tmp_path):
    stems = ['b2_differences', 'b3_curves', 'b7_curves', 'c2_differences', 'e4_differences']
    files = sorted(path.name for path in (written / 'plots').iterdir())
    assert files == sorted(f'{stem}.png' for stem in [*stems, 'answers', 'verdicts'])
    drawn = {drawing.stem: drawing for drawing in drawings(read_claims(written))}
    style.write_plots(tmp_path, [drawn['c2_differences']], kinds=('png',))
    assert (tmp_path / 'c2_differences.png').read_bytes().startswith(b'\x89PNG')
    means = [
        points.get_offsets()[0][0]
        for ax in drawn['e4_differences'].figure.axes
        for points in ax.collections
        if points.get_label() == 'mean'
    ]
    rows = claim_named('E4').rows
    # At equal width, then at equal parameter count.
    assert means == [
        *(row.value for row in rows if row.kind == Kind.REMOVED),
        *(row.value for row in rows if row.kind == Kind.MATCHED),
    ]
    lines = drawn['b3_curves'].figure.axes[0].lines
    curves = {line.get_label(): line.get_xydata() for line in lines}
    assert {'fp64', 'fp32', 'bf16'} <= curves.keys() and len(curves['bf16']) == 6
    assert list(curves['bf16'][0]) == [0, 4e-3]


def test_a_figure_holds_the_whole_context_of_a_row():
    claim = claim_named('B2')
    longer = [
        dataclasses.replace(row, what=what, context=row.context | {'steps': steps})
        for what in ('query_free/vo', 'shared_qk(key_norm=True,self_mask=True)/vo')
        for steps in ('500', '2000')
        for row in claim.rows
    ]
    (drawn,) = claim_figures(dataclasses.replace(claim, rows=tuple(longer)))
    with style_sheet():
        drawn.figure.draw_without_rendering()
    box, (first, *_) = drawn.figure.get_tightbbox(), drawn.figure.axes
    assert box.x0 >= 0 and box.x1 <= drawn.figure.bbox_inches.x1
    names = [text.get_text() for text in first.texts]
    assert 'query_free/vo, d_model=128, multi30k, steps 2000' in names
    assert 'shared_qk(…k=True)/vo, d_model=64, stdlib, steps 500' in names


def test_the_figure_of_verdicts_shows_decided_claims_whole():
    near = claim_named('C2')
    far = [dataclasses.replace(row, value=2.0, low=1.0, high=3.0) for row in near.rows]
    open_claim = dataclasses.replace(near, name='C3', verdict=ClaimVerdict.UNDECIDED)
    drawn = overview([near, near, open_claim, dataclasses.replace(near, rows=tuple(far))])
    assert row_names(drawn.figure.axes[0]) == ['C2 shared_qk/vo'] * 3
    assert all(ax.get_xlim()[1] > 3.0 for ax in drawn.figure.axes)
    assert overview([open_claim]) is None


def test_a_legend_has_whole_names_in_lines():
    claim = claim_named('B3')
    name = 'the largest difference of two logits of one function in'
    rows = [dataclasses.replace(row, what=f'{name} {row.what}') for row in claim.rows]
    (drawn,) = claim_figures(dataclasses.replace(claim, rows=tuple(rows)))
    labels = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert ' '.join(labels[0].split()).startswith(f'{name} fp64') and '\n' in labels[0]


def test_rows_of_both_shapes_are_one_line_and_the_deciding_row_is_shown():
    def row(kind, speaks, value, word=None, **context):
        return Row('arm', kind, context, value, speaks, arm='qk/no_o', word=word)

    rows = [
        row(Kind.REMOVED, Speaks.FOR, 0.1, 'worse', shape='equal'),
        row(Kind.MATCHED, Speaks.BESIDE, 0.2, shape='equal'),
        row(Kind.REMOVED, Speaks.BESIDE, 0.3, shape='matched'),
        row(Kind.MATCHED, Speaks.OPEN, 0.4, 'undecided', shape='matched'),
    ]
    (line,) = compared(rows)
    assert [line.rows[kind].value for kind in (Kind.REMOVED, Kind.MATCHED)] == [0.1, 0.4]
    assert (line.context, line.decision) == ({}, 'worse / undecided')


@pytest.mark.parametrize(
    ('block', 'old', 'changed'),
    [
        ('claims_verdicts', 'B2', 'B9'),
        ('claims_b', '+0.0102', '+0.0103'),
        ('claims', '+0.0102', '+0.0103'),
        ('answers', '+0.062', '+0.063'),
    ],
)
def test_blocks_of_markdown_pages_are_written_and_checked(kept, block, old, changed):
    page = kept / f'{block}.md'
    with pytest.raises(ReportError, match=f'{block}.md is not what its studies give'):
        check_page(page, BLOCKS)
    assert check_page(page, BLOCKS, write=True) == 1
    text = page.read_text()
    assert text.startswith('before 1.5\n') and LINES[block] in text
    assert check_page(page, BLOCKS) == 1
    page.write_text(text.replace(old, changed, 1))
    with pytest.raises(ReportError, match='not what its studies give'):
        check_page(page, BLOCKS)


def test_a_block_is_empty_before_there_are_results(tmp_path):
    page = tmp_path / 'claims.md'
    page.write_text('<!-- claims: cpu -->\n<!-- end -->\n')
    assert check_page(page, BLOCKS) == 1
    page.write_text('<!-- claims: cpu -->\n| A1 |\n<!-- end -->\n')
    with pytest.raises(ReportError, match='line 2'):
        check_page(page, BLOCKS)


def test_an_altered_claim_is_found(kept):
    text = (kept / 'claims.json').read_text()
    (kept / 'claims.json').write_text(text.replace('"verdict": "fails"', '"verdict": "holds"', 1))
    with pytest.raises(RunDirectoryError, match='its checksum is not that of its content'):
        check_page(kept / 'claims.md', BLOCKS)


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [(0.2, '< 1 s'), (3.4, '3 s'), (59.2, '59 s'), (90, '2 min'), (5025, '1 h 24 min')],
)
def test_durations(seconds, text):
    assert duration(seconds) == text

"""The gallery of claims: links, numbers, what is missing, escaping, and what a check finds."""

import dataclasses
import re
import shutil

import pytest

from qkattn.errors import ReportError, RunDirectoryError
from qkattn.report.claim_results import ClaimVerdict, Kind, write_claims
from qkattn.report.claim_sheets import amount, expected
from qkattn.report.figures import plots
from qkattn.report.figures.claim_figures import claim_figures, overview
from qkattn.report.figures.style import Rendered, style_sheet
from qkattn.report.gallery import (
    claims_markdown,
    drawings,
    duration,
    read_gallery,
    write_gallery,
)
from qkattn.report.verify import check_page
from tests.decided_claims import HOSTILE, claims
from tests.report.conftest import Page, row_names
from tests.report.test_golden import described

BLANK = Rendered(b'', b'', '', '<svg></svg>')
BLOCKS = {
    'claims': '| [B2](#b2) | Dropping W_Q in a single head changes the training loss by 0.01. | '
    '○ undecided | -0.0022 [-0.0062, +0.0030] nats/token | cpu |',
    'verdicts': '| B. Is W_Q needed? | - | ✕ [B3](docs/claims.md#b3) in short, B3<br>'
    '◐ [B7](docs/claims.md#b7) in short, B7 | ○ [B2](docs/claims.md#b2) in short, B2 |',
}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A gallery whose figures are not rendered."""
    directory = tmp_path_factory.mktemp('claims')
    write_claims(directory, claims())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plots, 'render', lambda drawing: BLANK)
        write_gallery(directory)
    return directory


@pytest.fixture(scope='module')
def html(written):
    return (written / 'claims.html').read_text()


@pytest.fixture
def kept(written, tmp_path):
    """A gallery, and a page of each block."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    for name in BLOCKS:
        (tmp_path / f'{name}.md').write_text(f'before 1.5\n<!-- {name}: . -->\n<!-- end -->\n')
    return tmp_path


def section(html, name):
    (found,) = re.findall(rf'<article id="claim-{name.lower()}".*?</article>', html, re.DOTALL)
    return found


def numbers(text):
    """Signed decimals of a text, without those of names, versions and code."""
    return set(re.findall(r'(?<![\w.=:#-])[-+]?\d+\.\d+(?:e[-+]?\d+)?', text))


def test_the_page_is_well_formed_and_needs_no_other_file(html):
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {'script', 'link', 'img', 'iframe', 'object'}
    assert len(page.ids) == len(set(page.ids)) and '@import' not in html
    used = [value for _, attrs in page.tags for name, value in attrs.items() if 'href' in name]
    outside = {link for link in used if not link.startswith('#')}
    assert outside == {'https://example.org/thread'}
    assert {link[1:] for link in used if link.startswith('#')} <= set(page.ids)


def test_every_claim_of_the_table_links_to_its_section_in_order(html):
    tables = re.findall(r'<table class="verdicts">.*?</table>', html, re.DOTALL)
    ordered = sorted(claims(), key=lambda claim: not claim.is_theorem)
    assert [table.count('<th scope="row">') for table in tables] == [2, len(ordered) - 2]
    table = ''.join(tables)
    links = re.findall(r'<th scope="row"><a href="#(claim-\w+)">(\w+)</a>', table)
    assert links == [(claim.anchor, claim.name) for claim in ordered]
    words = re.findall(
        r'class="badge ([\w-]+)"><span aria-hidden="true">(.)</span> ([\w ]+)<', table
    )
    assert [word for *_, word in words] == [claim.verdict for claim in ordered]
    # A word is told by its mark, too, without its colour.
    assert {(mark, word) for _, mark, word in words} == {
        *(('●', 'holds'), ('◐', 'holds only if'), ('✕', 'fails'), ('○', 'undecided'))
    }


def test_a_section_says_who_how_where_and_with_which_numbers(html):
    text = Page(section(html, 'B2')).text
    for said in (
        *('training loss differs by 0.01', 'would be decided by 48 seeds in place of 12'),
        *('The arm at equal parameter count is equivalent', '1 h 24 min', '1 x cpu (2 cores)'),
        *('experiments.claims --scale=cpu --claims=B2', '0123456789ab', 'open "not better"'),
        *('+0.0102 [+0.0062, +0.0154]', '-0.0124 [-0.0164, -0.0072]', 'model decoder, steps 500'),
    ):
        assert said in text
    assert section(html, 'B2').count('<svg') == 1 and '<svg' not in section(html, 'A1')


def test_every_printed_number_is_one_of_the_claims(written, html):
    rows = [row for claim in claims() for row in claim.rows]
    known = numbers(' '.join(f'{amount(row)} {expected(row)} {row.x}' for row in rows))
    known |= numbers(' '.join(f'{c.statement} {c.reported} {c.needed}' for c in claims()))
    text = Page(re.sub(r'<svg.*?</svg>|<style.*?</style>', '', html, flags=re.DOTALL)).text
    for page in (text, claims_markdown(written, '.')):
        found = numbers(page)
        assert len(found) > 60 and found <= known
    values = {float(text) for row in rows for text in numbers(amount(row))}
    data = [x for row in rows for x in (row.value, row.low, row.high) if x is not None]
    assert all(min(abs(v - x) for x in data) <= max(5.1e-5, 1e-3 * abs(v)) for v in values)


def test_what_is_missing_stands_at_the_top_and_in_its_section(written, html):
    sentence = 'overparameterised/study.json does not exist; get it with python -m'
    assert sentence in html[: html.index('<nav>')]
    assert sentence in Page(section(html, 'D2')).text and sentence not in section(html, 'B2')
    assert sentence in claims_markdown(written, '.').partition('\n|')[0]


def test_the_laws_of_a_scaling_study_stand_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, 'render', lambda drawing: BLANK)
    described(tmp_path / 'scaling')
    write_claims(tmp_path, claims()[:1])
    html = write_gallery(tmp_path).read_text()
    assert '<a href="#scaling">' in html
    text = Page(re.findall(r'<section id="scaling">.*?</section>', html, re.DOTALL)[0]).text
    assert 'Loss against parameters' in text and 'What one parameter is worth' in text
    laws = claims_markdown(tmp_path, '.').rpartition('## ')[2]
    assert laws.startswith('Scaling laws')
    # A law, the worth of a parameter, the note.
    for said in ('1.600 [1.599, 1.600]', '1.200 [1.200, 1.200]', 'N parameters'):
        assert said in text and said in laws


def test_text_is_escaped(written, html):
    assert '<b>' not in html and Page(html).text.count(HOSTILE) == 4
    assert '<b>' not in claims_markdown(written, '.')


def test_a_figure_is_drawn_in_the_colours_of_the_page(tmp_path):
    write_claims(tmp_path, [claim for claim in claims() if claim.name == 'C2'])
    html = write_gallery(tmp_path).read_text()
    assert sum(tag == 'svg' for tag, _ in Page(html).tags) == 2
    assert 'var(--hue-' in section(html, 'C2')
    assert (tmp_path / 'plots/c2_differences.png').read_bytes().startswith(b'\x89PNG')


def test_figures_show_the_numbers_of_the_rows(written):
    stems = ['b2_differences', 'b3_curves', 'b7_curves', 'c2_differences', 'e4_differences']
    files = sorted(path.name for path in (written / 'plots').iterdir())
    assert files == sorted(f'{stem}.png' for stem in [*stems, 'verdicts'])
    drawn = {of.stem: of.figure for of in drawings(read_gallery(written))}
    means = [
        points.get_offsets()[0][0]
        for ax in drawn['e4_differences'].axes
        for points in ax.collections
        if points.get_label() == 'mean'
    ]
    (rows,) = (claim.rows for claim in claims() if claim.name == 'E4')
    # At equal width, then at equal parameter count.
    assert means == [
        *(row.value for row in rows if row.kind == Kind.REMOVED),
        *(row.value for row in rows if row.kind == Kind.MATCHED),
    ]
    curves = {line.get_label(): line.get_xydata() for line in drawn['b3_curves'].axes[0].lines}
    assert {'fp64', 'fp32', 'bf16'} <= curves.keys() and len(curves['bf16']) == 6
    assert list(curves['bf16'][0]) == [0, 4e-3]


def test_a_figure_holds_the_whole_context_of_a_row():
    (claim,) = (claim for claim in claims() if claim.name == 'B2')
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
    (near,) = (claim for claim in claims() if claim.name == 'C2')
    far = [dataclasses.replace(row, value=2.0, low=1.0, high=3.0) for row in near.rows]
    open_claim = dataclasses.replace(near, name='C3', verdict=ClaimVerdict.UNDECIDED)
    drawn = overview([near, near, open_claim, dataclasses.replace(near, rows=tuple(far))])
    names = row_names(drawn.figure.axes[0])
    assert names == ['C2 shared_qk/vo'] * 3
    assert all(ax.get_xlim()[1] > 3.0 for ax in drawn.figure.axes)
    assert overview([open_claim]) is None


def test_a_legend_has_whole_names_in_lines():
    (claim,) = (claim for claim in claims() if claim.name == 'B3')
    name = 'the largest difference of two logits of one function in'
    rows = [dataclasses.replace(row, what=f'{name} {row.what}') for row in claim.rows]
    (drawn,) = claim_figures(dataclasses.replace(claim, rows=tuple(rows)))
    labels = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert ' '.join(labels[0].split()).startswith(f'{name} fp64') and '\n' in labels[0]


@pytest.mark.parametrize(
    ('block', 'changed'), [('verdicts', ('B2', 'B9')), ('claims', ('+0.0102', '+0.0103'))]
)
def test_blocks_of_markdown_pages_are_written_and_checked(kept, block, changed):
    page = kept / f'{block}.md'
    with pytest.raises(ReportError, match=f'{block}.md is not what its studies give'):
        check_page(page)
    assert check_page(page, write=True) == 1
    text = page.read_text()
    assert text.startswith('before 1.5\n') and BLOCKS[block] in text
    assert check_page(page) == 1
    page.write_text(
        text.replace('B2', 'B9') if block == 'verdicts' else text.replace('02', '03', 1)
    )
    with pytest.raises(ReportError, match='not what its studies give'):
        check_page(page)


def test_a_block_is_empty_before_there_are_results(tmp_path):
    page = tmp_path / 'claims.md'
    page.write_text('<!-- claims: cpu -->\n<!-- end -->\n')
    assert check_page(page) == 1
    page.write_text('<!-- claims: cpu -->\n| A1 |\n<!-- end -->\n')
    with pytest.raises(ReportError, match='line 2'):
        check_page(page)


def test_an_altered_claim_is_found(kept):
    text = (kept / 'claims.json').read_text()
    (kept / 'claims.json').write_text(text.replace('"verdict": "fails"', '"verdict": "holds"', 1))
    with pytest.raises(RunDirectoryError, match='its checksum is not that of its content'):
        check_page(kept / 'claims.md')


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [(0.2, '< 1 s'), (3.4, '3 s'), (59.2, '59 s'), (90, '2 min'), (5025, '1 h 24 min')],
)
def test_durations(seconds, text):
    assert duration(seconds) == text

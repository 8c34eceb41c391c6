"""Curves of a claim: panels where lines are many, and axes of points that span decades."""

import dataclasses
import itertools

import pytest

from qkattn.report.claim_results import Kind, Row, Speaks
from qkattn.report.claim_rows import curves
from qkattn.report.claim_sheets import claim_sheets
from qkattn.report.figures.claim_figures import claim_figures
from qkattn.report.figures.style import style_sheet
from qkattn.report.prose import environment, tidy
from tests.decided_claims import of_claim


def claim_of(points, whats=('one', 'two', 'three'), steps=(0, 1, 32, 500)):
    """Three lines in each of (precision, size): their value where x = 0, ten times it after."""
    rows = [
        Row(
            what=what,
            kind=Kind.MEASURED,
            context={'precision': precision, 'size': size, 'corpus': 'stdlib'},
            value=value if x else value / 10,
            speaks=Speaks.BESIDE,
            x=x,
            x_label='step',
        )
        for (precision, size, value), what, x in itertools.product(points, whats, steps)
    ]
    return of_claim('B3', 'A claim.', 'holds', rows)


PRECISIONS = [('fp64', '8', 1e-14), ('fp32', '8', 1e-6), ('bf16', '8', 1e-1)]


def axes_of(claim, **look):
    (drawing,) = claim_figures(claim, **look)
    with style_sheet():
        drawing.figure.draw_without_rendering()
    return drawing.figure.axes


@pytest.mark.parametrize('narrow', [False, True])
def test_many_lines_have_a_panel_for_each_value_of_a_context(narrow):
    axes = axes_of(claim_of(PRECISIONS), narrow=narrow)
    assert [ax.get_title(loc='left') for ax in axes] == ['fp64', 'fp32', 'bf16']
    assert [[line.get_label() for line in ax.lines] for ax in axes] == [['one', 'two', 'three']] * 3
    # The same line looks the same, on the same scale, in every panel, and the legend has it once.
    assert len({ax.lines[1].get_color() for ax in axes}) == 1
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in axes}) == 1
    assert [t.get_text() for t in axes[0].figure.legends[0].get_texts()] == ['one', 'two', 'three']
    tables = claim_sheets(claim_of(PRECISIONS))
    assert [table.headings[1][0] for table in tables] == ['one|fp64', 'one|fp32', 'one|bf16']


@pytest.mark.parametrize('narrow', [False, True])
def test_a_single_line_has_its_name_at_the_axis_and_counts_have_whole_ticks(narrow):
    counts = claim_of([('fp64', '8', 6), ('fp64', '8', 8)], ['arms'], (1, 3))
    (ax,) = axes_of(dataclasses.replace(counts, rows=counts.rows[1:3]), narrow=narrow)
    assert ax.get_ylabel() == 'arms' and not ax.figure.legends
    assert [text.get_text() for text in ax.get_yticklabels()] == [f'{y:g}' for y in ax.get_yticks()]
    assert all(float(y).is_integer() for y in ax.get_yticks())
    caption = environment(html=False).get_template('claims.j2').make_module().curves
    assert caption(counts).startswith('Arms against step')
    losses = [dataclasses.replace(row, unit='nats/token') for row in counts.rows[1:3]]
    (ax,) = axes_of(dataclasses.replace(counts, rows=losses), narrow=narrow)
    assert ax.get_ylabel() == 'arms, nats/token'


def test_panels_are_of_the_context_of_fewest_values():
    points = [(p, size, 1.0) for p in ('fp64', 'fp32', 'bf16') for size in ('8', '16')]
    found = curves(claim_of(points).rows)
    assert [axis.place for axis in found] == ['size 8', 'size 16']
    assert [len(lines) for lines in found.values()] == [9, 9]
    assert 'two, fp32' in [*found.values()][0]


def test_few_lines_and_lines_of_one_each_share_a_panel():
    assert len(curves(claim_of(PRECISIONS[:2]).rows)) == 1
    points = [('fp32', str(size), 1.0) for size in range(8)]
    assert len(curves(claim_of(points, whats=['one']).rows)) == 1
    (ax,) = axes_of(claim_of(points, whats=['one']))
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == 8


@pytest.mark.parametrize(
    ('steps', 'scale'),
    [((0, 1, 32, 500), 'symlog'), ((1, 32, 500), 'log'), ((0, 100, 500), 'linear')],
)
def test_x_is_logarithmic_where_it_spans_decades(steps, scale):
    for points in (PRECISIONS, PRECISIONS[:1]):
        for ax in axes_of(claim_of(points, steps=steps)):
            assert ax.get_xscale() == scale
    if scale == 'symlog':
        zero, one, last = (ax.transData.transform((x, 1e-14))[0] for x in (0, 1, 500))
        assert 0.05 < (one - zero) / (last - zero) < 0.3
        assert {0, 1, 500} <= {*ax.get_xticks()}


def test_y_is_logarithmic_where_the_values_of_all_panels_span_decades():
    assert {ax.get_yscale() for ax in axes_of(claim_of(PRECISIONS))} == {'log'}
    flat = [(precision, size, 1.0) for precision, size, _ in PRECISIONS]
    assert {ax.get_yscale() for ax in axes_of(claim_of(flat))} == {'linear'}


def test_a_caption_says_that_zeros_are_left_out():
    caption = environment(html=False).get_template('claims.j2').make_module().curves
    said = {
        least: tidy(caption(claim_of([('fp64', '8', least), ('fp32', '8', 1.0)])))
        for least in (0.0, 1e-14, -1.0)
    }
    assert said[0.0].endswith('points. A logarithmic axis leaves out zeros.')
    assert said[1e-14].endswith('measured points.') and said[-1.0] == said[1e-14]


def test_a_context_that_repeats_what_is_compared_is_said_once():
    rows = [
        Row(
            what=what,
            kind=Kind.MATCHED,
            context={'corpus': 'stdlib', 'variant': what, 'destination': place},
            value=0.01,
            speaks=Speaks.BESIDE,
        )
        for what in ('K = V', 'Q = K')
        for place in ('d_ff', 'num_heads')
    ]
    (axes,) = axes_of(of_claim('E6', 'A claim.', 'undecided', rows))
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == [
        f'{what}, {of}' for what in ('K = V', 'Q = K') for of in ('d_ff', 'num_heads')
    ]
    (table,) = claim_sheets(of_claim('E6', 'A claim.', 'undecided', rows))
    assert [name for name, _ in table.headings[:2]] == ['arm', 'destination']
    assert table.note == 'All rows: corpus stdlib.'

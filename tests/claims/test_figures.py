"""Curves of a claim: panels where lines are many, and axes of points that span decades."""

import dataclasses
import itertools

import pytest

from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.claims.figures import claim_figures
from qkattn.claims.shown import claim_sheets, curves, macros
from qkattn.report.figures.style import style_sheet
from qkattn.report.prose import END, tidy
from tests.claims.decided_claims import of_claim
from tests.report.conftest import row_names


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


def said(claim):
    """Title and caption of each figure of a claim."""
    module = macros()
    return {
        kind: [tidy(part) for part in getattr(module, kind)(of.values['about']).split(END)]
        for of in claim_figures(claim)
        for kind in [of.values['kind']]
    }


def axes_of(claim):
    (drawing,) = claim_figures(claim)
    with style_sheet():
        drawing.figure.draw_without_rendering()
    return drawing.figure.axes


def test_many_lines_have_a_panel_for_each_value_of_a_context():
    axes = axes_of(claim_of(PRECISIONS))
    assert [ax.get_title(loc='left') for ax in axes] == ['fp64', 'fp32', 'bf16']
    assert [[line.get_label() for line in ax.lines] for ax in axes] == [['one', 'two', 'three']] * 3
    # The same line looks the same, on the same scale, in every panel, and the legend has it once.
    assert len({ax.lines[1].get_color() for ax in axes}) == 1
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in axes}) == 1
    assert [t.get_text() for t in axes[0].figure.legends[0].get_texts()] == ['one', 'two', 'three']
    tables = claim_sheets(claim_of(PRECISIONS))
    assert [table.headings[1][0] for table in tables] == ['one|fp64', 'one|fp32', 'one|bf16']


def test_a_single_line_has_its_name_at_the_axis_and_counts_have_whole_ticks():
    counts = claim_of([('fp64', '8', 6), ('fp64', '8', 8)], ['arms'], (1, 3))
    (ax,) = axes_of(dataclasses.replace(counts, rows=counts.rows[1:3]))
    assert ax.get_ylabel() == 'arms' and not ax.figure.legends
    assert [text.get_text() for text in ax.get_yticklabels()] == [f'{y:g}' for y in ax.get_yticks()]
    assert all(float(y).is_integer() for y in ax.get_yticks())
    losses = [dataclasses.replace(row, unit='nats/token') for row in counts.rows[1:3]]
    (ax,) = axes_of(dataclasses.replace(counts, rows=losses))
    assert ax.get_ylabel() == 'arms (nats/token)'


def test_panels_are_of_the_context_of_fewest_values():
    points = [(p, size, 1.0) for p in ('fp64', 'fp32', 'bf16') for size in ('8', '16')]
    found = curves(claim_of(points).rows)
    assert [axis.context for axis in found] == ['size 8', 'size 16']
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


@pytest.mark.parametrize(
    ('values', 'hidden'),
    [((0.0, 1e-6, 1.0), True), ((0.0, 1.0), False), ((1e-14, 1.0), False), ((-1.0, 1.0), False)],
)
def test_a_caption_says_that_zeros_are_left_out_where_the_axis_does(values, hidden):
    points = [(f'fp{place}', '8', value) for place, value in enumerate(values)]
    _, caption = said(claim_of(points, whats=['one']))['curves']
    more = ' A logarithmic axis leaves out zeros.' * hidden
    assert caption == f'Marks are measured points.{more}'


@pytest.mark.parametrize(
    ('whats', 'unit', 'title', 'label'),
    [
        (['arms'], '', 'Arms', 'arms'),
        (['qk/no_o'], 'nats/token', 'qk/no_o (nats/token)', 'qk/no_o (nats/token)'),
        (['rank', 'norm'], '', 'Rank and norm', 'values'),
        (['a', 'b', 'c'], 'of 8', 'Values (of 8)', 'values (of 8)'),
    ],
)
def test_title_and_axis_name_what_the_points_are_of(whats, unit, title, label):
    claim = claim_of([('fp32', '8', 1.0)], whats, (1, 3))
    rows = tuple(dataclasses.replace(row, unit=unit) for row in claim.rows)
    claim = dataclasses.replace(claim, rows=rows)
    assert said(claim)['curves'][0] == f'{title} against step'
    assert axes_of(claim)[0].get_ylabel() == label


def test_a_caption_is_about_the_rows_that_are_shown():
    about = {'context': {}, 'value': 0.01, 'speaks': Speaks.BESIDE}
    difference = Row('qk/no_o', Kind.MATCHED, expected=0.01, tolerance=0.005, low=0.0, **about)
    growth = Row('growth', Kind.MEASURED, **about)
    point = Row('points', Kind.MEASURED, x=1.0, **about)
    claim = of_claim('B2', 'A claim.', 'undecided', [difference, growth, point])
    captions = {kind: caption for kind, (_, caption) in said(claim).items()}
    assert captions['differences'].endswith(' Grey: the reported number.')
    # A single value without an interval has no figure.
    assert 'levels' not in captions and captions['curves'] == 'Marks are measured points.'
    assert [sheet.note for sheet in claim_sheets(claim)] == ['', '', '']
    expected = dataclasses.replace(growth, expected=0.0, low=0.0, high=0.02)
    claim = dataclasses.replace(claim, rows=(expected,))
    assert said(claim)['levels'][1] == 'Lines are 95 % intervals. Grey: what is expected.'
    (table,) = claim_sheets(claim)
    assert table.note == 'A value is expected within its tolerance.'


def test_values_of_several_arms_are_told_apart():
    about = {'kind': Kind.MEASURED, 'context': {}, 'speaks': Speaks.BESIDE, 'value': 1.0}
    arms = ('qk/vo', 'qk/double')
    rows = [Row(what='norm', arm=arm, **about) for arm in arms]
    rows.append(Row(what='qk/double', arm='qk/double', **about))
    claim = of_claim('D2', 'A claim.', 'undecided', rows)
    (table,) = claim_sheets(claim)
    assert [name for name, _ in table.headings[:2]] == ['quantity', 'arm']
    assert [cells[:2] for cells in table.rows[:2]] == [['norm', arm] for arm in arms]
    (axes,) = axes_of(claim)  # a quantity without a unit has a panel of its own
    assert row_names(axes) == list(arms) and axes.get_xlabel() == 'norm'
    own = [dataclasses.replace(row, what=row.arm) for row in rows]
    (table,) = claim_sheets(dataclasses.replace(claim, rows=tuple(own)))
    assert 'arm' not in [name for name, _ in table.headings]


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
    labels = row_names(axes)
    assert labels == [
        f'{what}, {of}' for what in ('K = V', 'Q = K') for of in ('d_ff', 'num_heads')
    ]
    (table,) = claim_sheets(of_claim('E6', 'A claim.', 'undecided', rows))
    assert [name for name, _ in table.headings[:2]] == ['arm', 'destination']
    assert table.note == 'All rows: corpus stdlib.'


def texts_of(ax):
    return [text.get_text() for text in ax.texts if text.get_text()]


def test_verdicts_of_both_kinds_stand_in_one_line():
    of = Row('qk/no_o', Kind.REMOVED, {}, 0.1, Speaks.FOR, 'nats/token', 0.0, 0.2, word='worse')
    matched = dataclasses.replace(of, kind=Kind.MATCHED, word='undecided', speaks=Speaks.OPEN)
    axes = axes_of(of_claim('E4', 'A claim.', 'undecided', [of, matched]))
    assert 'worse / undecided' in texts_of(axes[-1])


def test_names_of_a_panel_tell_its_own_values_apart():
    loss = Row('arm', Kind.MEASURED, {'corpus': 'stdlib'}, 0.1, Speaks.OPEN, 'nats/token')
    norm = Row('norm', Kind.MEASURED, {}, 1, Speaks.FOR, low=0, high=2)
    rows = [loss, dataclasses.replace(loss, what='other'), norm]
    axes = axes_of(of_claim('D2', 'A claim.', 'undecided', rows))
    names = [name for ax in axes for name in row_names(ax)]
    assert sorted(names) == ['arm', 'norm', 'other']


def test_exact_checks_have_tables_and_no_curve():
    rows = [dataclasses.replace(row, kind=Kind.EXACT) for row in claim_of(PRECISIONS).rows]
    claim = of_claim('A1', 'A claim.', 'holds', rows)
    assert claim_figures(claim) == () and claim_sheets(claim)


def test_names_hold_no_more_than_tells_lines_apart():
    about = {'kind': Kind.MATCHED, 'value': 0.1, 'speaks': Speaks.OPEN, 'unit': 'nats/token'}
    contexts = [{'model': m, 'size': s, 'of': m} for m, s in (('a', '1'), ('b', '2'), ('b', '3'))]
    claim = of_claim(
        'B4', 'A claim.', 'undecided', [Row('x', context=c, **about) for c in contexts]
    )
    assert row_names(axes_of(claim)[0]) == ['size 1', 'size 2', 'size 3']

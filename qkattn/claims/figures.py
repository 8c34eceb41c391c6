"""Figures of a claim, from its rows: a forest of differences by context, and curves."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.claims.answers import Answer
from qkattn.claims.decided import ClaimResult, ClaimVerdict, Kind, Row, Speaks
from qkattn.claims.results import UNIT
from qkattn.claims.shown import (
    PARTS,
    Compared,
    compared,
    curves,
    has_several_arms,
    located,
    quantity,
    varying,
)
from qkattn.report.figures.forest import Line, Panel, forest, limits_of
from qkattn.report.figures.style import (
    DASHES,
    HUES,
    MARKERS,
    REFERENCE,
    WIDTH,
    Drawing,
    Styles,
    legend,
    panels,
    short,
    style_sheet,
    styles,
)
from qkattn.report.prose import listed, si
from qkattn.stats.decision import Decision
from qkattn.verdict.judging import DECIDED

OVERVIEW, ANSWERS = 'verdicts', 'answers'
_X_SPAN, _Y_SPAN = 10.0, 100.0  # an axis whose positive values span more is logarithmic
# Characters: of a name, of what is compared in it (leaves room for the context), of a legend line.
_LONGEST, _WHAT, _LEGEND = 52, 22, 34
_TICKS = 8  # at most, on an axis with ticks at its points


def claim_figures(claim: ClaimResult) -> tuple[Drawing, ...]:
    """The figures that its rows allow; exact checks are read in their table."""
    arm_styles = _arm_styles(claim.rows)
    measured = [row for row in claim.rows if row.kind == Kind.MEASURED]
    points = [row for row in claim.rows if row.x is not None and row.kind != Kind.EXACT]
    with style_sheet():
        made = {
            'differences': _differences(_named(compared(claim.rows)), arm_styles),
            'levels': _levels(measured, arm_styles),
            'curves': _curves(points, arm_styles),
        }
    return tuple(
        Drawing(
            figure,
            f'{claim.name.lower()}_{kind}',
            {'kind': kind, 'claim': claim, 'about': _about(figure, points)},
        )
        for kind, figure in made.items()
        if figure is not None
    )


def _about(figure: Figure, points: Sequence[Row]) -> dict[str, Any]:
    """What a heading and a caption say of a figure, and of the points of curves in it."""
    labels = {label for ax in figure.axes for label in ax.get_legend_handles_labels()[1]}
    on_log = [line for ax in figure.axes if ax.get_yscale() == 'log' for line in ax.lines]
    return {
        'y': quantity(points, most=2),
        'x': listed(dict.fromkeys(row.x_label or 'x' for row in points)),
        'is_banded': any(row.low is not None for row in points),
        'has_intervals': '95 % interval' in labels,
        'has_reported': 'reported' in labels,
        'hides_zeros': any(0 in line.get_ydata() for line in on_log),
    }


def overview(claims: Sequence[ClaimResult]) -> Drawing | None:
    """The decisive difference of every decided claim that rests on one; None where none does."""
    named = []
    for claim in claims:
        if claim.verdict == ClaimVerdict.UNDECIDED:
            continue
        row = claim.decisive_row
        for line in compared(claim.rows):
            if row in line.rows.values():
                named.append((f'{claim.name}  {line.what}', line, str(claim.verdict)))
    with style_sheet():
        rows = [row for claim in claims for row in claim.rows]
        figure = _differences(named, _arm_styles(rows), far=math.inf)
    return figure and Drawing(figure, OVERVIEW, {'kind': OVERVIEW})


def answers_figure(answers: Sequence[Answer]) -> Drawing | None:
    """The difference of each change in a decoder at equal parameter count; None without any."""
    rows = {answer.what: row for answer in answers if (row := answer.row('decoder', Kind.MATCHED))}
    if not rows:
        return None
    decided = [word.value for word in DECIDED]
    lines = [
        _line(row, f'{what}: {row.word}')._replace(
            arm=row.word or '', is_decided=row.word in decided
        )
        for what, row in rows.items()
    ]
    panel = Panel(lines, f'difference ({UNIT})', PARTS[Kind.MATCHED], 0.0)
    with style_sheet():
        reach = limits_of(lines, 0.0, far=math.inf)
        look = styles(sorted({line.arm for line in lines}), Decision.NO_VERDICT.value)
        figure = forest([panel], look, 'no difference', None, reach, longest=_LONGEST)
    return Drawing(figure, ANSWERS, {'kind': ANSWERS})


def _arm_styles(rows: Iterable[Row]) -> Styles:
    return styles(list(dict.fromkeys(row.arm or '' for row in rows)), 'qk/vo')


def _named(lines: Sequence[Compared]) -> list[tuple[str, Compared, str]]:
    """What is compared, under the shortest name that tells it apart, with its decision."""
    chosen = varying(lines)

    def num_names(names: Sequence[str]) -> int:
        return len({(line.what, *(line.context.get(name) for name in names)) for line in lines})

    for name in reversed(chosen):
        others = [other for other in chosen if other != name]
        if num_names(others) == num_names(chosen):
            chosen = others
    several = len({line.what for line in lines}) > 1 or not chosen
    return [
        (
            ', '.join([*[short(line.what, _WHAT)] * several, *located(line, chosen)]),
            line,
            line.decision,
        )
        for line in lines
    ]


def _differences(
    named: Sequence[tuple[str, Compared, str]], arm_styles: Styles, **limits: float
) -> Figure | None:
    """A panel for each kind; that of reinvested parameters only where it decides."""
    kinds = [
        kind
        for kind in PARTS
        if any(kind in each.rows and _drawn(each.rows[kind]) for _, each, _ in named)
    ]
    if not kinds:
        return None
    units = dict.fromkeys(row.unit for _, each, _ in named for row in each.rows.values())
    drawn = []
    for kind in kinds:
        lines = []
        for name, each, decision in named:
            row = each.rows.get(kind)
            line = _line(row, name) if row else Line('', absent='not measured', name=name)
            right = decision if kind == kinds[-1] else ''
            lines.append(line._replace(right=right, is_decided=each.is_decided))
        drawn.append(Panel(lines, f'difference ({", ".join(units)})', PARTS[kind], 0.0))
    reach = limits_of([line for panel in drawn for line in panel.lines], 0.0, **limits)
    return forest(drawn, arm_styles, 'no difference', None, reach, longest=_LONGEST)


def _drawn(row: Row) -> bool:
    return row.kind != Kind.REINVESTED or row.speaks != Speaks.BESIDE


def _line(row: Row, name: str) -> Line:
    """Reported numbers are those that a row is compared with."""
    reported = None
    if row.expected is not None:
        reported = row.expected - (row.tolerance or 0.0), row.expected + (row.tolerance or 0.0)
    return Line(row.arm or '', row.value, row.low, row.high, name=name, reported=reported)


def _levels(rows: Sequence[Row], arm_styles: Styles) -> Figure | None:
    """Measured values off curves, a panel for each unit or bare quantity."""
    rows = [row for row in rows if row.x is None]
    several = has_several_arms(rows)
    by_unit: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_unit.setdefault((row.unit, row.what * (several and not row.unit)), []).append(row)
    drawn = []
    for (unit, _), members in by_unit.items():
        lines = []
        if len(members) == 1 and members[0].low is None:
            continue  # read in the table
        names, arms = varying(members), has_several_arms(members)
        whats = len({row.what for row in members}) > 1 or not arms
        for row in members:
            decided = row.speaks in (Speaks.FOR, Speaks.AGAINST)
            about = [*[row.what] * whats, *[row.arm or ''] * arms, *located(row, names)]
            name = ', '.join(filter(None, dict.fromkeys(about)))
            lines.append(_line(row, name)._replace(is_decided=decided))
        drawn.append(Panel(lines, unit or (members[0].what if arms and not whats else 'value')))
    return forest(drawn, arm_styles, longest=_LONGEST) if drawn else None


def _curves(rows: Sequence[Row], arm_styles: Styles) -> Figure | None:
    """Values against x, by `curves`; panels of one axis have one scale, several lines a legend."""
    by_axis = curves(rows)
    if not by_axis:
        return None
    alike = len({axis._replace(context='') for axis in by_axis}) == 1 < len(by_axis)
    lines = {name: points for of_axis in by_axis.values() for name, points in of_axis.items()}
    extra = 0.2 * sum(map(_num_lines, lines))
    figure = Figure(figsize=(WIDTH, (2.2 if alike else 3.0) * len(by_axis) + extra + 0.3))
    line_styles = _line_styles(lines, arm_styles)
    axes = panels(figure, 1, len(by_axis), sharex=alike, sharey=alike)
    for ax, (axis, of_axis) in zip(axes, by_axis.items(), strict=True):
        for name, points in of_axis.items():
            _draw_line(ax, name, points, line_styles[name])
        sharing = by_axis.values() if alike else [of_axis]
        _scales(ax, [row for each in sharing for points in each.values() for row in points])
        kind = PARTS.get(axis.kind, '') * (len({axis.kind for axis in by_axis}) > 1)
        title = ', '.join(filter(None, [axis.context, kind]))
        y_label = _wrapped(quantity(row for points in of_axis.values() for row in points))
        ax.set(xlabel=axis.x_label, ylabel=y_label, title=short(title))
        if alike:
            ax.label_outer()
    if len(lines) > 1:
        legend(figure, 'lower')
    return figure


def _line_styles(lines: Mapping[str, Sequence[Row]], arm_styles: Styles) -> dict[str, dict]:
    """Arm styles if every line is a different arm, else the palette in order."""
    arms = [points[0].arm for points in lines.values()]
    if None not in arms and len(set(arms)) == len(arms):
        return {name: arm_styles[points[0].arm or ''] for name, points in lines.items()}
    palette = [
        {'color': hue, 'marker': marker, 'linestyle': dashes}
        for dashes in DASHES
        for hue, marker in zip(HUES, MARKERS, strict=True)
    ]
    return dict(zip(lines, itertools.cycle(palette), strict=False))


def _draw_line(ax: Axes, name: str, points: Sequence[Row], line_style: Mapping[str, Any]) -> None:
    x, y = ([getattr(row, field) for row in points] for field in ('x', 'value'))
    ax.plot(x, y, label=_wrapped(name), zorder=3, **line_style)
    if bounded := [row for row in points if row.low is not None]:
        band = ([getattr(row, field) for row in bounded] for field in ('x', 'low', 'high'))
        ax.fill_between(*band, color=line_style['color'], alpha=0.18, linewidth=0)


def _wrapped(name: str) -> str:
    return textwrap.fill(name, _LEGEND, break_long_words=False)


def _num_lines(name: str) -> int:
    return _wrapped(name).count('\n') + 1


def _scales(ax: Axes, rows: Sequence[Row]) -> None:
    """Logarithmic ones where positive values span decades; x = 0 then stands left of them."""
    if any(row.low is not None and row.low <= 0 <= row.high for row in rows):
        ax.axhline(0.0, label='_zero', **REFERENCE)
    every = sorted({row.x for row in rows if row.x is not None})
    if every[0] >= 0 and _spans(every, _X_SPAN):
        if every[0] == 0:
            ax.set_xscale('symlog', linthresh=every[1], linscale=0.5)
        else:
            ax.set_xscale('log')
        ax.set_xticks(every[:: -(-len(every) // _TICKS)])
        ax.minorticks_off()
        ax.xaxis.set_major_formatter(lambda x, _: f'{x:,g}' if x < 1e5 else si(x))
    elif len(every) <= _TICKS:
        ax.set_xticks(every)
        ax.xaxis.set_major_formatter('{x:g}')
    lowest = [row.value if row.low is None else row.low for row in rows]
    if min(lowest) >= 0 and _spans(lowest, _Y_SPAN):
        ax.set_yscale('log', nonpositive='mask')
        ax.yaxis.set_major_formatter('{x:g}')
    elif all(float(row.value).is_integer() for row in rows):
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.yaxis.set_major_formatter('{x:,g}')


def _spans(values: Sequence[float], factor: float) -> bool:
    positive = np.array([value for value in values if value > 0])
    return len(positive) > 1 and positive.max() > factor * positive.min()

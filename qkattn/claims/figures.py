"""Figures of a claim, from its rows: a forest of differences by context, and curves."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.claims.claim import ClaimResult, Kind, Row, Speaks
from qkattn.claims.export import Answer
from qkattn.claims.studies import UNIT
from qkattn.report.figures.forest import Line, Panel, forest, limits_of
from qkattn.report.figures.style import (
    DASHES,
    HUES,
    MARKERS,
    REFERENCE,
    WIDTH,
    Drawing,
    legend,
    panels,
    short,
    style_sheet,
    styles,
)
from qkattn.report.prose import si, words
from qkattn.stats.decision import Decision
from qkattn.verdict.judging import DECIDED

PARTS: dict[str, str] = {
    Kind.REMOVED: 'same shape, fewer parameters',
    Kind.REINVESTED: 'parameters reinvested',
    Kind.MATCHED: 'equal parameter count',
}
_X_SPAN, _Y_SPAN = 10.0, 100.0  # an axis whose positive values span more is logarithmic
_LONGEST, _QUANTITY, _LEGEND = 52, 22, 34  # characters of a name, what is compared in it, a label
_TICKS = 8  # at most, on an axis with ticks at its points


class Compared(NamedTuple):
    """Rows about the same thing in the same context, by kind."""

    quantity: str
    context: Mapping[str, str]
    rows: dict[str, Row]

    @property
    def decision(self) -> str:
        """'worse', or 'worse / undecided' where the verdicts of its rows differ."""
        decisions = [self.rows[kind].decision for kind in PARTS if kind in self.rows]
        return ' / '.join(dict.fromkeys(decision for decision in decisions if decision))


class Axis(NamedTuple):
    """The axis that all points of one panel of curves share."""

    unit: str
    x_label: str
    kind: str
    context: str = ''


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Removed, reinvested and matched rows, each `quantity` and context once, in their order.

    The kind tells the shape, which is no part of the context; of two rows of one kind, the one that
    decides is shown.
    """
    by_context: dict[tuple, Compared] = {}
    for row in rows:
        if row.kind in PARTS and row.x is None:
            context = {name: value for name, value in row.context.items() if name != 'shape'}
            key = row.quantity, row.arm, *context.items()
            parts = by_context.setdefault(key, Compared(row.quantity, context, {})).rows
            if row.speaks != Speaks.BESIDE or row.kind not in parts:
                parts[row.kind] = row
    return list(by_context.values())


def varying(rows: Iterable[Row | Compared]) -> list[str]:
    """The names in contexts whose values differ between rows, and do not only repeat `quantity`."""
    rows, names = list(rows), []
    for name in dict.fromkeys(name for row in rows for name in row.context):
        values = {row.context.get(name) for row in rows}
        if len(values) > 1 and any(
            row.context.get(name) not in (None, row.quantity) for row in rows
        ):
            names.append(name)
    return names


def located(row: Row | Compared, names: Iterable[str]) -> list[str]:
    """'d_model=64', 'stdlib', 'steps 500': these of its context, a number with its name."""
    values = [(name, row.context[name]) for name in names if name in row.context]
    return [f'{words(name)} {value}' if value[:1].isdigit() else value for name, value in values]


def curves(rows: Iterable[Row]) -> dict[Axis, dict[str, list[Row]]]:
    """Points by panel and name of their line, by ascending x.

    More lines than hues have a panel for each value of the first context that varies.
    """
    rows = sorted((row for row in rows if row.x is not None), key=lambda row: row.x)
    names, arms = varying(rows), {row.arm for row in rows}
    quantities = {row.quantity for row in rows}
    panels: dict[Axis, dict[str, list[Row]]] = {}
    for axis in dict.fromkeys(Axis(row.unit, row.x_label or 'x', row.kind) for row in rows):
        points = [row for row in rows if (row.unit, row.x_label or 'x', row.kind) == axis[:3]]
        lines = {(row.quantity, row.arm, *row.context.items()) for row in points}
        split = varying(points)[:1] if len(lines) > len(HUES) else []
        for row in points:
            where = located(row, [name for name in names if name not in split])
            about = [row.quantity] * (len(quantities) > 1 or not where)
            about += [row.arm or ''] * (len(arms) > 1)
            label = ', '.join(filter(None, dict.fromkeys(about + where)))
            panel = axis._replace(context=', '.join(located(row, split)))
            panels.setdefault(panel, {}).setdefault(label, []).append(row)
    return panels


def figure_stems(claim: ClaimResult) -> list[str]:
    """The names of its figures: 'b7_differences', 'b7_curves'; exact checks have tables alone."""
    kinds = {
        'differences': any(line.rows.keys() - {Kind.REINVESTED} for line in compared(claim.rows)),
        'curves': any(row.x is not None and row.kind != Kind.EXACT for row in claim.rows),
    }
    return [f'{claim.name.lower()}_{kind}' for kind, is_drawn in kinds.items() if is_drawn]


def claim_figures(claim: ClaimResult) -> list[Drawing]:
    """The figures of its rows, one for each of `figure_stems`."""
    drawn = {'differences': _differences, 'curves': _curves}
    with style_sheet():
        return [
            Drawing(drawn[stem.partition('_')[2]](claim.rows), stem) for stem in figure_stems(claim)
        ]


def answers_figure(answers: Sequence[Answer]) -> Drawing | None:
    """The difference of each change in a decoder at equal parameter count; None without any."""
    rows = {answer.name: row for answer in answers if (row := answer.row('decoder', Kind.MATCHED))}
    decided = [decision.value for decision in DECIDED]
    lines = [
        Line(
            row.decision or '',
            *(row.value, row.low, row.high),
            name=f'{name}: {row.decision}',
            is_decided=row.decision in decided,
        )
        for name, row in rows.items()
    ]
    if not lines:
        return None
    panel = Panel(lines, f'difference ({UNIT})', PARTS[Kind.MATCHED], 0.0)
    reach = limits_of(lines, 0.0, far=math.inf)
    look = styles(sorted({line.arm for line in lines}), Decision.NO_VERDICT.value)
    with style_sheet():
        figure = forest([panel], look, 'no difference', None, reach, longest=_LONGEST)
    return Drawing(figure, 'answers')


def _differences(rows: Sequence[Row]) -> Figure:
    """A panel at the baseline's shape and one at equal parameter count, with the decisions.

    A line has the shortest name that tells it apart.
    """
    lines = compared(rows)
    chosen = varying(lines)

    def num_names(names: Sequence[str]) -> int:
        return len({(line.quantity, *(line.context.get(name) for name in names)) for line in lines})

    for name in reversed(chosen):
        others = [other for other in chosen if other != name]
        chosen = others if num_names(others) == num_names(chosen) else chosen
    several = len({line.quantity for line in lines}) > 1 or not chosen
    units = ', '.join(dict.fromkeys(row.unit for line in lines for row in line.rows.values()))
    kinds = [k for k in (Kind.REMOVED, Kind.MATCHED) if any(k in line.rows for line in lines)]
    drawn = []
    for kind in kinds:
        panel = []
        for line in lines:
            where = [short(line.quantity, _QUANTITY)] * several + located(line, chosen)
            spoken = {row.speaks for row in line.rows.values()}
            drawn_line = Line('', absent='not measured')
            if row := line.rows.get(kind):
                drawn_line = Line(row.arm or '', row.value, row.low, row.high)
                if row.expected is not None and row.tolerance is not None:
                    ends = row.expected - row.tolerance, row.expected + row.tolerance
                    drawn_line = drawn_line._replace(reported=ends)
            panel.append(
                drawn_line._replace(
                    name=', '.join(where),
                    right=line.decision if kind == kinds[-1] else '',
                    is_decided=bool(spoken & {Speaks.FOR, Speaks.AGAINST}),
                )
            )
        drawn.append(Panel(panel, f'difference ({units})', PARTS[kind], 0.0))
    look = styles(list(dict.fromkeys(row.arm or '' for row in rows)), 'qk/vo')
    reach = limits_of([line for panel in drawn for line in panel.lines], 0.0)
    return forest(drawn, look, 'no difference', None, reach, longest=_LONGEST)


def _curves(rows: Sequence[Row]) -> Figure:
    """Values against x, by `curves`; panels of one axis have one scale, several lines a legend."""
    by_axis = curves(row for row in rows if row.kind != Kind.EXACT)
    alike = len({axis._replace(context='') for axis in by_axis}) == 1 < len(by_axis)
    lines = dict.fromkeys(name for of_axis in by_axis.values() for name in of_axis)
    labels = {name: textwrap.fill(name, _LEGEND, break_long_words=False) for name in lines}
    looks = [
        {'color': hue, 'marker': marker, 'linestyle': dashes}
        for dashes in DASHES
        for hue, marker in zip(HUES, MARKERS, strict=True)
    ]
    look = dict(zip(lines, itertools.cycle(looks), strict=False))
    extra = 0.2 * sum(label.count('\n') + 1 for label in labels.values())
    figure = Figure(figsize=(WIDTH, (2.2 if alike else 3.0) * len(by_axis) + extra + 0.3))
    axes = panels(figure, 1, len(by_axis), sharex=alike, sharey=alike)
    for ax, (axis, of_axis) in zip(axes, by_axis.items(), strict=True):
        for name, points in of_axis.items():
            x, y = ([getattr(row, field) for row in points] for field in ('x', 'value'))
            ax.plot(x, y, label=labels[name], zorder=3, **look[name])
            if bounded := [row for row in points if row.low is not None]:
                band = ([getattr(row, field) for row in bounded] for field in ('x', 'low', 'high'))
                ax.fill_between(*band, color=look[name]['color'], alpha=0.18, linewidth=0)
        sharing = by_axis.values() if alike else [of_axis]
        _scales(ax, [row for each in sharing for points in each.values() for row in points])
        quantities = dict.fromkeys(row.quantity for points in of_axis.values() for row in points)
        y_label = f'{"values" if len(quantities) > 1 else next(iter(quantities))} ({axis.unit})'
        ax.set(xlabel=axis.x_label, title=short(axis.context))
        ax.set_ylabel(textwrap.fill(y_label.removesuffix(' ()'), _LEGEND))
        if alike:
            ax.label_outer()
    if len(lines) > 1:
        legend(figure, 'lower')
    return figure


def _scales(ax: Axes, rows: Sequence[Row]) -> None:
    """Sets log scales where positive values span decades; x = 0 is then drawn at the left."""
    if any(row.low is not None and row.low <= 0 <= row.high for row in rows):
        ax.axhline(0.0, label='_zero', **REFERENCE)
    every = sorted({row.x for row in rows if row.x is not None})
    if every[0] >= 0 and _spans(every, _X_SPAN):
        if every[0] == 0:
            ax.set_xscale('symlog', linthresh=every[1], linscale=0.5)
        else:
            ax.set_xscale('log')
        ax.minorticks_off()
        ax.set_xticks(every[:: -(-len(every) // _TICKS)])
        ax.xaxis.set_major_formatter(lambda x, _: f'{x:,g}' if x < 1e5 else si(x))
    lowest = [row.value if row.low is None else row.low for row in rows]
    if min(lowest) >= 0 and _spans(lowest, _Y_SPAN):
        ax.set_yscale('log', nonpositive='mask')
        ax.yaxis.set_major_formatter('{x:g}')


def _spans(values: Sequence[float], factor: float) -> bool:
    positive = [value for value in values if value > 0]
    return len(positive) > 1 and max(positive) > factor * min(positive)

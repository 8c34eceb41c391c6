"""Figures of a claim, from its rows: a forest of differences by context, and curves."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.report.claim_results import ClaimResult, ClaimVerdict, Kind, Row, Speaks
from qkattn.report.figures.curve_figure import MAX_LINES
from qkattn.report.figures.forest import Line, Panel, forest, limits_of
from qkattn.report.figures.style import (
    DASHES,
    HUES,
    MARKERS,
    REFERENCE,
    WIDTH,
    Drawing,
    Look,
    legend,
    panels,
    short,
    style_sheet,
    styles,
)
from qkattn.report.prose import si, words

PARTS: dict[str, str] = {
    Kind.REMOVED: 'same shape, fewer parameters',
    Kind.REINVESTED: 'parameters reinvested',
    Kind.MATCHED: 'equal parameter count',
}
OVERVIEW = 'verdicts'
# An axis whose positive values span more than this is logarithmic.
_X_SPAN, _Y_SPAN = 10.0, 100.0
# Characters of a name, and of what is compared in it, which leave room for the context; of a line
# in a legend.
_LONGEST, _WHAT, _LEGEND = 52, 22, 34
# An axis has a tick at each of so many places.
_TICKS = 8


class Compared(NamedTuple):
    """Rows about the same thing in the same context, by kind; what tells them from others."""

    what: str
    context: Mapping[str, str]
    rows: dict[str, Row]

    @property
    def word(self) -> str:
        """'worse', or 'worse / undecided' where the verdicts of its rows differ."""
        words = {kind: self.rows[kind].word for kind in PARTS if kind in self.rows}
        return ' / '.join(dict.fromkeys(word for word in words.values() if word))

    @property
    def is_decided(self) -> bool:
        return any(row.speaks in (Speaks.FOR, Speaks.AGAINST) for row in self.rows.values())


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Removed, reinvested and matched rows, each what and context once, in their order.

    The kind tells the shape, which is no part of the context; of two rows of one kind that which
    decides is shown.
    """
    found: dict[tuple, Compared] = {}
    for row in rows:
        if row.kind in PARTS and row.x is None:
            context = {name: of for name, of in row.context.items() if name != 'shape'}
            place = row.what, row.arm, *context.items()
            parts = found.setdefault(place, Compared(row.what, context, {})).rows
            if row.speaks != Speaks.BESIDE or row.kind not in parts:
                parts[row.kind] = row
    return list(found.values())


def varying(rows: Iterable[Row | Compared]) -> list[str]:
    """The names in contexts whose values differ between rows, and do not only repeat `what`."""
    rows, found = list(rows), []
    for name in dict.fromkeys(name for row in rows for name in row.context):
        among = {row.context.get(name) for row in rows}
        if len(among) > 1 and any(row.context.get(name) not in (None, row.what) for row in rows):
            found.append(name)
    return found


def places(row: Row | Compared, names: Iterable[str]) -> list[str]:
    """'d_model=64', 'stdlib', 'steps 500': these of its context, a number with its name."""
    known = [(name, row.context[name]) for name in names if name in row.context]
    return [f'{words(name)} {of}' if of[:1].isdigit() else of for name, of in known]


def claim_figures(claim: ClaimResult, *, narrow: bool = False) -> tuple[Drawing, ...]:
    """The figures that its rows allow; of checks without a curve there is none."""
    look = _look(claim.rows, narrow)
    stem = claim.name.lower()
    with style_sheet():
        differences = _differences(_named(compared(claim.rows)), look)
        levels = _levels([row for row in claim.rows if row.kind == Kind.MEASURED], look)
        lines = _curves(claim.rows, look)
    made = {'differences': differences, 'levels': levels, 'curves': lines}
    return tuple(
        Drawing(figure, f'{stem}_{kind}', {'kind': kind, 'claim': claim})
        for kind, figure in made.items()
        if figure is not None
    )


def overview(claims: Sequence[ClaimResult], *, narrow: bool = False) -> Drawing | None:
    """The decisive difference of every decided claim that rests on one; None where none does."""
    named = []
    for claim in claims:
        if claim.verdict == ClaimVerdict.UNDECIDED:
            continue
        row = claim.decisive_row
        for of in compared(claim.rows):
            if row in of.rows.values():
                named.append((f'{claim.name}  {of.what}', of, str(claim.verdict)))
    with style_sheet():
        rows = [row for claim in claims for row in claim.rows]
        figure = _differences(named, _look(rows, narrow), far=math.inf)
    return figure and Drawing(figure, OVERVIEW, {'kind': OVERVIEW})


def _look(rows: Iterable[Row], narrow: bool) -> Look:
    return Look(styles(list(dict.fromkeys(row.arm or '' for row in rows)), 'qk/vo'), narrow)


def _named(of_claim: Sequence[Compared]) -> list[tuple[str, Compared, str]]:
    """What is compared, each under the name that tells it from the others."""
    names = varying(of_claim)
    several = len({of.what for of in of_claim}) > 1 or not names
    return [
        (', '.join([*[short(of.what, _WHAT)] * several, *places(of, names)]), of, of.word)
        for of in of_claim
    ]


def _differences(
    named: Sequence[tuple[str, Compared, str]], look: Look, **limits: float
) -> Figure | None:
    """A panel for each kind; that of reinvested parameters only where it decides."""
    kinds = [
        kind
        for kind in PARTS
        if any(kind in of.rows and _drawn(of.rows[kind]) for _, of, _ in named)
    ]
    if not kinds:
        return None
    of_panels = []
    for kind in kinds:
        lines = []
        for name, of, word in named:
            row = of.rows.get(kind)
            right = word if kind == kinds[-1] else ''
            line = _line(row, name) if row else Line('', absent='not measured', name=name)
            lines.append(line._replace(right=right, is_decided=of.is_decided))
        units = dict.fromkeys(row.unit for _, of, _ in named for row in of.rows.values())
        of_panels.append(Panel(lines, f'difference ({", ".join(units)})', PARTS[kind], 0.0))
    every = [line for panel in of_panels for line in panel.lines]
    reach = limits_of(every, 0.0, **limits)
    return forest(of_panels, look, len(kinds), 'no difference', None, reach, longest=_LONGEST)


def _drawn(row: Row) -> bool:
    return row.kind != Kind.REINVESTED or row.speaks != Speaks.BESIDE


def _line(row: Row, name: str) -> Line:
    """Reported numbers are those that a row is compared with."""
    reported = None
    if row.expected is not None:
        reported = row.expected - (row.tolerance or 0.0), row.expected + (row.tolerance or 0.0)
    return Line(row.arm or '', row.value, row.low, row.high, name=name, reported=reported)


def _levels(rows: Sequence[Row], look: Look) -> Figure | None:
    """Measured values that are no points of a curve, a panel for each unit."""
    rows = [row for row in rows if row.x is None]
    names, of_panels = varying(rows), []
    for unit, of_unit in itertools.groupby(sorted(rows, key=_unit), key=_unit):
        lines = []
        for row in of_unit:
            decided = row.speaks in (Speaks.FOR, Speaks.AGAINST)
            name = ', '.join([row.what, *places(row, names)])
            lines.append(_line(row, name)._replace(is_decided=decided))
        of_panels.append(Panel(lines, unit or 'value'))
    return forest(of_panels, look, longest=_LONGEST) if of_panels else None


def _unit(row: Row) -> str:
    return row.unit


def _curves(rows: Sequence[Row], look: Look) -> Figure | None:
    """Values against x, by `curves`; panels of one axis have one scale.

    A single line has its name at the axis, several have a legend.
    """
    found = curves(rows)
    if not found:
        return None
    alike = len({axis._replace(place='') for axis in found}) == 1 < len(found)
    columns = 1 if look.narrow else min(2 + alike, len(found))
    height = 2.2 if alike else 3.6 if columns == 1 else 3.0
    lines = {name: points for of in found.values() for name, points in of.items()}
    below = alike or len(lines) > MAX_LINES
    extra = 0.2 * sum(map(_num_lines, lines)) * (look.narrow or below)
    width = WIDTH + 1.2 if columns == 1 else WIDTH + 3.0
    figure = look.figure(width, height * -(-len(found) // columns) + extra + 0.3)
    of_look = _line_styles(lines, look)
    axes = panels(figure, columns, len(found), sharex=alike, sharey=alike)
    for ax, (axis, of) in zip(axes, found.items(), strict=True):
        _curve_panel(ax, of, of_look)
        among = found.values() if alike else [of]
        _scales(ax, [row for of in among for points in of.values() for row in points])
        kind = PARTS.get(axis.kind, '') * (len({axis.kind for axis in found}) > 1)
        title = ', '.join(filter(None, [axis.place, kind]))
        only = _wrapped(next(iter(lines))) if len(lines) == 1 else ''
        ax.set(xlabel=axis.x_label, ylabel=only or axis.unit or 'value', title=short(title))
        if alike:
            ax.label_outer()
    if len(lines) > 1:
        legend(figure, 'lower center' if below else 'right center', ncols=columns if below else 1)
    return figure


class Axis(NamedTuple):
    """What the points of one panel of curves have in common; a place in their contexts or ''."""

    unit: str
    x_label: str
    kind: str
    place: str = ''


def curves(rows: Iterable[Row]) -> dict[Axis, dict[str, list[Row]]]:
    """Points by panel and by the name of their line, by ascending x.

    Many lines have a panel for each value of one name in their contexts.
    """
    rows = sorted((row for row in rows if row.x is not None), key=lambda row: row.x)
    names, whats, arms = varying(rows), {row.what for row in rows}, {row.arm for row in rows}
    of_axes: dict[Axis, list[Row]] = {}
    for row in rows:
        of_axes.setdefault(Axis(row.unit, row.x_label or 'x', row.kind), []).append(row)
    found: dict[Axis, dict[str, list[Row]]] = {}
    for axis, of_axis in of_axes.items():
        apart = _apart(of_axis)
        for row in of_axis:
            where = places(row, [name for name in names if name not in apart])
            about = [row.what] * (len(whats) > 1 or not where) + [row.arm or ''] * (len(arms) > 1)
            # A context or an arm that repeats the name adds nothing.
            label = ', '.join(filter(None, dict.fromkeys(about + where)))
            panel = axis._replace(place=', '.join(places(row, apart)))
            found.setdefault(panel, {}).setdefault(label, []).append(row)
    return found


def _apart(rows: Sequence[Row]) -> list[str]:
    """The name in contexts, of the fewest values, that has a panel for each where lines are many.

    None where a panel would have one line.
    """
    lines = {(row.what, row.arm, *row.context.items()) for row in rows}
    counts = {
        name: len({row.context[name] for row in rows})
        for name in varying(rows)
        if all(name in row.context for row in rows)
    }
    fewest = sorted(counts, key=lambda name: counts[name])[:1]
    return [name for name in fewest if 2 * counts[name] <= len(lines) > len(HUES)]


def _line_styles(lines: Mapping[str, Sequence[Row]], look: Look) -> dict[str, dict]:
    """Those of the arms where each line has an arm of its own, else hues in turn."""
    arms = [of[0].arm for of in lines.values()]
    if None not in arms and len(set(arms)) == len(arms):
        return {name: look[of[0].arm or ''] for name, of in lines.items()}
    looks = [
        {'color': hue, 'marker': marker, 'linestyle': dashes}
        for dashes in DASHES
        for hue, marker in zip(HUES, MARKERS, strict=True)
    ]
    return dict(zip(lines, itertools.cycle(looks), strict=False))


def _curve_panel(ax: Axes, lines: Mapping[str, Sequence[Row]], of_look: Mapping) -> None:
    for name, points in lines.items():
        x, y = ([getattr(row, of) for row in points] for of in ('x', 'value'))
        ax.plot(x, y, label=_wrapped(name), zorder=3, **of_look[name])
        bounded = [row for row in points if row.low is not None]
        if bounded:
            ends = ([getattr(row, of) for row in bounded] for of in ('x', 'low', 'high'))
            ax.fill_between(*ends, color=of_look[name]['color'], alpha=0.18, linewidth=0)


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

"""Figures of a benchmark: one PNG a suite, one panel a group."""

import io
import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from qkattn.benchmark.measurement import Group, Measurement
from qkattn.report.figures.style import DASHES, HUES, INK, MARKERS, WIDTH, legend, style_sheet


def draw(groups: Sequence[Group]) -> dict[str, bytes]:
    """'SUITE.png' -> a figure of the suite's groups that have times."""
    figures = {}
    for suite, members in itertools.groupby(groups, key=lambda group: group.suite):
        panels = [group for group in members if any(row.rounds for row in group.rows)]
        if panels:
            with style_sheet():
                figures[f'{suite}.png'] = _png(_figure(panels))
    return figures


def _figure(groups: Sequence[Group]) -> Figure:
    heights = [2.4 if group.x else 0.7 + 0.22 * len(group.rows) for group in groups]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4))
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, group in zip(axes, groups, strict=True):
        ax.set_title(group.title, fontsize=8)
        timed = [row for row in group.rows if row.rounds]
        _lines(ax, group.x, timed) if group.x else _rows(ax, timed)
    if any(group.x for group in groups):
        legend(figure, 'lower center', ncols=4)
    return figure


def _rows(ax: Axes, rows: Sequence[Measurement]) -> None:
    """Median and quartiles of each row."""
    for place, row in enumerate(reversed(rows)):
        low, high = row.quartiles
        ax.plot([1e3 * low, 1e3 * high], [place, place], color=HUES[0], linewidth=3, alpha=0.5)
        ax.plot([1e3 * row.median], [place], color=INK, marker='o', markersize=4)
    ax.set_yticks(range(len(rows)), [row.name for row in reversed(rows)], fontsize=7)
    ax.set(xlim=(0, None), ylim=(-0.6, len(rows) - 0.4))
    ax.set_xlabel('ms', fontsize=7)


def _lines(ax: Axes, x: str, rows: Sequence[Measurement]) -> None:
    """Median time against a number among each row's extra facts, a line a 'line'.

    The time is that of a token where all rows have tokens.
    """
    names = list(dict.fromkeys(row.extra['line'] for row in rows))
    by_token = all('tokens' in row.extra for row in rows)
    for number, name in enumerate(names):
        own = [row for row in rows if row.extra['line'] == name]
        style = {'color': HUES[number % len(HUES)], 'marker': MARKERS[number % len(MARKERS)]}
        style['linestyle'] = DASHES[number // len(HUES) % len(DASHES)]
        times = [1e6 * row.median / row.extra['tokens'] if by_token else row.median for row in own]
        ax.plot([row.extra[x] for row in own], times, label=name, **style)
    ax.set(xscale='log', yscale='log')
    ax.set_xticks(sorted({row.extra[x] for row in rows}))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FormatStrFormatter('%g'))
        axis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(x.replace('_', ' '), fontsize=7)
    ax.set_ylabel('µs per token' if by_token else 's', fontsize=7)


def _png(figure: Figure) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format='png', dpi=160, facecolor='white', metadata={'Software': None})
    return png.getvalue()

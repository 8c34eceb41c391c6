"""Forest plots: mean, interval and seeds of each arm, in panels; all are drawn by `forest`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qkattn.report.figures.style import (
    GRID,
    INK,
    MUTED,
    SURFACE,
    Look,
    VariantStyle,
    panels,
    short,
)

# Keywords of a line at zero, at the baseline's mean, at a chosen value.
REFERENCE: dict[str, Any] = {'color': INK, 'linewidth': 1, 'linestyle': (0, (4, 2)), 'zorder': 1}
# Inches: the arms' names, a plot by itself or among others, numbers and verdicts right of it.
NAMES, ALONE, AMONG, NUMBERS, WORDS = 2.0, 4.6, 2.3, 1.72, 0.9
# Inches of an arm's line, and of each where there are many arms.
LINE, CLOSE, MANY = 0.25, 0.2, 15
# Seeds are drawn below the mean: on top of the interval they would be hidden.
BELOW = 0.28


class Line(NamedTuple):
    """One arm in one panel; `absent` says why where there is no mean."""

    arm: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = ()
    absent: str = ''
    numbers: str = ''
    word: str = ''
    is_decided: bool = False


class Panel(NamedTuple):
    """Lines from the top; `reference` is the x of a dashed line."""

    lines: Sequence[Line]
    xlabel: str
    title: str = ''
    reference: float | None = None


def forest(
    of_panels: Sequence[Panel],
    look: Look,
    columns: int,
    reference: str | None = None,
    limits: tuple[float, float] | None = None,
    margin: float | None = None,
    sharex: bool = False,
    dot: str = 'one seed',
) -> Figure:
    """Panels in rows of `columns`, whose y axis a row shares.

    `reference` and `dot` are the names of the dashed line and of the small dots in the legend;
    marks beyond `limits` are drawn at the edge, as arrowheads.
    """
    lines = [line for panel in of_panels for line in panel.lines]
    single = len(of_panels) == 1
    has_numbers = single and any(line.numbers for line in lines)
    has_words = any(line.word for line in lines)
    firsts = range(0, len(of_panels), columns)
    counts = [max(len(panel.lines) for panel in of_panels[i : i + columns]) for i in firsts]
    height = [(LINE if count <= MANY else CLOSE) * count + 0.7 for count in counts]
    panel_width = (ALONE - has_words * 1.1 if single else AMONG) + WORDS * has_words
    width = NAMES + columns * panel_width + NUMBERS * has_numbers
    figure = Figure(figsize=(width, sum(height) + 0.45))
    share = {'sharex': sharex, 'sharey': 'row', 'height_ratios': height}
    for ax, panel in zip(panels(figure, columns, len(of_panels), **share), of_panels, strict=True):
        if margin is not None:
            band = {'color': GRID, 'alpha': 0.75, 'linewidth': 0, 'zorder': 0}
            ax.axvspan(-margin, margin, label='margin', **band)
        if panel.reference is not None:
            ax.axvline(panel.reference, **REFERENCE)
        if limits:
            ax.set_xlim(limits)
        for y, line in enumerate(panel.lines):
            _draw(ax, y, line, look[line.arm], limits)
            if has_numbers:
                _right(ax, y, line.numbers, fontsize=8)
            weight = 'bold' if line.is_decided else 'normal'
            colour = INK if line.is_decided else MUTED
            _right(ax, y, line.word, has_numbers * NUMBERS, color=colour, fontweight=weight)
        if has_numbers:
            _right(ax, -0.85, 'mean [95 % interval]', fontsize=8, color=MUTED)
            _right(ax, -0.85, 'verdict' * has_words, NUMBERS, fontsize=8, color=MUTED)
        ax.set_yticks(range(len(panel.lines)), [short(line.arm) for line in panel.lines])
        ax.set_ylim(len(panel.lines) - 0.4, -0.6)
        ax.tick_params(axis='y', length=0)
        ax.tick_params(labelbottom=True)
        ax.grid(visible=False, axis='y')
        ax.xaxis.set_major_locator(MaxNLocator(6 if single else 3))
        ax.set_xlabel(panel.xlabel)
        ax.set_title(short(panel.title))
    handles: list[Line2D | Patch] = mean_handles(any(line.low is not None for line in lines), dot)
    if reference:
        handles.append(Line2D([], [], label=reference, **REFERENCE))
    if margin is not None:
        handles.append(Patch(color=GRID, label=f'±{margin:g}, equivalent inside'))
    figure.legend(handles=handles, loc='outside lower center', ncols=4 if width > 6.5 else 2)
    return figure


def _draw(
    ax: Axes, y: int, line: Line, style: VariantStyle, limits: tuple[float, float] | None
) -> None:
    if line.mean is None:
        _reason(ax, y, line.absent)
        return
    low, high = limits or (-math.inf, math.inf)
    beyond = '>' if line.mean > high else '<' if line.mean < low else None
    if line.low is not None and line.high is not None:
        ends = np.clip((line.low, line.high), low, high)
        ax.plot(ends, [y, y], color=style.colour, linewidth=2, solid_capstyle='butt')
    seen = [seed for seed in line.seeds if low <= seed <= high]
    seed_dots(ax, seen, [y + BELOW] * len(seen), style)
    for marker, edge in (('<', low), ('>', high)):
        if any(seed < low if marker == '<' else seed > high for seed in line.seeds):
            arrow = {'marker': marker, 'markersize': 3.5, 'color': style.colour}
            ax.plot(edge, y + BELOW, clip_on=False, **arrow)
    mark = mean_mark(dataclasses.replace(style, marker=beyond or style.marker))
    # One at the edge of the axes is drawn whole.
    ax.plot(min(max(line.mean, low), high), y, clip_on=False, **mark)


def _reason(ax: Axes, y: float, text: str) -> None:
    box = {'facecolor': SURFACE, 'edgecolor': 'none', 'pad': 1}
    font: dict[str, Any] = {'fontsize': 8, 'color': MUTED, 'style': 'italic', 'va': 'center'}
    at = {'xycoords': ('axes fraction', 'data'), 'zorder': 5}
    ax.annotate(text, (0.02, y), bbox=box, **at, **font)


def _right(ax: Axes, y: float, text: str, inches: float = 0.0, **font: Any) -> None:
    """Writes `text` at height `y`, so far right of the axes."""
    if text:
        at = {'xytext': (8 + 72 * inches, 0), 'textcoords': 'offset points'}
        coordinates = ('axes fraction', 'data')
        font = font | {'va': 'center', 'annotation_clip': False}
        ax.annotate(text, (1.0, y), xycoords=coordinates, **at, **font)


def mean_mark(style: VariantStyle, size: float = 6.5) -> dict[str, Any]:
    """Keywords of `Axes.plot` for an arm's means."""
    edge = {'markeredgecolor': SURFACE, 'markeredgewidth': 0.8}
    return {'color': style.colour, 'marker': style.marker, 'markersize': size, 'zorder': 4} | edge


def seed_dots(ax: Axes, x: Sequence[float], y: Sequence[float], style: VariantStyle) -> None:
    """Draws a small dot for each seed."""
    ax.scatter(x, y, s=8, color=style.colour, alpha=0.6, linewidths=0, zorder=3)


def dot_handle(label: str, size: float, marker: str = 'o', **keywords: Any) -> Line2D:
    """The legend entry of a mark that every arm has in its own colour."""
    plain: dict[str, Any] = {'color': MUTED, 'linestyle': 'none', 'markeredgewidth': 0}
    return Line2D([], [], marker=marker, markersize=size, label=label, **plain | keywords)


def mean_handles(intervals: bool, dot: str = 'one seed', size: float = 6.5) -> list[Line2D]:
    """The legend entries of means, seeds and, where there are any, intervals."""
    handles = [dot_handle('mean', size), dot_handle(dot, 3, alpha=0.6)]
    if intervals:
        handles.append(Line2D([], [], color=MUTED, linewidth=2, label='95 % interval'))
    return handles

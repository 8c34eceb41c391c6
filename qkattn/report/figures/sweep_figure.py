"""Sweeps of a tuned setting: loss against it, one panel for each arm, with the fitted parabola."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from qkattn.report.figures import forest
from qkattn.report.figures.style import (
    INK,
    MUTED,
    SURFACE,
    WIDTH,
    Drawing,
    Look,
    VariantStyle,
    panels,
    short,
)
from qkattn.stats.sweep import REACH, Sweep
from qkattn.verdict.arms import Arm

COLUMNS = 4
# Panels share their y axis unless the ranges that show each sweep differ by more than this factor.
MAX_RATIO = 5.0
# The axis ends at this many times the rise within one grid step of the best value.
CUT = 3.0


def sweep_panels(
    knob: str, arms: Sequence[Arm], look: Look, stem: str, several_sizes: bool
) -> Drawing:
    """A panel for each of the arms, which are of one size."""
    sweeps = [arm.sweeps[knob] for arm in arms]
    columns = min(COLUMNS, len(arms))
    windows = [_window(sweep) for sweep in sweeps]
    shared = _shared(windows)
    size = max(WIDTH, 2.1 * columns + 0.6), 1.75 * math.ceil(len(arms) / columns) + 0.95
    figure = Figure(figsize=size)
    axes = panels(figure, columns, len(arms), sharex=True, sharey=shared is not None)
    values = sorted({value for sweep in sweeps for value in sweep.values})
    drawn: set[str] = set()
    for ax, arm, sweep, own in zip(axes, arms, sweeps, windows, strict=True):
        _value_axis(ax, values)
        ax.set_ylim(shared or (own if math.isfinite(own[0]) else (0.0, 1.0)))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.set_title(short(arm.variant, 23), fontsize=8.5)
        drawn |= _draw(ax, sweep, look[arm.variant])
    figure.supxlabel(f'{knob.replace("_", " ")} (log scale)')
    figure.supylabel('val loss (nats/token)')
    figure.legend(handles=_handles(drawn), loc='outside upper center', ncols=4)
    size_shown = arms[0].size if several_sizes else None
    scale = ('one' if shared else 'own') if len(arms) > 1 else None
    return Drawing.of(figure, stem, knob=knob, size=size_shown, scale=scale)


def _near(sweep: Sweep, reach: int = REACH) -> tuple[float, ...]:
    """Values within `reach` grid steps of the best; the default is what a parabola is fitted to."""
    place = sweep.values.index(sweep.best)
    return sweep.values[max(place - reach, 0) : place + reach + 1]


def _window(sweep: Sweep) -> tuple[float, float]:
    """Y limits that show the lowest loss and what rises nearby; NaN without any loss."""
    seeds = {v: losses for v, losses in zip(sweep.values, sweep.losses, strict=True) if losses}
    if not seeds:
        return math.nan, math.nan
    low = min(min(losses) for losses in seeds.values())
    rise = max((max(seeds[v]) - low for v in _near(sweep, 1) if v in seeds), default=0.0)
    rise = rise or 0.005 * abs(low) or 0.01
    high = min(low + CUT * rise, max(max(losses) for losses in seeds.values()))
    high = max(high, low + rise)
    # Below is room for the chosen value in writing, above it for marks at the edge.
    return low - 0.35 * (high - low), high + 0.22 * (high - low)


def _shared(windows: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    known = [(low, high) for low, high in windows if math.isfinite(low)]
    if not known:
        return 0.0, 1.0
    low, high = min(low for low, _ in known), max(high for _, high in known)
    usual = statistics.median(high - low for low, high in known)
    return (low, high) if high - low <= MAX_RATIO * usual else None


def _value_axis(ax: Axes, values: Sequence[float]) -> None:
    ax.set_xscale('log')
    ax.set_xlim(values[0] / 1.6, values[-1] * 1.6)
    # A panel has room for three labels.
    ax.xaxis.set_major_locator(FixedLocator(values[::-1][:: math.ceil(len(values) / 3)]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:.3g}'))
    ax.xaxis.set_minor_locator(FixedLocator(values))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _draw(ax: Axes, sweep: Sweep, style: VariantStyle) -> set[str]:
    """Draws one arm; returns which of the marks that need explaining it made."""
    low, high = ax.get_ylim()
    top = high - 0.04 * (high - low)
    for value, losses in zip(sweep.values, sweep.losses, strict=True):
        seen = [loss for loss in losses if loss <= top]
        forest.seed_dots(ax, [value] * len(seen), seen, style)
    means = dict(zip(sweep.values, sweep.means, strict=True))
    shown = {value: mean for value, mean in means.items() if mean <= top}
    mark = {'linestyle': 'none', 'label': 'mean'} | forest.mean_mark(style, 5)
    ax.plot(list(shown), list(shown.values()), **mark)
    diverged = [value for value, mean in means.items() if math.isinf(mean)]
    above = [value for value in means if value not in shown and value not in diverged]
    for name, values in (('above', above), ('diverged', diverged)):
        crossed = name == 'diverged'
        at_top: dict[str, Any] = {'marker': 'x' if crossed else '^', 'linestyle': 'none'}
        at_top |= {'color': INK if crossed else style.colour, 'markersize': 5, 'zorder': 5}
        at_top |= {'markeredgewidth': 1.3 * crossed, 'transform': ax.get_xaxis_transform()}
        ax.plot(values, [0.94] * len(values), label=name, **at_top)
    drawn = {name for name, values in (('above', above), ('diverged', diverged)) if values}
    drawn |= _draw_fit(ax, sweep, style)
    if len(diverged) == len(means):
        _say(ax, 'diverged at every value', 0.4, fontweight='bold', fontsize=8)
        return drawn
    ax.axvline(sweep.chosen, label='chosen', **forest.REFERENCE)
    interval = (
        f' [{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]' if 'interval' in drawn else ''
    )
    _say(ax, f'{sweep.chosen:.3g}{interval}', 0.04, fontsize=7.5)
    if not sweep.bracketed:
        _say(ax, 'not bracketed', 0.15, fontweight='bold', fontsize=8)
    return drawn | {'chosen'}


def _say(ax: Axes, text: str, y: float, **font: Any) -> None:
    box = {'facecolor': SURFACE, 'edgecolor': 'none', 'pad': 1, 'alpha': 0.8}
    font |= {'ha': 'center', 'zorder': 6, 'bbox': box}
    ax.annotate(text, (0.5, y), xycoords='axes fraction', **font)


def _draw_fit(ax: Axes, sweep: Sweep, style: VariantStyle) -> set[str]:
    drawn = set()
    if sweep.optimum_low is not None and sweep.optimum_high is not None:
        drawn.add('interval')
        band = {'color': INK, 'alpha': 0.1, 'linewidth': 0, 'zorder': 0}
        ax.axvspan(sweep.optimum_low, sweep.optimum_high, **band)
    if sweep.loss is not None:
        drawn.add('fit')
        means = dict(zip(sweep.values, sweep.means, strict=True))
        near = [value for value in _near(sweep) if math.isfinite(means[value])]
        values = np.geomspace(near[0], near[-1], 60)
        losses = sweep.loss.mean + sweep.curvature / 2 * np.log(values / sweep.optimum) ** 2
        ax.plot(values, losses, color=style.colour, linewidth=1.3, zorder=3, label='fit')
    return drawn


def _handles(drawn: set[str]) -> list[Line2D | Patch]:
    known: dict[str, Line2D | Patch] = {
        'fit': Line2D([], [], color=MUTED, linewidth=1.3, label='parabola'),
        'chosen': Line2D([], [], label='chosen value', **forest.REFERENCE),
        'interval': Patch(color=INK, alpha=0.1, label='95 % interval of the optimum'),
        'diverged': forest.dot_handle(
            'a seed diverged', 5, marker='x', color=INK, markeredgewidth=1.3
        ),
        'above': forest.dot_handle('mean above the axis', 5, marker='^'),
    }
    explained = [handle for name, handle in known.items() if name in drawn]
    return [*forest.mean_handles(intervals=False, size=5), *explained]

"""Tuning curves: loss against a tuned setting, one panel for each arm, with the fitted parabola."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from qkattn.report.figures import marks
from qkattn.report.figures.style import (
    INK,
    MUTED,
    SURFACE,
    WIDTH,
    Rendered,
    VariantStyle,
    render,
    short,
)
from qkattn.stats.sweep import REACH, Sweep

COLUMNS = 4
# Panels share their y axis unless the ranges that show each bowl differ by more than this factor.
MAX_RATIO = 5.0
# The axis ends at this many times the rise within one grid step of the best value.
CUT = 3.0


def bowls_figure(
    knob: str,
    bowls: Mapping[str, Sweep],
    look: Mapping[str, VariantStyle],
    stem: str,
    size: str | None,
) -> Rendered:
    """A panel for each arm of `bowls`, in their order; `size` is named where there are several."""
    columns = min(COLUMNS, len(bowls))
    rows = math.ceil(len(bowls) / columns)
    windows = {arm: _window(bowl) for arm, bowl in bowls.items()}
    shared = _shared(list(windows.values()))
    width = max(WIDTH, 2.1 * columns + 0.6)
    figure = Figure(figsize=(width, 1.75 * rows + 0.95), layout='constrained')
    axes = marks.panels(figure, rows, columns, len(bowls), sharex=True, sharey=shared is not None)
    values = sorted({value for bowl in bowls.values() for value in bowl.values})
    drawn: set[str] = set()
    for ax, (arm, bowl) in zip(axes, bowls.items(), strict=True):
        _value_axis(ax, values)
        own = windows[arm] if math.isfinite(windows[arm][0]) else (0.0, 1.0)
        ax.set_ylim(shared or own)
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.set_title(short(arm, 23), fontsize=8.5)
        drawn |= _draw(ax, bowl, look[arm])
    name = knob.replace('_', ' ')
    figure.supxlabel(f'{name} (log scale)', fontsize=9)
    figure.supylabel('val loss (nats/token)', fontsize=9)
    figure.legend(handles=_handles(drawn), loc='outside upper center', ncols=4)
    at = f' at {size}' if size else ''
    return render(
        figure,
        stem,
        f'{name[:1].upper()}{name[1:]}{at}',
        f'Val loss of the screening seeds against the {name}, one panel per arm'
        + (', all to one scale' if shared and len(bowls) > 1 else '')
        + (', each to a scale of its own' if not shared else '')
        + '. The parabola, in the logarithm, is fitted to the values near the lowest mean; written '
        'below it: the chosen value and the 95 % interval of the optimum, where it is bounded.',
    )


def _near(bowl: Sweep, reach: int = REACH) -> tuple[float, ...]:
    """Values within `reach` grid steps of the best; the default is what a parabola is fitted to."""
    place = bowl.values.index(bowl.best)
    return bowl.values[max(place - reach, 0) : place + reach + 1]


def _window(bowl: Sweep) -> tuple[float, float]:
    """Y limits that show the bowl, its lowest loss and what rises nearby; NaN without any loss."""
    seeds = {v: losses for v, losses in zip(bowl.values, bowl.losses, strict=True) if losses}
    if not seeds:
        return math.nan, math.nan
    low = min(min(losses) for losses in seeds.values())
    rise = max((max(seeds[v]) - low for v in _near(bowl, 1) if v in seeds), default=0.0)
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
    pad = 1.6
    ax.set_xlim(values[0] / pad, values[-1] * pad)
    # A panel has room for three labels.
    step = math.ceil(len(values) / 3)
    ax.xaxis.set_major_locator(FixedLocator(values[::-1][::step]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:.3g}'))
    ax.xaxis.set_minor_locator(FixedLocator(values))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _draw(ax: Axes, bowl: Sweep, style: VariantStyle) -> set[str]:
    """Draws one arm; returns which of the marks that need explaining it made."""
    low, high = ax.get_ylim()
    top = high - 0.04 * (high - low)
    for value, losses in zip(bowl.values, bowl.losses, strict=True):
        seen = [loss for loss in losses if loss <= top]
        marks.seed_dots(ax, [value] * len(seen), seen, style)
    means = dict(zip(bowl.values, bowl.means, strict=True))
    seen = {value: mean for value, mean in means.items() if mean <= top}
    mark = marks.mean_mark(style, 5)
    ax.plot(list(seen), list(seen.values()), linestyle='none', label='mean', **mark)
    diverged = [value for value, mean in means.items() if math.isinf(mean)]
    above = [value for value in means if value not in seen and value not in diverged]
    _at_top(ax, above, '^', style.colour, 'above')
    _at_top(ax, diverged, 'x', INK, 'diverged')
    drawn = _draw_fit(ax, bowl, style)
    if len(diverged) < len(means):
        drawn.add('chosen')
        ax.axvline(bowl.chosen, label='chosen', **marks.REFERENCE)
        bounded = 'interval' in drawn
        interval = f' [{bowl.optimum_low:.3g}, {bowl.optimum_high:.3g}]' if bounded else ''
        _say(ax, f'{bowl.chosen:.3g}{interval}', 0.04, fontsize=7.5)
        if not bowl.bracketed:
            _say(ax, 'not bracketed', 0.15, fontweight='bold', fontsize=8)
    else:
        _say(ax, 'diverged at every value', 0.4, fontweight='bold', fontsize=8)
    at_top = {'diverged': diverged, 'above': above}
    return drawn | {name for name, found in at_top.items() if found}


def _say(ax: Axes, text: str, y: float, **font: object) -> None:
    ax.annotate(
        text,
        (0.5, y),
        xycoords='axes fraction',
        ha='center',
        **font,
        bbox={'facecolor': SURFACE, 'edgecolor': 'none', 'pad': 1, 'alpha': 0.8},
        zorder=6,
    )


def _at_top(ax: Axes, values: Sequence[float], marker: str, colour: str, label: str) -> None:
    ax.plot(
        values,
        [0.94] * len(values),
        transform=ax.get_xaxis_transform(),
        marker=marker,
        color=colour,
        linestyle='none',
        markersize=5,
        markeredgewidth=1.3 if marker == 'x' else 0,
        zorder=5,
        label=label,
    )


def _draw_fit(ax: Axes, bowl: Sweep, style: VariantStyle) -> set[str]:
    drawn = set()
    if bowl.optimum_low is not None and bowl.optimum_high is not None:
        drawn.add('interval')
        ax.axvspan(bowl.optimum_low, bowl.optimum_high, color=INK, alpha=0.1, linewidth=0, zorder=0)
    if bowl.loss is not None:
        drawn.add('fit')
        means = dict(zip(bowl.values, bowl.means, strict=True))
        near = [value for value in _near(bowl) if math.isfinite(means[value])]
        values = np.geomspace(near[0], near[-1], 60)
        losses = bowl.loss.mean + bowl.curvature / 2 * np.log(values / bowl.optimum) ** 2
        ax.plot(values, losses, color=style.colour, linewidth=1.3, zorder=3, label='fit')
    return drawn


def _handles(drawn: set[str]) -> list[Line2D | Patch]:
    cross = {'color': INK, 'linestyle': 'none', 'marker': 'x', 'markersize': 5}
    known = {
        'fit': Line2D([], [], color=MUTED, linewidth=1.3, label='parabola'),
        'chosen': Line2D([], [], label='chosen value', **marks.REFERENCE),
        'interval': Patch(color=INK, alpha=0.1, label='95 % interval of the optimum'),
        'diverged': Line2D([], [], label='a seed diverged', markeredgewidth=1.3, **cross),
        'above': marks.dot_handle('mean above the axis', 5, marker='^'),
    }
    return [
        *marks.mean_handles(intervals=False, size=5),
        *(handle for name, handle in known.items() if name in drawn),
    ]

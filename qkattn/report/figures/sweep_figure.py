"""Sweeps of a tuned setting: loss against it, one panel for each arm, with the fitted parabola."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter

from qkattn.report.figures.style import (
    INK,
    REFERENCE,
    SEEDS,
    WIDTH,
    Styles,
    distinct,
    legend,
    panels,
    yardstick,
)
from qkattn.report.prose import shown, words
from qkattn.stats.sweep import Sweep
from qkattn.verdict.arms import Arm
from qkattn.verdict.load import Study

COLUMNS = 2
# Panels share their y axis unless the ranges that show each sweep differ by more than this factor.
MAX_RATIO = 5.0
# The axis ends at this many times the rise within one grid step of the best value.
CUT = 3.0


def sweep_panels(study: Study, knob: str, arms: Sequence[Arm], look: Styles) -> tuple[Figure, bool]:
    """A panel for each of the arms, of one size and corpus; and whether they share their y axis."""
    sweeps = [arm.sweeps[knob] for arm in arms]
    columns = min(COLUMNS, len(arms))
    limits = [_limits(sweep) for sweep in sweeps]
    known = [pair for pair in limits if pair] or [(0.0, 1.0)]
    low, high = min(low for low, _ in known), max(high for _, high in known)
    shared = high - low <= MAX_RATIO * statistics.median(b - a for a, b in known)
    rows = math.ceil(len(arms) / columns)
    figure = Figure(figsize=(WIDTH, 1.9 * rows + 0.95))
    axes = panels(figure, columns, len(arms), sharex=True, sharey=shared)
    values = sorted({value for sweep in sweeps for value in sweep.values})
    names = distinct([shown(study, arm.key) for arm in arms], 18)
    for ax, arm, name, sweep, pair in zip(axes, arms, names, sweeps, limits, strict=True):
        ax.set(xscale='log', ylim=(low, high) if shared else pair or known[0])
        # A panel has room for three labels.
        ax.set_xticks(values[::-1][:: math.ceil(len(values) / 3)])
        ax.xaxis.set_major_formatter('{x:.3g}')
        ax.xaxis.set_minor_locator(FixedLocator(values))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.locator_params(axis='y', nbins=4)
        title = f'{name}\n{_chosen(sweep)}'
        ax.set_title(title.replace(' [', '\n['), fontsize=8)
        _draw(ax, sweep, look[arm.variant])
        yardstick(ax, study, arm)
    figure.supxlabel(f'{words(knob)} (log scale)')
    figure.supylabel('val loss (nats/token)')
    legend(figure)
    return figure, shared


def _limits(sweep: Sweep) -> tuple[float, float] | None:
    """Y limits that show the lowest loss and what rises nearby; None without any loss."""
    seeds = {v: losses for v, losses in zip(sweep.values, sweep.losses, strict=True) if losses}
    if not seeds:
        return None
    low, highest = min(map(min, seeds.values())), max(map(max, seeds.values()))
    rise = max((max(seeds[v]) - low for v in _near(sweep) if v in seeds), default=0.0)
    rise = rise or 0.005 * abs(low) or 0.01
    height = max(min(CUT * rise, highest - low), rise)
    # Above it is room for marks at the edge.
    return low - 0.1 * height, low + 1.22 * height


def _near(sweep: Sweep) -> tuple[float, ...]:
    """The best value and its neighbours."""
    place = sweep.values.index(sweep.best)
    return sweep.values[max(place - 1, 0) : place + 2]


def _chosen(sweep: Sweep) -> str:
    """'0.004 [0.003, 0.005]', or why the value is not to be trusted."""
    if all(map(math.isinf, sweep.means)):
        return 'diverged at every value'
    text = f'{sweep.chosen:.3g}'
    if sweep.optimum_low is not None and sweep.optimum_high is not None:
        text += f' [{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'
    return text if sweep.bracketed else f'{text}, not bracketed'


def _draw(ax: Axes, sweep: Sweep, style: dict[str, Any]) -> None:
    low, high = ax.get_ylim()
    top = high - 0.04 * (high - low)
    colour, mark = style['color'], {'linestyle': 'none', 'markersize': 5, 'zorder': 4}
    for value, losses in zip(sweep.values, sweep.losses, strict=True):
        seen = [loss for loss in losses if loss <= top]
        ax.scatter([value] * len(seen), seen, color=colour, **SEEDS)
    means = dict(zip(sweep.values, sweep.means, strict=True))
    shown = {value: mean for value, mean in means.items() if mean <= top}
    ax.plot(list(shown), list(shown.values()), label='mean', **style | mark)
    at_top = mark | {'transform': ax.get_xaxis_transform()}
    diverged = [value for value, mean in means.items() if math.isinf(mean)]
    above = [value for value in means if value not in shown and value not in diverged]
    if above:
        marker = {'marker': '^', 'color': colour, 'label': 'mean above the axis'}
        ax.plot(above, [0.94] * len(above), **at_top | marker)
    if diverged:
        marker = {'marker': 'x', 'markeredgecolor': INK, 'markeredgewidth': 1.3}
        ax.plot(diverged, [0.94] * len(diverged), label='a seed diverged', **at_top | marker)
    if sweep.loss is not None:
        x = np.geomspace(sweep.fitted[0], sweep.fitted[-1], 60)
        fit = sweep.loss + sweep.curvature / 2 * np.log(x / sweep.optimum) ** 2
        ax.plot(x, fit, color=colour, linewidth=1.3, zorder=3, label='parabola')
    if len(diverged) < len(means):
        ax.axvline(sweep.chosen, label='chosen value', **REFERENCE)
    if sweep.optimum_low is not None and sweep.optimum_high is not None:
        band = {'color': INK, 'alpha': 0.1, 'linewidth': 0, 'zorder': 0}
        ax.axvspan(
            sweep.optimum_low, sweep.optimum_high, label='95 % interval of the optimum', **band
        )

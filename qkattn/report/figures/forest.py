"""Forest plots: mean, interval and seeds of each arm; all are drawn by `forest`."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.report import prose
from qkattn.report.columns import Measure
from qkattn.report.figures.style import (
    GRID,
    MUTED,
    REFERENCE,
    SEEDS,
    WIDTH,
    Styles,
    legend,
    panels,
    short,
)
from qkattn.stats.inference import Difference, Estimate
from qkattn.study.arm_key import ArmKey
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.judging import DECIDED
from qkattn.verdict.load import Study

# Where name and text of a line stand, above its mean, and its seeds, below; inches per line.
_NAME, _TEXT, _SEEDS, _LINE = -0.53, -0.29, 0.16, 0.66


class Line(NamedTuple):
    """One arm in one panel."""

    arm: str  # the variant, which chooses the style
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = ()
    absent: str = ''  # why there is no mean
    right: str = ''  # the text below the name
    is_decided: bool = False
    name: str = ''  # what stands on the axis, if that is not `arm`
    reported: tuple[float, float] | None = None  # the ends of what others report

    def at(self, value: Estimate | Difference, seeds: Sequence[float]) -> 'Line':
        return self._replace(mean=value.mean, low=value.low, high=value.high, seeds=seeds)


class Panel(NamedTuple):
    """Lines from the top; `reference` is the x of a dashed line."""

    lines: Sequence[Line]
    xlabel: str
    title: str = ''
    reference: float | None = None


def forest(
    drawn: Sequence[Panel],
    look: Styles,
    reference: str = '_',
    margin: float | None = None,
    limits: tuple[float, float] | None = None,
    longest: int = 44,
) -> Figure:
    """Panels below each other, in which name and text of a line stand above its mean.

    Beside the axis, they would leave no room for it on a narrow screen. `reference` is the name of
    the dashed line in the legend; a mean beyond `limits` is an arrowhead at the edge; names beyond
    `longest` characters are cut in the middle.
    """
    line_height = _LINE if any(line.right for panel in drawn for line in panel.lines) else 0.46
    height = [line_height * len(panel.lines) + 0.7 for panel in drawn]
    figure = Figure(figsize=(WIDTH, sum(height) + 0.6))
    grid = {'sharex': limits is not None, 'height_ratios': height}
    for ax, panel in zip(panels(figure, 1, len(drawn), **grid), drawn, strict=True):
        if margin is not None:
            label = f'±{margin:g}, equivalent inside'
            ax.axvspan(-margin, margin, color=GRID, alpha=0.75, linewidth=0, zorder=0, label=label)
        if panel.reference is not None:
            ax.axvline(panel.reference, label=reference, **REFERENCE)
        names = [short(line.name or line.arm, longest) for line in panel.lines]
        for y, (line, name) in enumerate(zip(panel.lines, names, strict=True)):
            _draw(ax, y, line, look, limits)
            weight = {'weight': 'bold'} if line.is_decided else {'color': MUTED}
            _above(ax, y + _TEXT, line.right, **weight)
            _above(ax, y + (_NAME if line.right else 1.4 * _TEXT), name)
        ax.set_yticks(range(len(names)), names)
        ax.tick_params(axis='y', length=0, labelleft=False)
        ax.tick_params(labelbottom=True)
        ax.spines['left'].set_visible(False)
        ax.grid(visible=False, axis='y')
        ax.locator_params(axis='x', nbins=3)
        ax.set(xlabel=panel.xlabel, title=short(panel.title))
        ax.set(xlim=limits, ylim=(len(names) - 0.4, -0.85))
    legend(figure, 'lower')
    return figure


def _draw(ax: Axes, y: int, line: Line, look: Styles, limits: tuple[float, float] | None) -> None:
    if line.mean is None:
        _above(ax, y, line.absent, style='italic', color=MUTED)
        return
    if line.reported is not None:
        wide = {'color': MUTED, 'alpha': 0.35, 'linewidth': 9, 'solid_capstyle': 'butt'}
        ax.plot(line.reported, [y, y], label='reported', **wide)
    color = look[line.arm]['color']
    if line.low is not None:
        ax.hlines(y, line.low, line.high, color, linewidth=2, label='95 % interval')
    if line.seeds:
        ax.scatter(line.seeds, [y + _SEEDS] * len(line.seeds), color=color, **SEEDS)
    low, high = limits or (-math.inf, math.inf)
    marker = '<' if line.mean < low else '>' if line.mean > high else look[line.arm]['marker']
    mean = {'s': 42, 'linewidths': 0.8, 'edgecolors': 'white', 'zorder': 4, 'label': 'mean'}
    mean |= {'marker': marker, 'color': color, 'clip_on': False}
    ax.scatter([min(max(line.mean, low), high)], [y], **mean)


def _above(ax: Axes, y: float, text: str, **font: Any) -> None:
    box = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5}
    if text:
        place = {'transform': ax.get_yaxis_transform(), 'va': 'center', 'fontsize': 8, 'bbox': box}
        ax.text(0, y, text, **place, **font)


def _lines(
    study: Study, findings: Findings, absent: str
) -> Mapping[str, list[tuple[Line, Arm | None]]]:
    """A line without numbers for each declared arm, with its results, by size and corpus.

    `absent` is why an arm has no number if it has finished trials.
    """
    results = {arm.key: arm for arm in findings.arms}
    groups: dict[str, list[tuple[Line, Arm | None]]] = {}
    for size, corpus, variant in itertools.product(study.sizes, study.corpora, study.variants):
        arm, why = results.get(key := ArmKey(variant, size, corpus)), absent
        if arm is None or not arm.verdict_trials:
            why = 'no result yet'
        elif not arm.chosen:
            why = 'diverged or stopped early'
        line = Line(variant, absent=why, name=prose.shown(key, study))
        groups.setdefault(prose.where(study, key), []).append((line, arm))
    return groups


def _ranked(lines: Sequence[Line], direction: int = 1) -> list[Line]:
    """The lowest mean first, or the highest (-1); lines without a mean last."""
    return sorted(lines, key=lambda line: math.inf if line.mean is None else direction * line.mean)


def levels(study: Study, findings: Findings, look: Styles, measures: Sequence[Measure]) -> Figure:
    """Metrics of every arm, a panel for each and each size and corpus; the best arm at the top."""
    drawn = []
    groups = _lines(study, findings, 'not measured for every seed')
    for (title, arms), measure in itertools.product(groups.items(), measures):
        lines = [
            line.at(value, measure.of_seeds(arm))
            if arm and (value := measure.over_seeds(arm))
            else line
            for line, arm in arms
        ]
        reference = next((line.mean for line in lines if line.arm == study.baseline), None)
        lines = _ranked(lines, -1 if measure.metric.direction == 'higher' else 1)
        drawn.append(Panel(lines, measure.axis, title, reference))
    return forest(drawn, look, f'baseline mean ({short(study.baseline or "")})')


def differences(study: Study, findings: Findings, look: Styles) -> Figure | None:
    """Differences from the baseline, with verdicts and margin if tuned; None without any."""
    tuned = study.tuning is not None
    absent = 'the baseline has not finished' if tuned else 'no seed in common with the baseline'
    xlabel = f'difference in {findings.split} loss (nats/token)'
    drawn = []
    for title, arms in _lines(study, findings, absent).items():
        lines = []
        for line, arm in arms:
            if line.arm == study.baseline:
                continue
            texts = []
            if arm and arm.difference:
                line = line.at(arm.difference, arm.differences)
                texts.append(prose.interval(arm.difference))
            decision = arm.verdict.decision if arm and arm.verdict else None
            texts += [decision.value] if decision else []
            texts += [f'{arm.num_diverged} diverged'] if arm and arm.num_diverged else []
            is_decided = decision in DECIDED
            lines.append(line._replace(right='  '.join(texts), is_decided=is_decided))
        drawn.append(Panel(_ranked(lines), xlabel, title, 0.0))
    lines = [line for panel in drawn for line in panel.lines]
    if not lines or not (tuned or any(arm.difference for arm in findings.arms)):
        return None
    margin = study.margin if tuned else None
    return forest(drawn, look, 'no difference', margin, limits_of(lines, margin or 0.0))


def limits_of(lines: Sequence[Line], margin: float, far: float = 6.0) -> tuple[float, float] | None:
    """X limits: zero, the margin and the intervals, up to `far` times the median of their reach.

    Beyond, an interval would flatten the others.
    """
    values = [[x for x in (*line[1:4], *line.seeds) if x is not None] for line in lines]
    reaches = [max(map(abs, line)) for line in values if line]
    limit = max(4 * margin, far * statistics.median(reaches or [0.0]))
    limit = limit if max(reaches, default=0.0) > limit else math.inf
    every = [x for line in values for x in line] + [-1.5 * margin, 1.5 * margin]
    shown = np.clip(every, -limit, limit)
    pad = 0.05 * (max(shown) - min(shown))
    return (min(shown) - pad, max(shown) + pad) if pad else None

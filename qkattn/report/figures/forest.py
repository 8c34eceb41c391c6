"""Forest plots: mean, interval and seeds of the difference of each arm."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.jobs.output import short
from qkattn.report import prose
from qkattn.report.figures import style
from qkattn.study.arm_key import ArmKey
from qkattn.verdict.findings import Findings
from qkattn.verdict.judging import DECIDED
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

# Where the name, the text and the seeds of an arm stand, relative to its mean; below zero is above.
_NAME = -0.53
_TEXT = -0.29
_SEEDS = 0.16
# Inches of a line.
_LINE = 0.66


# Arms of a study that its forest draws: a higher image than that of these is not read, and one of
# 65,536 pixels cannot be written.
MOST_LINES = 100


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


Panels = Mapping[str, Sequence[Line]]  # by title, from the top


def forest(
    drawn: Panels,
    xlabel: str,
    styles: style.Styles,
    margin: float = 0.0,
    far: float = 6.0,
    longest: int = 44,
) -> Figure:
    """Panels below each other, in which name and text of a line stand above its mean.

    Beside the axis, they would leave no room for it on a narrow screen. What lies beyond `_limits`
    is an arrowhead at the edge; names beyond `longest` characters are cut in the middle.
    """
    every = [line for lines in drawn.values() for line in lines]
    limits = _limits(every, margin, far)
    line_height = _LINE if any(line.right for line in every) else 0.46
    height = [line_height * (len(lines) + 0.45) + 0.7 for lines in drawn.values()]
    figure = Figure()
    grid = {'sharex': limits is not None, 'height_ratios': height}
    axes = style.panels(figure, 1, len(drawn), **grid)
    for ax, (title, lines) in zip(axes, drawn.items(), strict=True):
        if margin:
            band = {'color': style.GRID, 'alpha': 0.75, 'linewidth': 0, 'zorder': 0}
            ax.axvspan(-margin, margin, label=f'±{margin:g}, equivalent inside', **band)
        ax.axvline(0.0, label='no difference', **style.REFERENCE)
        names = [short(line.name or line.arm, longest) for line in lines]
        for y, (line, name) in enumerate(zip(lines, names, strict=True)):
            _draw(ax, y, line, styles, limits)
            weight = {'weight': 'bold'} if line.is_decided else {'color': style.MUTED}
            _above(ax, y + _TEXT, line.right, **weight)
            _above(ax, y + (_NAME if line.right else 1.4 * _TEXT), name)
        ax.set_yticks(range(len(names)), names)
        ax.tick_params(axis='y', length=0, labelleft=False)
        ax.tick_params(labelbottom=True)
        ax.spines['left'].set_visible(False)
        ax.grid(visible=False, axis='y')
        ax.locator_params(axis='x', nbins=3)
        ax.set(xlabel=xlabel, title=short(title, 34), xlim=limits, ylim=(len(names) - 0.4, -0.85))
    figure.set_size_inches(style.WIDTH, sum(height) + style.legend(figure, 'lower'))
    return figure


def _limits(lines: Sequence[Line], margin: float, far: float) -> tuple[float, float] | None:
    """X limits: zero, the margin, intervals and reports, up to `far` times their median reach.

    Beyond, an interval would flatten the others.
    """
    ends = [(*line[1:4], *line.seeds, *(line.reported or ())) for line in lines]
    values = [[x for x in numbers if x is not None] for numbers in ends]
    reaches = [max(map(abs, line)) for line in values if line]
    limit = max(4 * margin, far * statistics.median(reaches or [0.0]))
    every = [x for line in values for x in line] + [-1.5 * margin, 1.5 * margin]
    shown = np.clip(every, -limit, limit)
    pad = 0.05 * (max(shown) - min(shown))
    return (min(shown) - pad, max(shown) + pad) if pad else None


def _draw(
    ax: Axes, y: int, line: Line, styles: style.Styles, limits: tuple[float, float] | None
) -> None:
    if line.mean is None:
        _above(ax, y, line.absent, style='italic', color=style.MUTED)
        return
    if line.reported is not None:
        wide = {'color': style.MUTED, 'alpha': 0.35, 'linewidth': 9, 'solid_capstyle': 'butt'}
        ax.plot(line.reported, [y, y], label='reported', **wide)
    color = styles[line.arm]['color']
    marker = styles[line.arm]['marker']
    if line.low is not None:
        ax.hlines(y, line.low, line.high, color, linewidth=2, label='95 % interval')
    if line.seeds:
        ax.scatter(line.seeds, [y + _SEEDS] * len(line.seeds), color=color, **style.SEEDS)
    mean = {'s': 42, 'linewidths': 0.8, 'edgecolors': 'white', 'zorder': 4}
    ax.scatter([line.mean], [y], marker=marker, color=color, label='mean', **mean)
    low, high = limits or (-math.inf, math.inf)
    drawn = (line.reported or (), y, style.MUTED), (line[1:4], y, color)
    for values, at, shade in (*drawn, (line.seeds, y + _SEEDS, color)):
        far = [x for x in values if x is not None and not low <= x <= high]
        for edge, arrow in sorted({(low, '<') if x < low else (high, '>') for x in far}):
            arrowhead = mean | {'marker': arrow, 'color': shade, 'clip_on': False}
            ax.scatter([edge], [at], label=style.BEYOND, **arrowhead)


def _above(ax: Axes, y: float, text: str, **font: Any) -> None:
    box = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5}
    if text:
        place = {'transform': ax.get_yaxis_transform(), 'va': 'center', 'fontsize': 8, 'bbox': box}
        ax.text(0, y, text, **place, **font)


def differences(findings: Findings, styles: style.Styles) -> Figure | None:
    """Differences from the baseline, with verdicts and margin if tuned; None without any.

    A panel for each size and corpus has every declared arm, the lowest mean first; of very many,
    those with the lowest and the highest means, as `cut` says.
    """
    study = findings.study
    results = {arm.key: arm for arm in findings.arms}
    groups: dict[str, list[Line]] = {}
    for size, corpus, variant in itertools.product(study.sizes, study.corpora, study.variants):
        if variant != study.baseline:
            key = ArmKey(variant, size, corpus)
            line = _line(variant, results.get(key), study)
            groups.setdefault(prose.where(study, key), []).append(line)
    tuned = study.tuned
    if not groups or not (tuned or any(arm.difference for arm in findings.arms)):
        return None
    drawn = {
        title: sorted(lines, key=lambda line: math.inf if line.mean is None else line.mean)
        for title, lines in groups.items()
    }
    if (ends := cut(study)) is not None:
        drawn = {title: [*lines[: ends[0]], *lines[-ends[0] :]] for title, lines in drawn.items()}
    xlabel = f'difference in {findings.split} loss (nats/token)'
    return forest(drawn, xlabel, styles, study.margin * tuned)


def cut(study: TrainedStudy) -> tuple[int, int] | None:
    """How many arms of each end a panel draws, and of how many; None where it draws all of them."""
    panels = len(study.sizes) * len(study.corpora)
    number = len(study.variants) - 1
    if panels * number <= MOST_LINES or number <= 2:
        return None
    return max(MOST_LINES // (2 * panels), 1), number


def _line(variant: str, arm: TrainedArm | None, study: TrainedStudy) -> Line:
    """The line of an arm, which may have no results."""
    if arm is None or not arm.verdict_trials:
        return Line(variant, absent='no result yet')
    if not arm.chosen:
        return Line(variant, absent='diverged')
    decision = arm.verdict.decision if arm.verdict else None
    texts = [prose.interval(arm.difference)] if arm.difference else []
    texts += [decision.value] if decision else []
    texts += [f'{arm.num_diverged} diverged'] if arm.num_diverged else []
    line = Line(variant, right='  '.join(texts), is_decided=decision in DECIDED)
    if arm.comparison is None:
        tuned = study.tuned
        why = 'the baseline has not finished' if tuned else 'no seed in common with the baseline'
        return line._replace(absent=why)
    d = arm.comparison.difference
    seeds = tuple(arm.comparison.differences.values())
    return line._replace(mean=d.mean, low=d.low, high=d.high, seeds=seeds)

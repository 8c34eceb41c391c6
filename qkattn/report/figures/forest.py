"""Forest plots: mean, interval and seeds of the difference of each arm."""

import dataclasses
import functools
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
from qkattn.report.figures.drawing import Drawing
from qkattn.study.arm_key import ArmKey
from qkattn.verdict.findings import Findings
from qkattn.verdict.judging import DECIDED
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

# Arms of a study that its forest draws: a higher image than that of these is not read, and one of
# 65,536 pixels cannot be written.
MOST_LINES = 100
# A figure of so many inches has room for the names of arms beside the axis.
_WITH_MARGINS = 6.0


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the parts of a line stand. Places are relative to its mean, in lines downwards."""

    line_height: float  # inches
    seeds: float
    # Above the mean; None where name and text stand in the margins to the left and to the right.
    name: float | None = None
    text: float | None = None
    first_line: float = -0.85  # the upper end of the axis


_IN_MARGINS = _Places(line_height=0.4, seeds=0.27, first_line=-0.6)
_ABOVE = _Places(line_height=0.66, seeds=0.16, name=-0.53, text=-0.29)
# The same, where no line has a text.
_NAME_ABOVE = _Places(line_height=0.46, seeds=0.16, name=-0.4, text=-0.29)


class Line(NamedTuple):
    """One arm in one panel."""

    arm: str  # the variant, which chooses the style
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = ()
    absent: str = ''  # why there is no mean
    right: str = ''  # the text below the name, or in the right margin
    is_decided: bool = False
    name: str = ''  # what stands on the axis, if that is not `arm`
    reported: tuple[float, float] | None = None  # the ends of what others report
    meaning: str = 'mean'  # what the legend says of the marker of the mean

    def ends(self) -> list[float]:
        """The mean and the ends of its interval, as far as there are any."""
        return [end for end in (self.mean, self.low, self.high) if end is not None]


Panels = Mapping[str, Sequence[Line]]  # by title, from the top
Font = dict[str, Any]  # keywords of `Axes.text`


def forest(
    lines_by_title: Panels,
    xlabel: str,
    styles: style.Styles,
    margin: float = 0.0,
    far: float = 6.0,
    longest: int = 44,
    width: float = style.WIDTH,
) -> Figure:
    """Panels below each other, with a line for each arm.

    On a wide figure the name of an arm stands to the left of the axis and its text to the right; on
    a narrow one they would leave no room for the axis, and stand above the mean. What lies beyond
    `_limits` is an arrowhead at the edge; names of more than `longest` characters are cut.
    """
    every_line = [line for lines in lines_by_title.values() for line in lines]
    limits = _limits(every_line, margin, far)
    if width >= _WITH_MARGINS:
        places = _IN_MARGINS
    elif any(line.right for line in every_line):
        places = _ABOVE
    else:
        places = _NAME_ABOVE
    heights = [places.line_height * (len(lines) + 0.45) + 0.7 for lines in lines_by_title.values()]
    figure = Figure(figsize=(width, sum(heights)))
    axes = style.panels(figure, 1, len(heights), sharex=limits is not None, height_ratios=heights)
    for ax, (title, lines) in zip(axes, lines_by_title.items(), strict=True):
        if margin:
            band = {'color': style.GRID, 'alpha': 0.75, 'linewidth': 0, 'zorder': 0}
            ax.axvspan(-margin, margin, label=f'±{margin:g}, equivalent inside', **band)
        ax.axvline(0.0, label='no difference', **style.REFERENCE)
        for y, line in enumerate(lines):
            _draw_numbers(ax, y, line, styles, limits, places)
        names = [short(line.name or line.arm, longest) for line in lines]
        _draw_names(ax, lines, names, places)
        ax.tick_params(labelbottom=True)
        ax.spines['left'].set_visible(False)
        ax.grid(visible=False, axis='y')
        ax.locator_params(axis='x', nbins=3 if width < _WITH_MARGINS else 8)
        ax.set_title(short(title, 34))
        ax.set(xlabel=xlabel, xlim=limits, ylim=(len(lines) - 0.4, places.first_line))
    figure.set_figheight(sum(heights) + style.legend(figure, 'lower'))
    return figure


def _limits(lines: Sequence[Line], margin: float, far: float) -> tuple[float, float] | None:
    """The ends of the x axis; None if all numbers are zero.

    They include zero, the margin, and all numbers of lines, up to `far` times the median over lines
    of the largest number: one beyond that would flatten the others.
    """
    every_number = [-1.5 * margin, 1.5 * margin]
    reaches = []
    for line in lines:
        numbers = [*line.ends(), *line.seeds, *(line.reported or ())]
        every_number += numbers
        if numbers:
            reaches.append(max(abs(number) for number in numbers))
    limit = max(4 * margin, far * statistics.median(reaches or [0.0]))
    shown = np.clip(every_number, -limit, limit)
    pad = 0.05 * (max(shown) - min(shown))
    return (min(shown) - pad, max(shown) + pad) if pad else None


def _draw_numbers(
    ax: Axes,
    y: float,
    line: Line,
    styles: style.Styles,
    limits: tuple[float, float] | None,
    places: _Places,
) -> None:
    """Draws what others report, the interval, the seeds below it, and the mean of a line."""
    if line.mean is None:
        return
    y_seeds = y + places.seeds
    color = styles[line.arm]['color']
    marker = styles[line.arm]['marker']
    if line.reported is not None:
        wide = {'color': style.MUTED, 'alpha': 0.35, 'linewidth': 9, 'solid_capstyle': 'butt'}
        ax.plot(line.reported, [y, y], label='reported', **wide)
    if line.low is not None:
        ax.hlines(y, line.low, line.high, color, linewidth=2, label='95 % interval')
    if line.seeds:
        ax.scatter(line.seeds, [y_seeds] * len(line.seeds), color=color, **style.SEEDS)
    mean = {'s': 42, 'linewidths': 0.8, 'edgecolors': 'white', 'zorder': 4}
    ax.scatter([line.mean], [y], marker=marker, color=color, label=line.meaning, **mean)
    if limits is None:
        return
    arrowheads = mean | {'label': style.BEYOND, 'clip_on': False}
    low, high = limits
    for numbers, height, shade in (
        (line.reported or (), y, style.MUTED),
        (line.ends(), y, color),
        (line.seeds, y_seeds, color),
    ):
        if any(number < low for number in numbers):
            ax.scatter([low], [height], marker='<', color=shade, **arrowheads)
        if any(number > high for number in numbers):
            ax.scatter([high], [height], marker='>', color=shade, **arrowheads)


def _draw_names(ax: Axes, lines: Sequence[Line], names: Sequence[str], places: _Places) -> None:
    """Writes the names of lines, their texts, and why a line has no mean."""
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis='y', length=0, labelleft=places.name is None)
    for y, (line, name) in enumerate(zip(lines, names, strict=True)):
        weight: Font = {'weight': 'bold'} if line.is_decided else {'color': style.MUTED}
        absent: Font = {'style': 'italic', 'color': style.MUTED}
        if places.name is None or places.text is None:
            _write(ax, y, line.right, x=1.01, **weight)
            if line.mean is None and not line.right:
                _write(ax, y, line.absent, x=1.01, **absent)
            continue
        _write(ax, y + places.name, name)
        _write(ax, y + places.text, line.right, **weight)
        if line.mean is None:
            _write(ax, y, line.absent, **absent)


def _write(ax: Axes, y: float, text: str, x: float = 0.0, **font: Any) -> None:
    """Writes a text on white at a height of the axis; x is 0 at its left end and 1 at its right."""
    if text:
        box = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5}
        place = {'transform': ax.get_yaxis_transform(), 'va': 'center'}
        ax.text(x, y, text, fontsize=8, bbox=box, **place, **font)


def differences(findings: Findings, styles: style.Styles) -> Drawing | None:
    """Differences from the baseline, with verdicts and margin if tuned; None without any.

    A panel for each size and corpus has every declared arm, the lowest mean first; of very many,
    those with the lowest and the highest means, as `cut` says.
    """
    study = findings.study
    has_differences = any(arm.difference for arm in findings.arms)
    if len(study.variants) < 2 or not (study.tuned or has_differences):
        return None
    results = {arm.key: arm for arm in findings.arms}
    lines_by_title = dict[str, list[Line]]()
    for size, corpus, variant in itertools.product(study.sizes, study.corpora, study.variants):
        if variant != study.baseline:
            key = ArmKey(variant, size, corpus)
            line = _line(variant, results.get(key), study)
            lines_by_title.setdefault(prose.where(study, key), []).append(line)
    ends = cut(study)
    for title, lines in lines_by_title.items():
        lines.sort(key=lambda line: math.inf if line.mean is None else line.mean)
        if ends is not None:
            number_of_each = ends[0]
            lines_by_title[title] = lines[:number_of_each] + lines[-number_of_each:]
    draw = functools.partial(
        forest,
        lines_by_title,
        f'difference in {findings.split} loss (nats/token)',
        styles,
        study.margin if study.tuned else 0.0,
    )
    stem = 'verdicts' if study.tuned else 'differences'
    return Drawing(stem, lambda width: draw(width=width), {'cut': ends})


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
    texts = []
    if arm.difference:
        texts.append(prose.interval(arm.difference))
    if decision:
        texts.append(decision.value)
    if arm.num_diverged:
        texts.append(f'{arm.num_diverged} diverged')
    line = Line(variant, right='  '.join(texts), is_decided=decision in DECIDED)
    if arm.comparison is None:
        if study.tuned:
            return line._replace(absent='the baseline has not finished')
        return line._replace(absent='no seed in common with the baseline')
    difference = arm.comparison.difference
    return line._replace(
        mean=difference.mean,
        low=difference.low,
        high=difference.high,
        seeds=tuple(arm.comparison.differences.values()),
    )

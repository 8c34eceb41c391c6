"""Forest plots of the differences of arms.

A forest plot has a line for each arm, with the mean difference, its interval, a dot for each seed,
the arm's name, and a text such as the verdict. The x axis is the difference.
"""

import dataclasses
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
from qkattn.report.figures.drawing import Cut, Drawing
from qkattn.study.arm_key import ArmKey
from qkattn.verdict.findings import Findings
from qkattn.verdict.judging import DECIDED
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

# The most lines of a figure, which limits the height of images.
MOST_LINES = 100
# Figures of this width in inches have room for names beside the axis.
_WIDE = 6.0
# The marker of a mean, as keywords of `Axes.scatter`.
_MEAN_MARKER: dict[str, Any] = {'s': 42, 'linewidths': 0.8, 'edgecolors': 'white', 'zorder': 4}
# The marker of a mean after longer training, which is hollow.
_LONGER_MARKER: dict[str, Any] = {'s': 30, 'linewidths': 1.2, 'facecolors': 'white', 'zorder': 4}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The positions of a line's parts, downwards from the mean in units of the line height."""

    line_height: float  # inches
    seeds: float  # the position of the seeds' dots, or of the difference after longer training
    top: float = -0.85  # the upper end of the y axis
    # Whether names are to the left of the axis, and texts to the right.
    in_margins: bool = False
    # The positions of names and texts inside the axis.
    name: float = 0.0
    text: float = 0.0


_IN_MARGINS = _Layout(line_height=0.4, seeds=0.27, top=-0.6, in_margins=True)
_ABOVE_MEAN = _Layout(line_height=0.66, seeds=0.16, name=-0.53, text=-0.29)
# A smaller line height for lines without texts.
_NAME_ABOVE_MEAN = _Layout(line_height=0.46, seeds=0.16, name=-0.4, text=-0.29)


class Line(NamedTuple):
    """One arm in one panel."""

    arm: str  # the variant, which determines the style
    mean: float | None = None
    low: float | None = None  # the lower end of the interval
    high: float | None = None  # the upper end
    seeds: Sequence[float] = ()  # the difference of each seed
    # The mean after longer training, and the ends of its interval. A line has these or seeds.
    longer: tuple[float, float | None, float | None] | None = None
    longer_arm: str = ''  # determines the style of `longer`, by default `arm`
    absent: str = ''  # why there is no mean
    right: str = ''  # a text to the right of the axis, or below the name
    is_decided: bool = False  # makes the text bold
    name: str = ''  # the printed name, by default `arm`
    reported: tuple[float, float] | None = None  # a published range
    meaning: str = 'mean'  # the legend label of the mean's marker
    longer_meaning: str = 'after longer training'  # the same for `longer`

    def ends(self) -> list[float]:
        """Returns the mean and the ends of its interval that are not None."""
        return [end for end in (self.mean, self.low, self.high) if end is not None]

    def longer_ends(self) -> list[float]:
        """Returns the mean and ends of `longer` that are not None."""
        return [end for end in self.longer or () if end is not None]


Panels = Mapping[str, Sequence[Line]]  # lines by panel title, from the top
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
    """Draws panels below each other, with a line for each arm.

    Names and texts are in the margins of a wide figure, and above the means of a narrow one.
    Numbers outside the x axis are arrowheads at its ends.

    Args:
        lines_by_title: The lines of each panel.
        xlabel: The label of the x axis.
        styles: The style of each arm, as keywords of `Axes.plot`.
        margin: The half-width of the grey band of equivalence; 0 for no band.
        far: The x axis leaves out numbers that are this many times as large as typical ones.
        longest: The most characters of a name.
        width: The width of the figure in inches.
    """
    all_lines = list[Line]()
    for lines in lines_by_title.values():
        all_lines += lines
    limits = _limits(all_lines, margin, far)
    layout = _layout(all_lines, width)

    panel_heights = []
    for lines in lines_by_title.values():
        height_of_lines = layout.line_height * (len(lines) + 0.45)
        panel_heights.append(height_of_lines + 0.7)  # 0.7 inches for title and axis labels
    figure = Figure(figsize=(width, sum(panel_heights)))
    axes = style.panels(
        figure,
        columns=1,
        count=len(panel_heights),
        sharex=limits is not None,
        height_ratios=panel_heights,
    )
    for ax, (title, lines) in zip(axes, lines_by_title.items(), strict=True):
        _draw_references(ax, margin)
        for y, line in enumerate(lines):
            _draw_numbers(ax, y, line, styles, limits, layout)
        names = [short(line.name or line.arm, longest) for line in lines]
        _draw_names(ax, lines, names, layout)
        ax.tick_params(labelbottom=True)
        ax.spines['left'].set_visible(False)
        ax.grid(visible=False, axis='y')
        ax.locator_params(axis='x', nbins=8 if width >= _WIDE else 3)
        ax.set_title(short(title, 34))
        # Line 0 is at the top, so the y axis points downwards.
        ax.set(xlabel=xlabel, xlim=limits, ylim=(len(lines) - 0.4, layout.top))
    legend_height = style.legend(figure, loc='lower')
    figure.set_figheight(sum(panel_heights) + legend_height)
    return figure


def _draw_references(ax: Axes, margin: float) -> None:
    """Draws a vertical line at zero, and the band of equivalence around it."""
    if margin:
        band = {'color': style.GRID, 'alpha': 0.75, 'linewidth': 0, 'zorder': 0}
        ax.axvspan(-margin, margin, label=f'±{margin:g}, equivalent inside', **band)
    ax.axvline(0.0, label='no difference', **style.REFERENCE)


def _layout(lines: Sequence[Line], width: float) -> _Layout:
    """Returns the layout of lines in a figure of `width` inches."""
    if width >= _WIDE:
        return _IN_MARGINS
    has_texts = any(line.right for line in lines)
    return _ABOVE_MEAN if has_texts else _NAME_ABOVE_MEAN


def _limits(lines: Sequence[Line], margin: float, far: float) -> tuple[float, float] | None:
    """Returns the limits of the x axis; None if the range is empty.

    The axis shows zero, the margin, and all numbers except outliers. An outlier is more than `far`
    times as large as the median line's largest number.
    """
    shown_numbers = [-1.5 * margin, 1.5 * margin]  # with room beyond the margin
    largest_of_lines = []
    for line in lines:
        numbers = [*line.ends(), *line.longer_ends(), *line.seeds]
        if line.reported is not None:
            numbers += line.reported
        shown_numbers += numbers
        if numbers:
            largest_of_lines.append(max(abs(number) for number in numbers))
    typical_size = statistics.median(largest_of_lines) if largest_of_lines else 0.0
    # Outliers would flatten all other lines.
    outlier_limit = max(4 * margin, far * typical_size)
    clipped_numbers = np.clip(shown_numbers, -outlier_limit, outlier_limit)
    lowest = min(clipped_numbers)
    highest = max(clipped_numbers)
    pad = 0.05 * (highest - lowest)
    if pad == 0:
        return None
    return lowest - pad, highest + pad


def _draw_numbers(
    ax: Axes,
    y: float,
    line: Line,
    styles: style.Styles,
    limits: tuple[float, float] | None,
    layout: _Layout,
) -> None:
    """Draws the reported range, interval, seeds and mean of a line at height y.

    The difference after longer training is below the mean, with a hollow marker. Numbers outside
    `limits` are arrowheads.
    """
    if line.mean is None:
        return
    y_seeds = y + layout.seeds
    color = styles[line.arm]['color']
    marker = styles[line.arm]['marker']
    longer_color = styles[line.longer_arm or line.arm]['color']
    longer_marker = styles[line.longer_arm or line.arm]['marker']
    if line.reported is not None:
        band = {'color': style.MUTED, 'alpha': 0.35, 'linewidth': 9, 'solid_capstyle': 'butt'}
        ax.plot(line.reported, [y, y], label='reported', **band)
    if line.low is not None:
        ax.hlines(y, line.low, line.high, color, linewidth=2, label='95 % interval')
    if line.seeds:
        ax.scatter(line.seeds, [y_seeds] * len(line.seeds), color=color, **style.SEEDS)
    ax.scatter([line.mean], [y], marker=marker, color=color, label=line.meaning, **_MEAN_MARKER)
    if line.longer is not None:
        longer_mean, longer_low, longer_high = line.longer
        if longer_low is not None and longer_high is not None:
            ax.hlines(y_seeds, longer_low, longer_high, longer_color, linewidth=1)
        mark = {'marker': longer_marker, 'edgecolors': longer_color, 'label': line.longer_meaning}
        ax.scatter([longer_mean], [y_seeds], **mark, **_LONGER_MARKER)

    if limits is not None:
        _draw_arrowheads(ax, y, line.reported or (), style.MUTED, limits)
        _draw_arrowheads(ax, y, line.ends(), color, limits)
        _draw_arrowheads(ax, y_seeds, line.seeds, color, limits)
        _draw_arrowheads(ax, y_seeds, line.longer_ends(), longer_color, limits)


def _draw_arrowheads(
    ax: Axes, y: float, numbers: Sequence[float], color: str, limits: tuple[float, float]
) -> None:
    """Draws an arrowhead at an end of the x axis if there are numbers beyond this end."""
    low, high = limits
    arrowhead = _MEAN_MARKER | {'label': style.BEYOND, 'clip_on': False, 'color': color}
    if any(number < low for number in numbers):
        ax.scatter([low], [y], marker='<', **arrowhead)
    if any(number > high for number in numbers):
        ax.scatter([high], [y], marker='>', **arrowhead)


def _draw_names(ax: Axes, lines: Sequence[Line], names: Sequence[str], layout: _Layout) -> None:
    """Writes the name of each line, its result, and why it has no mean.

    Names are labels of the y axis if they are in the margins.
    """
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis='y', length=0, labelleft=layout.in_margins)
    right_margin = 1.01  # the x axis is from 0 to 1
    for y, (line, name) in enumerate(zip(lines, names, strict=True)):
        result = line.right
        result_font: Font = {'weight': 'bold'} if line.is_decided else {'color': style.MUTED}
        reason = line.absent if line.mean is None else ''
        reason_font: Font = {'style': 'italic', 'color': style.MUTED}
        # `_write` skips an empty text.
        if not layout.in_margins:
            _write(ax, y + layout.name, name)
            _write(ax, y + layout.text, result, **result_font)
            _write(ax, y, reason, **reason_font)
        elif result:
            # The right margin has room for one text.
            _write(ax, y, result, x=right_margin, **result_font)
        else:
            _write(ax, y, reason, x=right_margin, **reason_font)


def _write(ax: Axes, y: float, text: str, x: float = 0.0, **font: Any) -> None:
    """Writes a text on white at height y. The x axis is from x = 0 to x = 1."""
    if text:
        box = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5}
        position = {'transform': ax.get_yaxis_transform(), 'va': 'center'}
        ax.text(x, y, text, fontsize=8, bbox=box, **position, **font)


def differences(findings: Findings, styles: style.Styles) -> Drawing | None:
    """Returns the figure of differences from the baseline, with a panel per size and corpus.

    A tuned study also has verdicts and the margin. Its figure is drawn even without results.

    Returns None if there is nothing to draw.
    """
    study = findings.study
    has_differences = any(arm.difference for arm in findings.arms)
    has_only_baseline = len(study.variants) < 2
    if has_only_baseline:
        return None
    if not study.tuned and not has_differences:
        return None

    cut = _cut_to_most_lines(study)
    lines_by_title = dict[str, list[Line]]()
    for size, corpus in itertools.product(study.sizes, study.corpora):
        lines = _sorted_lines(findings, size, corpus)
        if cut is not None:
            # Keep the lowest and the highest means.
            lines = lines[: cut.num_drawn] + lines[-cut.num_drawn :]
        title = prose.size_and_corpus(study, ArmKey(study.baseline, size, corpus))
        lines_by_title[title] = lines

    xlabel = f'difference in {findings.split} loss (nats/token)'
    margin = study.margin if study.tuned else 0.0

    def draw(width: float) -> Figure:
        return forest(lines_by_title, xlabel, styles, margin, width=width)

    stem = 'verdicts' if study.tuned else 'differences'
    return Drawing(stem, draw, {'cut': cut})


def _cut_to_most_lines(study: TrainedStudy) -> Cut | None:
    """Limits the figure to MOST_LINES lines; returns None if all arms can be drawn.

    For example, each of 4 panels has room for 25 of 100 lines. A panel then draws the 12 lowest and
    the 12 highest means.
    """
    num_panels = len(study.sizes) * len(study.corpora)
    num_arms = len(study.variants) - 1  # without the baseline
    is_small = num_panels * num_arms <= MOST_LINES
    if is_small or num_arms <= 2:
        return None
    lines_per_panel = MOST_LINES // num_panels
    num_lowest = max(lines_per_panel // 2, 1)
    return Cut(num_drawn=num_lowest, num_arms=num_arms)


def _sorted_lines(findings: Findings, size: str, corpus: str) -> list[Line]:
    """Returns the lines of a size and corpus without the baseline, lowest mean first.

    Lines without a mean are last.
    """
    study = findings.study
    arm_by_key = {arm.key: arm for arm in findings.arms}
    lines = []
    for variant in study.variants:
        if variant != study.baseline:
            arm = arm_by_key.get(ArmKey(variant, size, corpus))
            lines.append(_line(variant, arm, study))

    def rank(line: Line) -> float:
        return math.inf if line.mean is None else line.mean

    return sorted(lines, key=rank)


def _line(variant: str, arm: TrainedArm | None, study: TrainedStudy) -> Line:
    """Returns the line of an arm: its difference from the baseline, or why there is none.

    `arm` is None if it has no results.
    """
    if arm is None or not arm.verdict_trials:
        return Line(variant, absent='no result yet')
    if not arm.chosen:
        return Line(variant, absent='diverged')

    # Such as '+0.0500 [+0.0245, +0.0755]  worse  1 diverged'.
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

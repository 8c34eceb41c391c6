"""The forest plot of paired differences: interval, seeds, margin and verdict of each arm."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qkattn.report.figures import marks
from qkattn.report.figures.forest import reason
from qkattn.report.figures.style import GRID, INK, MUTED, Rendered, VariantStyle, render, short
from qkattn.stats.inference import Difference
from qkattn.verdict import Decision, Findings
from qkattn.verdict.load import Study

# Inches: the arms' names, the plot, and the numbers and words right of it.
NAMES, PANEL, NUMBERS, WORDS = 2.0, 3.5, 1.72, 0.9
# Inches of an arm's line, and of each where there are many arms.
LINE, CLOSE, MANY = 0.26, 0.2, 15
# An interval that reaches this many times further than is usual is cut off at the edge.
FAR = 6.0
# Words that say that nothing was decided are set lighter than the others.
UNDECIDED = (Decision.UNDECIDED.value, Decision.NO_VERDICT.value)


@dataclasses.dataclass(frozen=True)
class Line:
    """One declared arm at one size; `absent` says why where there is no difference."""

    arm: str
    size: str
    difference: Difference | None
    seeds: tuple[float, ...]
    word: str
    num_diverged: int
    absent: str


def lines(study: Study, found: Findings) -> list[Line]:
    """Every arm of the study but the baseline, with or without results."""
    by_place = {(arm.variant, arm.size): arm for arm in found.arms}
    made = []
    for place in study.arms:
        if place[0] == study.baseline:
            continue
        arm = by_place.get(place)
        made.append(
            Line(
                *place,
                difference=arm.difference if arm else None,
                seeds=arm.differences if arm else (),
                word=arm.verdict.decision.value if arm and arm.verdict else '',
                num_diverged=arm.num_diverged if arm else 0,
                absent=reason(study, place, arm, 'the baseline has not finished'),
            )
        )
    return made


def verdict_forest(
    study: Study, found: Findings, look: Mapping[str, VariantStyle]
) -> Rendered | None:
    """Differences of all arms, best first: a panel for each size; None where only a baseline is."""
    of_arms = lines(study, found)
    if not of_arms:
        return None
    return render(
        forest(of_arms, look, study.margin),
        'verdicts',
        'Difference to the baseline',
        f'Val loss minus that of {study.baseline}, paired by fresh seed, each arm at its own tuned '
        'settings. Right of zero is worse; inside the band a difference is too small to matter.',
    )


def forest(of_arms: Sequence[Line], look: Mapping[str, VariantStyle], margin: float) -> Figure:
    """The figure of `verdict_forest`."""
    sizes = list(dict.fromkeys(line.size for line in of_arms))
    arms = _ranked(of_arms)
    reach = _reach(of_arms, margin)
    single = len(sizes) == 1
    columns = 2 if len(sizes) == 4 else min(len(sizes), 3)
    rows = math.ceil(len(sizes) / columns)
    width = NAMES + (PANEL + NUMBERS + WORDS if single else columns * (2.1 + WORDS))
    line = LINE if len(arms) <= MANY else CLOSE
    figure = Figure(figsize=(width, rows * (line * len(arms) + 0.7) + 0.4), layout='constrained')
    axes = marks.panels(figure, rows, columns, len(sizes), sharex=True, sharey=True)
    by_place = {(line.arm, line.size): line for line in of_arms}
    for ax, size in zip(axes, sizes, strict=True):
        ax.axvspan(-margin, margin, color=GRID, alpha=0.75, linewidth=0, zorder=0, label='margin')
        ax.axvline(0, **marks.REFERENCE)
        for y, arm in enumerate(arms):
            if (arm, size) in by_place:
                _draw(ax, y, by_place[arm, size], look[arm], reach, numbers=single)
        if single:
            marks.text_right(ax, -0.85, 'mean [95 % interval]', fontsize=8, color=MUTED)
            marks.text_right(ax, -0.85, 'verdict', NUMBERS, fontsize=8, color=MUTED)
        ax.set_xlim(reach)
        marks.name_lines(ax, arms)
        ax.tick_params(labelbottom=True)
        ax.grid(visible=False, axis='y')
        ax.xaxis.set_major_locator(MaxNLocator(6 if single else 4))
        ax.set_xlabel('difference in val loss (nats/token)' if single else 'nats/token')
        if not single:
            ax.set_title(short(size))
    _legend(figure, of_arms, margin, wide=width > 6.7)
    return figure


def _ranked(of_arms: Sequence[Line]) -> list[str]:
    """Arms by their mean difference over the sizes, those without one last."""
    means: dict[str, list[float]] = {}
    for line in of_arms:
        means.setdefault(line.arm, [])
        if line.difference is not None:
            means[line.arm].append(line.difference.mean)
    return sorted(means, key=lambda arm: statistics.fmean(means[arm]) if means[arm] else math.inf)


def _ends(line: Line) -> tuple[float, float]:
    found = [line.difference.mean, *line.seeds]
    found += [end for end in (line.difference.low, line.difference.high) if end is not None]
    return min(found), max(found)


def _reach(of_arms: Sequence[Line], margin: float) -> tuple[float, float]:
    """X limits: zero, the margin and the intervals, but not those that would flatten the others."""
    ends = [_ends(line) for line in of_arms if line.difference is not None]
    reaches = [max(abs(low), abs(high)) for low, high in ends]
    limit = max(4 * margin, FAR * statistics.median(reaches)) if reaches else 4 * margin
    far = max(reaches, default=0) > limit
    low = max(min([-1.5 * margin, *(low for low, _ in ends)]), -limit if far else -math.inf)
    high = min(max([1.5 * margin, *(high for _, high in ends)]), limit if far else math.inf)
    pad = 0.05 * (high - low)
    return low - pad, high + pad


def _draw(
    ax: Axes, y: int, line: Line, style: VariantStyle, reach: tuple[float, float], numbers: bool
) -> None:
    decided = line.word not in UNDECIDED
    marks.text_right(
        ax,
        y,
        line.word,
        numbers * NUMBERS,
        color=INK if decided else MUTED,
        fontweight='bold' if decided else 'normal',
    )
    found = line.difference
    if found is None:
        marks.reason_text(ax, y, line.absent)
        return
    if numbers:
        marks.text_right(ax, y, _numbers(line), fontsize=8)
    low, high = reach
    beyond = '>' if found.mean > high else '<' if found.mean < low else None
    style = dataclasses.replace(style, marker=beyond or style.marker)
    ends = (None, None) if found.low is None else np.clip((found.low, found.high), low, high)
    seen = [seed for seed in line.seeds if low <= seed <= high]
    marks.estimate_line(ax, y, style, min(max(found.mean, low), high), *ends, seen)
    for marker, edge, cut in (
        ('<', low, any(seed < low for seed in line.seeds)),
        ('>', high, any(seed > high for seed in line.seeds)),
    ):
        if cut:
            marks.seeds_beyond(ax, y, style, edge, marker)


def _numbers(line: Line) -> str:
    found = line.difference
    text = f'{found.mean:+.4f}'
    text += '' if found.low is None else f' [{found.low:+.4f}, {found.high:+.4f}]'
    return text + (f'\n{line.num_diverged} diverged' if line.num_diverged else '')


def _legend(figure: Figure, of_arms: Sequence[Line], margin: float, wide: bool) -> None:
    intervals = any(line.difference and line.difference.low is not None for line in of_arms)
    margin_handle = Patch(color=GRID, label=f'±{margin:g}, equivalent inside')
    figure.legend(
        handles=[*marks.mean_handles(intervals), margin_handle],
        loc='outside lower center',
        ncols=4 if wide else 2,
    )

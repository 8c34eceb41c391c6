"""The forest plot of paired differences: interval, seeds, margin and verdict of each arm."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qkattn.report.findings import NO_VERDICT, Findings
from qkattn.report.forest import reason
from qkattn.report.load import Study
from qkattn.report.style import (
    DASHED,
    GRID,
    INK,
    MUTED,
    SURFACE,
    Rendered,
    VariantStyle,
    render,
    short,
)
from qkattn.stats import Difference

# Inches: the arms' names, the plot, and the numbers and words right of it.
NAMES, PANEL, NUMBERS, WORDS = 2.0, 3.5, 1.72, 0.9
# Inches of an arm's line, and of each where there are many arms.
LINE, CLOSE, MANY = 0.26, 0.2, 15
# An interval that reaches this many times further than is usual is cut off at the edge.
FAR = 3.0
# Words that say that nothing was decided are set lighter than the others.
UNDECIDED = ('undecided', NO_VERDICT)


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
    by_place = {(arm.row.variant, arm.row.size): arm for arm in found.arms}
    made = []
    for place in study.arms:
        if place[0] == study.baseline:
            continue
        arm = by_place.get(place)
        row = arm.row if arm else None
        made.append(
            Line(
                *place,
                difference=arm.difference if arm else None,
                seeds=arm.differences if arm else (),
                word=arm.verdict.word if arm and arm.verdict else '',
                num_diverged=row.num_diverged if row else 0,
                absent=reason(study, place, row, 'the baseline has not finished'),
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
    figure = forest(of_arms, look, study.margin)
    return render(
        figure,
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
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    by_place = {(line.arm, line.size): line for line in of_arms}
    for ax, size in zip(grid.flat, sizes, strict=False):
        ax.axvspan(-margin, margin, color=GRID, alpha=0.75, linewidth=0, zorder=0, label='margin')
        ax.axvline(0, color=INK, linewidth=1, linestyle=DASHED, zorder=1)
        for y, arm in enumerate(arms):
            if (arm, size) in by_place:
                _draw(ax, y, by_place[arm, size], look[arm], reach, numbers=single)
        if single:
            _right_of(ax, -0.85, 0, 'mean [95 % interval]', fontsize=8, color=MUTED)
            _right_of(ax, -0.85, NUMBERS, 'verdict', fontsize=8, color=MUTED)
        ax.set_xlim(reach)
        ax.set_ylim(len(arms) - 0.4, -0.6)
        ax.set_yticks(range(len(arms)), [short(arm) for arm in arms])
        ax.tick_params(axis='y', length=0)
        ax.tick_params(labelbottom=True)
        ax.grid(visible=False, axis='y')
        ax.xaxis.set_major_locator(MaxNLocator(6 if single else 4))
        ax.set_xlabel('difference in val loss (nats/token)' if single else 'nats/token')
        if not single:
            ax.set_title(short(size))
    for ax in list(grid.flat)[len(sizes) :]:
        ax.set_visible(False)
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
    _right_of(
        ax,
        y,
        numbers * NUMBERS,
        line.word,
        color=INK if decided else MUTED,
        fontweight='bold' if decided else 'normal',
    )
    found = line.difference
    if found is None:
        ax.annotate(
            line.absent,
            (0.02, y),
            xycoords=('axes fraction', 'data'),
            va='center',
            fontsize=8,
            color=MUTED,
            style='italic',
            zorder=5,
            bbox={'facecolor': SURFACE, 'edgecolor': 'none', 'pad': 1},
        )
        return
    if numbers:
        _right_of(ax, y, 0, _numbers(line), fontsize=8)
    low, high = reach
    if found.low is not None:
        ends = [min(max(end, low), high) for end in (found.low, found.high)]
        ax.plot(ends, [y, y], color=style.colour, linewidth=2, solid_capstyle='butt')
    seen = [seed for seed in line.seeds if low <= seed <= high]
    ax.scatter(
        seen, [y + 0.28] * len(seen), s=8, color=style.colour, alpha=0.6, linewidths=0, zorder=3
    )
    beyond = '>' if found.mean > high else '<' if found.mean < low else None
    ax.plot(
        min(max(found.mean, low), high),
        y,
        marker=beyond or style.marker,
        markersize=6.5,
        color=style.colour,
        markeredgecolor=SURFACE,
        markeredgewidth=0.8,
        zorder=4,
        clip_on=False,
    )


def _right_of(ax: Axes, y: float, inches: float, text: str, **font: object) -> None:
    """Writes `text` so far right of the axes."""
    ax.annotate(
        text,
        (1.0, y),
        xytext=(8 + 72 * inches, 0),
        xycoords=('axes fraction', 'data'),
        textcoords='offset points',
        va='center',
        annotation_clip=False,
        **font,
    )


def _numbers(line: Line) -> str:
    found = line.difference
    text = f'{found.mean:+.4f}'
    text += '' if found.low is None else f' [{found.low:+.4f}, {found.high:+.4f}]'
    return text + (f'\n{line.num_diverged} diverged' if line.num_diverged else '')


def _legend(figure: Figure, of_arms: Sequence[Line], margin: float, wide: bool) -> None:
    dots = {'color': MUTED, 'linestyle': 'none', 'markeredgewidth': 0, 'marker': 'o'}
    handles = [
        Line2D([], [], markersize=6.5, label='mean', **dots),
        Line2D([], [], markersize=3, alpha=0.6, label='one seed', **dots),
    ]
    if any(line.difference and line.difference.low is not None for line in of_arms):
        handles.append(Line2D([], [], color=MUTED, linewidth=2, label='95 % t interval'))
    handles.append(Patch(color=GRID, label=f'±{margin:g}, equivalent inside'))
    figure.legend(handles=handles, loc='outside lower center', ncols=4 if wide else 2)

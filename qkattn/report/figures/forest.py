"""Forest plots: mean, interval and seeds of each arm; all are drawn by `forest`."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.report import prose
from qkattn.report.figures.style import (
    GRID,
    MUTED,
    REFERENCE,
    SEEDS,
    SURFACE,
    WIDTH,
    Styles,
    distinct,
    legend,
    panels,
    short,
)
from qkattn.report.measures import Measure
from qkattn.study.arm_key import ArmKey
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.judging import DECIDED
from qkattn.verdict.load import Study

# A difference or seed that is this many times further from zero than is usual is cut off.
_FAR = 6.0
# Seeds are drawn below the mean; on top of it they would hide.
_BELOW = 0.16
# Where name and text of a line stand, above its mean; and inches per line.
_NAME, _TEXT, _LINE = -0.53, -0.29, 0.66


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
    dot: str = 'one seed',
    longest: int = 44,
) -> Figure:
    """Panels below each other, in which name and text of a line stand above its mean.

    `reference` and `dot` are the names of the dashed line and of the small dots in the legend;
    marks beyond `limits` are drawn at the edge, as arrowheads; names beyond `longest` characters
    are cut in the middle.
    """
    has_right = any(line.right for panel in drawn for line in panel.lines)
    height = [(_LINE if has_right else 0.7 * _LINE) * len(p.lines) + 0.7 for p in drawn]
    figure = Figure(figsize=(WIDTH, sum(height) + 0.45))
    grid = {'sharex': limits is not None, 'height_ratios': height}
    for ax, panel in zip(panels(figure, 1, len(drawn), **grid), drawn, strict=True):
        if margin is not None:
            label = f'±{margin:g}, equivalent inside'
            ax.axvspan(-margin, margin, color=GRID, alpha=0.75, linewidth=0, zorder=0, label=label)
        if panel.reference is not None:
            ax.axvline(panel.reference, label=reference, **REFERENCE)
        names = distinct([line.name or line.arm for line in panel.lines], longest)
        for y, (line, name) in enumerate(zip(panel.lines, names, strict=True)):
            _draw(ax, y, line, look, limits, dot)
            weight = {'weight': 'bold'} if line.is_decided else {'color': MUTED}
            _beside(ax, 0, y + _TEXT, line.right, **weight)
            _beside(ax, 0, y + (_NAME if line.right else 1.4 * _TEXT), name)
        ax.set_yticks(range(len(panel.lines)), names)
        ax.tick_params(axis='y', length=0, labelleft=False)
        ax.tick_params(labelbottom=True)
        ax.spines['left'].set_visible(False)
        ax.grid(visible=False, axis='y')
        ax.locator_params(axis='x', nbins=3)
        ax.set(xlabel=panel.xlabel, title=short(panel.title))
        ax.set(xlim=limits, ylim=(len(panel.lines) - 0.4, -0.85))
    legend(figure, 'lower')
    return figure


def _draw(
    ax: Axes,
    y: int,
    line: Line,
    look: Styles,
    limits: tuple[float, float] | None,
    dot: str,
) -> None:
    if line.mean is None:
        _beside(ax, 0.02, y, line.absent, style='italic', color=MUTED)
        return
    low, high = limits or (-math.inf, math.inf)
    if line.reported is not None:
        wide = {'color': MUTED, 'alpha': 0.35, 'linewidth': 9, 'label': 'reported'}
        wide['solid_capstyle'] = 'butt'
        ax.plot(np.clip(line.reported, low, high), [y, y], **wide)
    colour = look[line.arm]['color']
    if line.low is not None and line.high is not None:
        ax.hlines(
            y, *np.clip((line.low, line.high), low, high), colour, lw=2, label='95 % interval'
        )
    mean = {'s': 42, 'linewidths': 0.8, 'edgecolors': SURFACE, 'zorder': 4, 'label': 'mean'}
    seeds = SEEDS | {'label': dot}
    for values, at, marker, mark in (
        (line.seeds, y + _BELOW, 'o', seeds),
        ([line.mean], y, look[line.arm]['marker'], mean),
    ):
        x = np.array(values)
        outside = {'<': x < low, '>': x > high}
        for shape, where in {marker: (x >= low) & (x <= high), **outside}.items():
            if where.any():
                # A mark at the edge of the axes is drawn whole.
                shown, style = np.clip(x[where], low, high), mark | {'marker': shape}
                ax.scatter(shown, [at] * len(shown), color=colour, clip_on=False, **style)


def _beside(ax: Axes, x: float, y: float, text: str, **font: Any) -> None:
    if text:
        box = {'facecolor': SURFACE, 'edgecolor': 'none', 'pad': 0.5}
        at = {'transform': ax.get_yaxis_transform(), 'va': 'center', 'fontsize': 8, 'bbox': box}
        ax.text(x, y, text, **at, **font)


def _by_where(
    study: Study,
    found: Findings,
    line: Callable[[Arm], Line],
    xlabel: str,
    absent: str,
    *,
    reference: Callable[[str], float | None] = lambda name: 0.0,
    with_baseline: bool = False,
    direction: int = 1,
) -> list[Panel]:
    """A panel for each size and corpus, the lowest mean over all at the top (highest: -1)."""
    by_key = {arm.key: arm for arm in found.arms}
    lines: dict[str, list[Line]] = {}
    places = list(itertools.product(study.sizes, study.corpora))
    for variant, (size, corpus) in itertools.product(study.variants, places):
        key = ArmKey(variant, size, corpus)
        if with_baseline or variant != study.baseline:
            arm = by_key.get(key)
            drawn = line(arm) if arm else Line(variant)
            why = prose.absent(study, key, arm, absent)
            name = prose.shown(study, key)
            lines.setdefault(variant, []).append(drawn._replace(absent=why, name=name))

    def rank(variant: str) -> float:
        means = [line.mean for line in lines[variant] if line.mean is not None]
        return direction * statistics.fmean(means) if means else math.inf

    order = sorted(lines, key=rank)
    titles = [prose.where(study, ArmKey('', *key)) for key in places]
    return [
        Panel([lines[variant][i] for variant in order], xlabel, title, reference(title))
        for i, title in enumerate(titles)
    ]


def _baseline(study: Study) -> str:
    return f'baseline mean ({short(study.baseline)})' if study.baseline else '_'


def _metric_line(arm: Arm, measure: Measure) -> Line:
    value = measure.over_seeds(arm)
    if value is None:
        return Line(arm.variant, absent='not measured')
    return Line(arm.variant, value.mean, value.low, value.high, measure.of_seeds(arm))


def levels(study: Study, found: Findings, look: Styles, measure: Measure) -> Figure:
    """A metric of every arm, with a line at the baseline's mean."""
    baselines = [arm for arm in found.arms if arm.is_baseline]
    means = {prose.where(study, arm): measure.over_seeds(arm) for arm in baselines}
    drawn = _by_where(
        study,
        found,
        lambda arm: _metric_line(arm, measure),
        measure.axis,
        'not measured for every seed',
        reference=lambda name: value.mean if (value := means.get(name)) else None,
        with_baseline=True,
        direction=-1 if measure.metric.direction == 'higher' else 1,
    )
    return forest(drawn, look, _baseline(study))


def differences(study: Study, found: Findings, look: Styles) -> Figure | None:
    """Differences from the baseline, with verdicts and margin if tuned; None without any."""
    tuned = study.tuning is not None
    absent = 'the baseline has not finished' if tuned else 'no seed in common with the baseline'
    single = len(study.sizes) * len(study.corpora) == 1

    def line(arm: Arm) -> Line:
        decision = arm.verdict.decision if arm.verdict else None
        word, is_decided = decision.value if decision else '', decision in DECIDED
        if (difference := arm.difference) is None:
            return Line(arm.variant, right=word, is_decided=is_decided)
        texts = [prose.interval(difference) * single, word]
        texts += [f'{arm.num_diverged} diverged'] * (single and arm.num_diverged > 0)
        right = '  '.join(filter(None, texts))
        mean = difference.mean, difference.low, difference.high
        return Line(arm.variant, *mean, arm.differences, right=right, is_decided=is_decided)

    drawn = _by_where(study, found, line, f'difference in {found.split} loss (nats/token)', absent)
    lines = [line for panel in drawn for line in panel.lines]
    if not lines or not (tuned or any(arm.difference for arm in found.arms)):
        return None
    margin = study.margin if tuned else None
    limits = limits_of(lines, margin or 0.0)
    return forest(drawn, look, 'no difference', margin, limits)


def limits_of(
    lines: Sequence[Line], margin: float, far: float = _FAR
) -> tuple[float, float] | None:
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


def multipliers(study: Study, found: Findings, look: Styles) -> Figure | None:
    """How many baseline parameters one of each arm's is worth, the best first; None if unknown."""
    known, unknown = [], []
    for law in found.scaling:
        if (worth := law.multiplier) is None:
            continue
        name = prose.on_corpus(study, law)
        if worth.problem:
            unknown.append(Line(law.variant, absent='see the table', name=name))
        else:
            line = Line(law.variant, worth.value, worth.low, worth.high, worth.by_size)
            known.append(line._replace(right=prose.bracketed(worth), name=name))
    known.sort(key=lambda line: -line.mean)
    xlabel = 'baseline parameters per parameter of the arm'
    panel = Panel([*known, *unknown], xlabel, reference=1.0)
    return forest([panel], look, dot='one size') if known else None


def retrieval(
    study: Study, found: Findings, look: Styles, loss: Measure, probes: Sequence[Measure]
) -> Figure | None:
    """Loss and probes of each size, below each other; None where none was probed."""
    measures, drawn = [loss, *probes], []
    probed = [arm for arm in found.arms if any(probe.over_seeds(arm) for probe in probes)]
    for name, group in prose.by_where(probed, study).items():
        arms = sorted(group, key=lambda arm: arm.loss.mean if arm.loss else math.inf)
        for measure in measures:
            lines = [
                _metric_line(arm, measure)._replace(name=prose.shown(study, arm.key))
                for arm in arms
            ]
            means = [line.mean for line, arm in zip(lines, arms, strict=True) if arm.is_baseline]
            title = name if measure is loss else ''
            drawn.append(Panel(lines, measure.axis, title, *means))
    return forest(drawn, look, _baseline(study)) if drawn else None

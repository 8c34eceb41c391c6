"""What forest plots compare: losses, scores, differences, multipliers, and probes beside losses."""

import math
import statistics
from collections.abc import Callable, Sequence

from qkattn.report import prose
from qkattn.report.figures.forest import Line, Panel, forest
from qkattn.report.figures.style import Drawing, Look, short
from qkattn.stats.inference import Decision
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import Measure

_DECIDED = (Decision.BETTER, Decision.WORSE, Decision.EQUIVALENT)
# An interval that reaches this many times further than is usual is cut off at the edge.
_FAR = 6.0


def _by_size(
    study: Study,
    found: Findings,
    line: Callable[[Arm], Line],
    xlabel: str,
    *,
    absent: str,
    reference: Callable[[str], float | None] = lambda size: 0.0,
    with_baseline: bool = False,
    direction: int = 1,
) -> list[Panel]:
    """A panel for each size, the lowest mean over the sizes at the top (highest: direction -1)."""
    by_place = {arm.place: arm for arm in found.arms}
    variants = [v for v in study.variants if with_baseline or v != study.baseline]
    lines: dict[str, list[Line]] = {}
    for variant in variants:
        lines[variant] = []
        for size in study.sizes:
            arm = by_place.get((variant, size))
            drawn = line(arm) if arm else Line(variant)
            why = prose.absent(study, (variant, size), arm, absent)
            lines[variant].append(drawn._replace(absent=why))

    def rank(variant: str) -> float:
        means = [line.mean for line in lines[variant] if line.mean is not None]
        return direction * statistics.fmean(means) if means else math.inf

    order = sorted(variants, key=rank)
    titles = study.sizes if len(study.sizes) > 1 else ('',)
    return [
        Panel([lines[variant][i] for variant in order], xlabel, titles[i], reference(size))
        for i, size in enumerate(study.sizes)
    ]


def _of_metric(arm: Arm, measure: Measure) -> Line:
    value = measure.over_seeds(arm)
    if value is None:
        return Line(arm.variant)
    return Line(arm.variant, value.mean, value.low, value.high, measure.of_seeds(arm))


def _of_difference(arm: Arm) -> Line:
    """The arm's difference with its verdict; mean, interval and diverged trials in numbers."""
    word = arm.verdict.decision.value if arm.verdict else ''
    line = Line(
        arm.variant,
        word=word,
        is_decided=arm.verdict is not None and arm.verdict.decision in _DECIDED,
    )
    if (found := arm.difference) is None:
        return line
    text = prose.interval(found)
    text += f'\n{arm.num_diverged} diverged' if arm.num_diverged else ''
    line = line._replace(mean=found.mean, low=found.low, high=found.high)
    return line._replace(seeds=arm.differences, numbers=text)


def levels(
    study: Study, found: Findings, look: Look, measure: Measure, stem: str, direction: int
) -> Drawing:
    """A metric of every arm, with a line at the baseline's mean."""

    def reference(size: str) -> float | None:
        value = next(
            (measure.over_seeds(a) for a in found.arms if a.is_baseline and a.size == size), None
        )
        return value.mean if value else None

    of_panels = _by_size(
        study,
        found,
        lambda arm: _of_metric(arm, measure),
        measure.axis,
        absent='not measured for every seed',
        reference=reference,
        with_baseline=True,
        direction=direction,
    )
    name = f'baseline mean ({short(study.baseline)})' if study.baseline else None
    figure = forest(of_panels, look, _columns(study), name)
    return Drawing.of(figure, stem, name=measure.name, direction=direction)


def differences(study: Study, found: Findings, look: Look) -> Drawing:
    """Differences to the baseline of a study without verdicts."""
    of_panels = _by_size(
        study,
        found,
        _of_difference,
        'difference in val loss (nats/token)',
        absent='no seed in common with the baseline',
    )
    figure = forest(of_panels, look, _columns(study), 'no difference', sharex=True)
    return Drawing.of(figure, 'differences')


def verdicts(study: Study, found: Findings, look: Look) -> Drawing | None:
    """Differences of all arms with their verdicts and the margin; None where only a baseline is."""
    of_panels = _by_size(
        study,
        found,
        _of_difference,
        'difference in val loss (nats/token)',
        absent='the baseline has not finished',
    )
    if not of_panels[0].lines:
        return None
    limits = _limits([line for panel in of_panels for line in panel.lines], study.margin)
    columns = _columns(study)
    figure = forest(of_panels, look, columns, limits=limits, margin=study.margin, sharex=True)
    return Drawing.of(figure, 'verdicts')


def _columns(study: Study) -> int:
    return 2 if len(study.sizes) == 4 else min(len(study.sizes), 3)


def _limits(lines: Sequence[Line], margin: float) -> tuple[float, float]:
    """X limits: zero, the margin and the intervals, but not those that would flatten the others."""
    values = [[x for x in (*line[1:4], *line.seeds) if x is not None] for line in lines]
    ends = [(min(of), max(of)) for of in values if of]
    reaches = [max(abs(low), abs(high)) for low, high in ends]
    limit = max(4 * margin, _FAR * statistics.median(reaches or [0.0]))
    limit = limit if max(reaches, default=0.0) > limit else math.inf
    low = max(min([-1.5 * margin, *(low for low, _ in ends)]), -limit)
    high = min(max([1.5 * margin, *(high for _, high in ends)]), limit)
    pad = 0.05 * (high - low)
    return low - pad, high + pad


def multipliers(study: Study, found: Findings, look: Look) -> Drawing | None:
    """How many baseline parameters one of each arm's is worth, the best first; None if unknown."""
    compared = [of for of in found.scaling if of.multiplier is not None]
    known = [of for of in compared if not of.multiplier.problem]
    if not known:
        return None
    lines = [
        Line(of.variant, of.multiplier.value, of.multiplier.low, of.multiplier.high)._replace(
            seeds=of.multiplier.by_size,
            numbers=prose.bracketed(of.multiplier),
        )
        for of in sorted(known, key=lambda of: -of.multiplier.value)
    ]
    lines += [Line(of.variant, absent='see the table') for of in compared if of not in known]
    panel = Panel(lines, 'baseline parameters per parameter of the arm', reference=1.0)
    return Drawing.of(forest([panel], look, 1, dot='one size'), 'multipliers')


def retrieval(
    study: Study, found: Findings, look: Look, loss: Measure, probes: Sequence[Measure]
) -> Drawing | None:
    """Loss and probes side by side, a row of panels for each size; None where none was probed."""
    measures = [loss, *probes]
    of_panels = []
    for size in study.sizes:
        arms = [
            arm
            for arm in found.arms
            if arm.size == size and any(probe.over_seeds(arm) for probe in probes)
        ]
        arms.sort(key=lambda arm: arm.val_loss.mean)
        for measure in measures if arms else ():
            lines = [_of_metric(arm, measure)._replace(absent='not measured') for arm in arms]
            means = [line.mean for line, arm in zip(lines, arms, strict=True) if arm.is_baseline]
            title = size if measure is loss and len(study.sizes) > 1 else ''
            of_panels.append(Panel(lines, measure.axis, title, *means))
    if not of_panels:
        return None
    name = f'baseline mean ({short(study.baseline)})' if study.baseline else None
    return Drawing.of(forest(of_panels, look, len(measures), name), 'retrieval')

"""The figures of a study."""

from collections.abc import Iterator

from qkattn.report.figures import comparisons
from qkattn.report.figures.curve_figure import learning_curves
from qkattn.report.figures.scaling_figure import loss_against_parameters
from qkattn.report.figures.style import Drawing, style_sheet, styles
from qkattn.report.figures.sweep_figure import sweep_panels
from qkattn.study.tuning import KNOBS
from qkattn.verdict import measures
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def figures(study: Study, found: Findings) -> tuple[Drawing, ...]:
    """All figures that the results allow, the main ones first."""
    with style_sheet():
        return tuple(figure for figure in _figures(study, found) if figure is not None)


def _figures(study: Study, found: Findings) -> Iterator[Drawing | None]:
    # Arms without a result have a style too: their place is in every figure.
    look = styles(study.variants, study.baseline)
    val_loss = measures.measure_of('val_loss')
    has_results = any(arm.chosen for arm in found.arms)
    if study.tuning:
        yield comparisons.verdicts(study, found, look)
    # One of the scores: what else there is stands in the table.
    for score in measures.scores(found.arms)[:1]:
        yield comparisons.levels(study, found, look, score, 'scores', direction=-1)
    if has_results:
        yield comparisons.levels(study, found, look, val_loss, 'losses', direction=1)
    if not study.tuning and any(arm.difference for arm in found.arms):
        yield comparisons.differences(study, found, look)
    several = len(study.sizes) > 1
    sizes = [(size, f'_{i}' if several else '') for i, size in enumerate(study.sizes, start=1)]
    for knob in KNOBS:
        for size, suffix in sizes:
            swept = [arm for arm in found.arms if arm.size == size and knob in arm.sweeps]
            if swept:
                yield sweep_panels(knob, swept, look, f'sweep_{knob}{suffix}', several)
    for size, suffix in sizes:
        of_size = [arm for arm in found.arms if arm.size == size]
        yield learning_curves(study, of_size, look, f'curves{suffix}')
    if has_results:
        yield loss_against_parameters(study, found, look)
    yield comparisons.multipliers(study, found, look)
    yield comparisons.retrieval(study, found, look, val_loss, measures.probes(found.arms))

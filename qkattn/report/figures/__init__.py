"""The figures of a study."""

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from qkattn.report.figures import forest
from qkattn.report.figures.curve_figure import learning_curves, loss_against_parameters
from qkattn.report.figures.style import Drawing, style_sheet, styles
from qkattn.report.figures.sweep_figure import sweep_panels
from qkattn.study.tuning import KNOBS
from qkattn.verdict import measures
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def figures(study: Study, found: Findings) -> tuple[Drawing, ...]:
    """All figures that the results allow, the main ones first."""
    with style_sheet():
        return tuple(
            Drawing(figure, stem, values)
            for figure, stem, values in _figures(study, found)
            if figure is not None
        )


def _figures(
    study: Study, found: Findings
) -> Iterator[tuple[Figure | None, str, Mapping[str, Any]]]:
    # Arms without a result have a style too: their place is in every figure.
    look = styles(study.variants, study.baseline)
    val_loss = measures.VAL_LOSS
    has_results = any(arm.chosen for arm in found.arms)
    difference = forest.differences(study, found, look)
    if study.tuning:
        yield difference, 'verdicts', {}
    # One of the scores: what else there is stands in the table.
    for score in measures.scores(found.arms)[:1]:
        figure = forest.levels(study, found, look, score, direction=-1)
        yield figure, 'scores', {'name': score.name}
    if has_results:
        yield forest.levels(study, found, look, val_loss, direction=1), 'losses', {}
    if not study.tuning:
        yield difference, 'differences', {}
    several = len(study.sizes) > 1
    sizes = [(size, f'_{i}' if several else '') for i, size in enumerate(study.sizes, start=1)]
    for knob in KNOBS:
        for size, suffix in sizes:
            swept = [arm for arm in found.arms if arm.size == size and knob in arm.sweeps]
            if swept:
                figure, shared = sweep_panels(knob, swept, look)
                scale = ('one' if shared else 'own') if len(swept) > 1 else None
                about = {'knob': knob, 'size': size if several else None, 'scale': scale}
                yield figure, f'sweep_{knob}{suffix}', about
    for size, suffix in sizes:
        of_size = [arm for arm in found.arms if arm.size == size]
        figure, values = learning_curves(study, of_size, look)
        yield figure, f'curves{suffix}', values | {'size': size if several else None}
    if has_results:
        figure, values = loss_against_parameters(study, found, look)
        yield figure, 'loss_parameters', values
    yield forest.multipliers(study, found, look), 'multipliers', {}
    probes = measures.probes(found.arms)
    yield forest.retrieval(study, found, look, val_loss, probes), 'retrieval', {}

"""The figures of a study."""

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from qkattn.report import measures, prose
from qkattn.report.figures import forest
from qkattn.report.figures.curve_figure import learning_curves, loss_against_parameters
from qkattn.report.figures.style import Drawing, Styles, style_sheet, styles
from qkattn.report.figures.sweep_figure import sweep_panels
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def figures(study: Study, found: Findings) -> tuple[Drawing, ...]:
    """All figures that the results allow, the main ones first."""
    # Arms without a result have a style too: their place is in every figure.
    look = styles(study.variants, study.baseline)
    with style_sheet():
        return tuple(
            Drawing(figure, stem, values)
            for figure, stem, values in _figures(study, found, look)
            if figure is not None
        )


def _figures(
    study: Study, found: Findings, look: Styles
) -> Iterator[tuple[Figure | None, str, Mapping[str, Any]]]:
    of_losses = {measure.split: measure for measure in measures.losses(found.arms)}
    loss = of_losses.get(found.split, measures.VAL_LOSS)
    split = {'split': loss.split}
    has_results = any(arm.chosen for arm in found.arms)
    difference = forest.differences(study, found, look)
    if study.tuning:
        yield difference, 'verdicts', {}
    # One of the scores: what else there is stands in the table.
    for score in measures.scores(found.arms)[:1]:
        about = {'name': score.name, 'direction': score.metric.direction}
        yield forest.levels(study, found, look, score), 'scores', about
    if has_results:
        yield forest.levels(study, found, look, loss), 'losses', split
    if not study.tuning:
        yield difference, 'differences', {}
    groups = prose.by_where(found.arms, study)
    for knob in KNOBS:
        for number, (name, arms) in enumerate(groups.items(), start=1):
            swept = [arm for arm in arms if knob in arm.sweeps]
            if swept:
                figure, shared = sweep_panels(study, knob, swept, look)
                scale = ('one' if shared else 'own') if len(swept) > 1 else None
                about = {'knob': knob, 'size': name or None, 'scale': scale}
                yield figure, f'sweep_{knob}{f"_{number}" if name else ""}', about
    for number, (name, arms) in enumerate(groups.items(), start=1):
        figure, values = learning_curves(study, arms, look)
        yield figure, f'curves{f"_{number}" if name else ""}', values | {'size': name or None}
    if has_results:
        figure, values = loss_against_parameters(study, found, look)
        yield figure, 'loss_parameters', values | split
    yield forest.multipliers(study, found, look), 'multipliers', {}
    probes = measures.probes(found.arms)
    yield forest.retrieval(study, found, look, loss, probes), 'retrieval', {}

"""The figures of a study."""

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from qkattn.report import columns, prose
from qkattn.report.figures import forest, lines
from qkattn.report.figures.style import Drawing, Styles, style_sheet, styles
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def figures(study: Study, findings: Findings) -> tuple[Drawing, ...]:
    """All figures that the results allow, the main ones first."""
    look = styles(study.variants, study.baseline)
    with style_sheet():
        drawn = list(_figures(study, findings, look))
    return tuple(Drawing(figure, stem, values) for figure, stem, values in drawn if figure)


def _figures(
    study: Study, findings: Findings, look: Styles
) -> Iterator[tuple[Figure | None, str, Mapping[str, Any]]]:
    stem = 'verdicts' if study.tuning else 'differences'
    yield forest.differences(study, findings, look), stem, {}
    # One of the scores: what else there is stands in the table.
    for score in columns.scores(findings.arms)[:1]:
        about = {'name': score.name, 'direction': score.metric.direction}
        yield forest.levels(study, findings, look, [score]), 'scores', about
    loss = columns.losses(findings.arms)[-1]
    if any(arm.chosen for arm in findings.arms):
        yield forest.levels(study, findings, look, [loss]), 'losses', {'split': loss.split}
    groups = prose.by_where(findings.arms, study)
    for number, (name, arms) in enumerate(groups.items(), start=1):
        about, place = {'size': name or None}, f'_{number}' if name else ''
        for knob in KNOBS:
            if swept := [arm for arm in arms if knob in arm.sweeps]:
                figure = lines.sweep_panels(study, knob, swept, look)
                yield figure, f'sweep_{knob}{place}', {'knob': knob} | about
        yield lines.learning_curves(study, arms, look), f'curves{place}', about
    laws = any(not law.fit.problem for law in findings.scaling)
    figure = lines.loss_against_parameters(study, findings, look)
    yield figure, 'loss_parameters', {'split': loss.split, 'laws': laws}
    if probes := columns.probes(findings.arms):
        yield forest.levels(study, findings, look, [loss, *probes]), 'retrieval', {}

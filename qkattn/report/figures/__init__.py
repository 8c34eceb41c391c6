"""The figures of a study."""

from typing import Any

from matplotlib.figure import Figure

from qkattn.report import prose
from qkattn.report.figures import forest, lines
from qkattn.report.figures.style import Drawing, style_sheet, styles
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def figures(study: Study, findings: Findings) -> tuple[Drawing, ...]:
    """All figures that the results allow, the main ones first."""
    drawn: list[Drawing] = []

    def add(stem: str, figure: Figure | None, **values: Any) -> None:
        if figure is not None:
            drawn.append(Drawing(figure, stem, values))

    look = styles(study.variants, study.baseline)
    with style_sheet():
        stem = 'verdicts' if study.tuning else 'differences'
        add(stem, forest.differences(study, findings, look))
        groups = prose.by_where(findings.arms, study)
        for number, (name, arms) in enumerate(groups.items(), start=1):
            place, size = f'_{number}' if name else '', name or None
            for knob in KNOBS:
                if swept := [arm for arm in arms if knob in arm.sweeps]:
                    figure = lines.sweep_panels(knob, swept, look)
                    add(f'sweep_{knob}{place}', figure, knob=knob, size=size)
            add(f'curves{place}', lines.learning_curves(study, arms, look), size=size)
        laws = any(scaling.has_law for scaling in findings.scaling)
        add('loss_parameters', lines.loss_against_parameters(study, findings, look), laws=laws)
    return tuple(drawn)

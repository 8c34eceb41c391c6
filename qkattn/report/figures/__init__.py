"""The figures of a study."""

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from qkattn.report import prose
from qkattn.report.figures import forest, lines
from qkattn.report.figures.style import Drawing, Styles, style_sheet, styles
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def figures(study: Study, findings: Findings) -> tuple[Drawing, ...]:
    """All figures that the results allow, the main ones first."""
    with style_sheet():
        made = _figures(study, findings, styles(study.variants, study.baseline))
        return tuple(Drawing(figure, stem, about) for stem, figure, about in made if figure)


def _figures(
    study: Study, findings: Findings, look: Styles
) -> Iterator[tuple[str, Figure | None, Mapping[str, Any]]]:
    stem = 'verdicts' if study.tuning else 'differences'
    yield stem, forest.differences(study, findings, look), {}
    groups = prose.by_where(findings.arms, study)
    for number, (name, arms) in enumerate(groups.items(), start=1):
        about: dict[str, Any] = {'size': name or None}
        place = f'_{number}' if name else ''
        for knob in KNOBS:
            if swept := [arm for arm in arms if knob in arm.sweeps]:
                figure = lines.sweep_panels(knob, swept, look)
                yield f'sweep_{knob}{place}', figure, {'knob': knob} | about
        yield f'curves{place}', lines.learning_curves(study, arms, look), about
    about = {'laws': any(s.has_law for s in findings.scaling)}
    yield 'loss_parameters', lines.loss_against_parameters(study, findings, look), about

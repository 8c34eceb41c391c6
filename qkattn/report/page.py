"""The HTML page of a study: self-contained, no scripts; light, dark, narrow, printed."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.report.columns import PAGE, printed
from qkattn.report.figures.style import DARK, LIGHT, Drawing
from qkattn.report.prose import environment, macro, plain
from qkattn.report.tables import notes, settings, sheets, summary
from qkattn.storage.records import flat
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

_SVG = 'data:image/svg+xml;base64,'


def report_page(
    study: Study, findings: Findings, drawn: Sequence[Drawing], svg: Mapping[str, bytes]
) -> str:
    """The whole report as an HTML document, with the figures that `svg` has by their stem."""
    figures = [
        described(study, findings, drawing)
        | {'source': _SVG + base64.b64encode(svg[drawing.stem]).decode()}
        for drawing in drawn
        if drawing.stem in svg
    ]
    titles, rows = printed(PAGE, study, findings, findings.arms)
    css = Path(__file__).with_name('templates').joinpath('style.css').read_text('utf-8')
    return (
        environment(html=True)
        .get_template('report.html.j2')
        .render(
            study=study,
            findings=findings,
            figures=figures,
            summary=summary(study, findings, html=True),
            headings=titles,
            rows=rows,
            notes=notes(study, findings),
            sheets=sheets(study, findings),
            settings=settings(study, findings),
            provenance=_provenance(study),
            light=LIGHT,
            dark=DARK,
            css=css,
        )
    )


def described(study: Study, findings: Findings, figure: Drawing) -> dict[str, Any]:
    """A figure as pages show it: its kind, the first word of its stem, is a macro of figures.j2."""
    kind, about = figure.stem.partition('_')[0], {'study': study}
    title, caption = macro('figures.j2', kind, about, findings=findings, **figure.values)
    return {'stem': figure.stem, 'kind': kind, 'title': title, 'caption': caption}


def _provenance(study: Study) -> dict[str, list[str]]:
    """Recorded provenance: the values of each name, each once."""
    facts: dict[str, dict[str, None]] = {}
    for trial in study.trials:
        about = {'data': trial.data, 'eval tokens': trial.eval_tokens, 'lifting': trial.lifting}
        for name, value in flat({**about, **trial.provenance}, ': '):
            facts.setdefault(name, {})[plain(value)] = None
    made = {name: [*values] for name, values in facts.items()}
    return made | ({'command': [study.command]} if study.command else {})

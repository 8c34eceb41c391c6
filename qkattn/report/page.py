"""One self-contained HTML page: no scripts, no network; light, dark, narrow and printed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.report.figures.style import DARK, HUES, LIGHT, Drawing
from qkattn.report.prose import environment, macro_sentences, plain, sentences
from qkattn.report.sheets import sheets
from qkattn.report.tables import headed, notes, printed, settings, summary
from qkattn.storage.records import flat
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

# The figure of the first screen is the first of these that was drawn.
FIRST = ('verdicts', 'differences', 'losses')
# The kinds of figures, with which their files' names begin.
KINDS = (
    *('verdicts', 'differences', 'losses', 'scores', 'sweep', 'curves'),
    *('loss_parameters', 'multipliers', 'retrieval'),
)


def report_page(
    study: Study, found: Findings, drawn: Sequence[Drawing], svg: Mapping[str, str]
) -> str:
    """The whole report as an HTML document; a figure without an SVG is left empty."""
    figures = [
        described(study, found, drawing) | {'svg': svg.get(drawing.stem, '')} for drawing in drawn
    ]
    by_stem = {figure['stem']: figure for figure in figures}
    facts = sentences('facts.j2', study=study, found=found)
    of_study = headed(study, found)
    return (
        environment(html=True)
        .get_template('report.html.j2')
        .render(
            study=study,
            found=found,
            figures=figures,
            first=next((by_stem[stem] for stem in FIRST if stem in by_stem), None),
            summary=summary(study, found, html=True),
            facts=[fact.partition(': ')[::2] for fact in facts],
            columns=of_study,
            rows=list(zip(found.arms, printed(of_study, found.arms), strict=True)),
            notes=notes(study, found, with_remarks=False),
            sheets={sheet.name: sheet for sheet in sheets(study, found)},
            settings=settings(study, found),
            provenance=_provenance(study),
            **style(),
        )
    )


def style() -> dict[str, Any]:
    """What the macro `head` needs: the colours and the style sheet."""
    css = Path(__file__).with_name('templates').joinpath('style.css').read_text('utf-8')
    return {'light': LIGHT, 'dark': DARK, 'num_hues': len(HUES), 'css': css}


def described(study: Study, found: Findings, figure: Drawing) -> dict[str, Any]:
    """A figure as the page shows it: its kind names a macro of figures.j2."""
    kind = next(name for name in KINDS if figure.stem.startswith(name))
    title, caption = macro_sentences('figures.j2', kind, study, found=found, **figure.values)
    return {'stem': figure.stem, 'kind': kind, 'title': title, 'caption': caption}


def _provenance(study: Study) -> dict[str, list[tuple[str, int]]]:
    """What ran where: the recorded values of each name, with the number of runs of each."""
    facts: dict[str, dict[str, set[str]]] = {}
    for trial in study.trials:
        about = {'data': trial.data, 'eval tokens': trial.eval_tokens, 'lifting': trial.lifting}
        for name, value in flat({**about, **trial.provenance}, ': '):
            facts.setdefault(name, {}).setdefault(plain(value), set()).add(trial.run)
    facts.pop('command' if study.command else '', None)
    command = {'command': [(study.command, 0)]} if study.command else {}
    return command | {
        name: [(text, len(runs)) for text, runs in values.items()] for name, values in facts.items()
    }

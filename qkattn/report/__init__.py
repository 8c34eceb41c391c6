"""Reports: the files of a study directory in; tables, figures and one HTML page out."""

import base64
import contextlib
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkattn.errors import ConfigError, ReportError
from qkattn.report import tables
from qkattn.report.columns import FIRST_SCREEN, PAGE, printed
from qkattn.report.figures import figures
from qkattn.report.figures.drawing import FORMATS, Drawing, Picture, picture, write_plots
from qkattn.report.figures.style import DARK, LIGHT
from qkattn.report.prose import environment, macro
from qkattn.report.tables import headline, terminal_text
from qkattn.storage import ledger
from qkattn.storage.files import as_path, without_directories, write_atomic
from qkattn.storage.records import flat, parse_file
from qkattn.study import stored
from qkattn.study.tuning import SCREENING
from qkattn.verdict import Findings, TrainedStudy, find, load_findings, load_study

log = logging.getLogger(__name__)

__all__ = ['described', 'documents', 'export', 'headline', 'show_report', 'write_report']


def documents(findings: Findings, pictures: Sequence[Picture]) -> dict[str, str]:
    """The files of a report by name: tables, and a page with the pictures."""
    return tables.files(findings) | {'report.html': _page(findings, pictures)}


def show_report(study_dir: str | Path, plots: Sequence[str] = ()) -> str:
    """Writes the report of a study, as `write_report`; returns what a terminal shows of it."""
    return terminal_text(*write_report(study_dir, plots))


def write_report(study_dir: str | Path, plots: Sequence[str] = ()) -> tuple[Findings, Path]:
    """Writes the report of a study; returns its findings and the path of report.html.

    Writes table.md, table.csv and, last, report.html into the directory. Figures are on the page;
    `plots` are further formats of them, 'png', 'pdf' or 'svg', for files in plots/, from which
    figures of earlier reports are removed. A report on more than screening is a look, which the
    study's ledger keeps. ReportError if the directory is not a study or holds no result, or if its
    ledger is damaged; ConfigError for another format.
    """
    for kind in plots:
        if kind not in FORMATS:
            raise ConfigError(f'plots={kind!r} is no format; valid are {", ".join(FORMATS)}')
    study = load_study(study_dir)
    judged = any(run.stage != SCREENING and run.trials for run in study.runs)
    if judged and ledger.look(study.directory, study.files):
        # All that a look changes; the other files are not read again.
        kept = ledger.read(study.directory / ledger.NAME)
        study = dataclasses.replace(study, ledger=kept, altered={})
    findings = find(study)
    drawings = figures(findings)
    write_plots(study.directory / 'plots', drawings, plots)
    pictures = [picture(drawing) for drawing in drawings]
    for name, text in documents(findings, pictures).items():
        written = write_atomic(study.directory / name, text)
    return findings, written


def export(study_dir: str | Path, destination: str | Path) -> Path:
    """Writes a study's stored form (see `qkattn.study.stored`), table.md and table.csv.

    `experiments.report --study` makes the rest of a report from it. A copy of an export is a
    working directory, in which the study goes on with the runs that have no result. ReportError if
    there is no study, or `destination` is neither empty nor an earlier export of the same study.
    """
    check_export(study_dir, destination)
    findings = load_findings(study_dir)
    destination = as_path(destination)
    stored.pack(findings.study.files, destination)
    _warn_of_directories(destination / 'study.json')
    for file, text in tables.files(findings).items():
        write_atomic(destination / file, text)
    return destination


def _warn_of_directories(declaration: Path) -> None:
    """Warns of settings in study.json that name directories of this machine.

    They are exported as they are: the ledger and the names of runs are hashes of them.
    """
    settings_with_paths = []
    for setting, value in flat(parse_file(declaration, {})):
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and without_directories(text) != text for text in texts):
            settings_with_paths.append(setting)
    if settings_with_paths:
        log.warning(
            '%s names directories of this machine in %s, as hashes of the study cover it; give a '
            'study that is to be published paths relative to the working directory',
            declaration,
            ', '.join(settings_with_paths),
        )


def check_export(study_dir: str | Path, destination: str | Path) -> None:
    """ReportError if `destination` is neither empty nor an earlier export of the same study."""
    destination = as_path(destination)
    if not destination.exists():
        return
    if destination.is_dir() and not any(destination.iterdir()):
        return
    study = _name(as_path(study_dir))
    is_working_directory = (destination / 'plan.jsonl').exists()
    if _name(destination) != study or is_working_directory:
        raise ReportError(
            f'{str(destination)!r} holds something other than an export of study {study!r}; '
            'give an empty directory.'
        )


def _name(directory: Path) -> str | None:
    """The name of the study that a directory declares; None if it holds no readable study.json."""
    with contextlib.suppress(ValueError):
        return parse_file(directory / 'study.json', {'name': str})['name']


def _page(findings: Findings, pictures: Sequence[Picture]) -> str:
    """The whole report as an HTML document: no scripts; light, dark, wide, narrow, printed."""
    template = environment(html=True).get_template('report.html.j2')
    return template.render(
        study=findings.study,
        findings=findings,
        figures=[_figure(findings, shown) for shown in pictures],
        summary=tables.summary(findings, with_arms=False),
        first_screen=printed(FIRST_SCREEN, findings, findings.arms),
        whole_table=printed(PAGE, findings, findings.arms),
        notes=tables.notes(findings),
        sheets=tables.sheets(findings),
        settings=[line.split(': ', 1) for line in tables.settings(findings)],
        provenance=_provenance(findings.study),
        light=LIGHT,
        dark=DARK,
    )


def _figure(findings: Findings, shown: Picture) -> dict[str, Any]:
    """What the template of the page says of a figure, with its SVG as URLs."""
    figure = described(findings, shown.drawing)
    if shown.drawing.grid is None:
        return figure | {'narrow': _data_url(shown.narrow), 'wide': _data_url(shown.wide)}
    panels = [
        {'variant': panel.variant, 'notes': panel.notes, 'source': _data_url(panel.svg)}
        for panel in shown.panels
    ]
    return figure | {
        'panels': panels,
        'legend': _data_url(shown.legend),
        'xlabel': shown.drawing.grid.xlabel,
        'ylabel': shown.drawing.grid.ylabel,
    }


def _data_url(svg: bytes) -> str:
    return f'data:image/svg+xml;base64,{base64.b64encode(svg).decode()}'


def described(findings: Findings, drawing: Drawing) -> dict[str, Any]:
    """The title and caption of a figure: a macro of figures.j2, named by its stem's first word."""
    kind = drawing.stem.partition('_')[0]
    shared = {'study': findings.study}
    title, caption = macro('figures.j2', kind, shared, findings=findings, **drawing.values)
    return {'stem': drawing.stem, 'kind': kind, 'title': title, 'caption': caption}


def _provenance(study: TrainedStudy) -> dict[str, list[str]]:
    """What the trials record of their origin: for each fact its values, each once.

    {'python': ['3.12.1'], 'devices: kind': ['cpu', 'NVIDIA H200']}
    """
    values_by_fact = dict[str, list[str]]()
    for trial in study.trials:
        facts = {
            'data': trial.data,
            'eval tokens': trial.eval_tokens,
            'lifting': trial.lifting,
            **trial.provenance,
        }
        for fact, value in flat(facts, ': '):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            values = values_by_fact.setdefault(fact, [])
            if text not in values:
                values.append(text)
    if study.command:
        values_by_fact['command'] = [study.command]
    return values_by_fact

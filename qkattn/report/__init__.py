"""Reports: tables, figures and an HTML page from the files of a study directory."""

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

PAGE_NAME = 'report.html'

__all__ = ['described', 'documents', 'export', 'headline', 'show_report', 'write_report']


def documents(findings: Findings, pictures: Sequence[Picture]) -> dict[str, str]:
    """Returns the files of a report by name: tables, and a page with the pictures."""
    texts = tables.files(findings)
    texts[PAGE_NAME] = _page(findings, pictures)
    return texts


def show_report(study_dir: str | Path, plots: Sequence[str] = ()) -> str:
    """Writes the report of a study, see `write_report`; returns a short text for a terminal."""
    findings, page = write_report(study_dir, plots)
    return terminal_text(findings, page)


def write_report(study_dir: str | Path, plots: Sequence[str] = ()) -> tuple[Findings, Path]:
    """Writes the report of a study; returns its findings and the path of report.html.

    The report is table.md, table.csv and report.html in the study's directory. The page holds the
    figures. A report on more than screening is a look at the results (an interim analysis), and the
    study's ledger records it.

    Args:
      study_dir: the directory of the study.
      plots: formats in which the figures are also written to the folder plots/: 'png', 'pdf' or
        'svg'. Figures of earlier reports are removed from this folder.

    Raises ReportError if the directory is not a study, has no result, or has a damaged ledger, and
    ConfigError for another format.
    """
    for plot_format in plots:
        if plot_format not in FORMATS:
            raise ConfigError(f'plots={plot_format!r} is no format; valid are {", ".join(FORMATS)}')

    study = _with_look(load_study(study_dir))
    findings = find(study)
    drawings = figures(findings)
    write_plots(study.directory / 'plots', drawings, plots)
    pictures = [picture(drawing) for drawing in drawings]
    # The page is the last document, so that it only appears beside complete tables.
    for name, text in documents(findings, pictures).items():
        write_atomic(study.directory / name, text)
    return findings, study.directory / PAGE_NAME


def _with_look(study: TrainedStudy) -> TrainedStudy:
    """Records a look (interim analysis) in the study's ledger; returns the updated study.

    Results of screening alone do not count as a look. A look at the same results is recorded once.
    """
    is_beyond_screening = any(run.stage != SCREENING and run.trials for run in study.runs)
    if not is_beyond_screening:
        return study
    is_new_look = ledger.record_look(study.directory, study.files)
    if not is_new_look:
        return study

    new_ledger = ledger.read(study.directory / ledger.NAME)
    # `record_look` returns False if a run was altered, so here no run is altered.
    return dataclasses.replace(study, ledger=new_ledger, altered={})


def export(study_dir: str | Path, destination: str | Path) -> Path:
    """Exports a study: writes its stored form, table.md and table.csv.

    The stored form is a few files in place of a directory for each run; see `qkattn.study.stored`.
    `experiments.report --study` writes a whole report from an export. A copy of an export is a
    working directory, in which the study can continue with the runs that have no result.

    Raises ReportError if there is no study in `study_dir`, or if `destination` is neither empty nor
    an earlier export of the same study.
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
    """Logs a warning if settings in an exported study.json contain paths of this machine.

    The export keeps these settings, because the ledger and the names of runs are hashes of them.
    """

    def has_path(value: Any) -> bool:
        return isinstance(value, str) and without_directories(value) != value

    settings_with_paths = []
    for setting, value in flat(parse_file(declaration, {})):
        entries = value if isinstance(value, list) else [value]
        if any(has_path(entry) for entry in entries):
            settings_with_paths.append(setting)
    if settings_with_paths:
        log.warning(
            "%s contains paths of this machine in %s; they stay, because the study's hashes cover "
            'them. In a study that is to be published, give paths relative to the working '
            'directory',
            declaration,
            ', '.join(settings_with_paths),
        )


def check_export(study_dir: str | Path, destination: str | Path) -> None:
    """Raises ReportError unless a study can be exported to `destination`.

    The destination has to be missing, empty, or an earlier export of the same study.
    """
    destination = as_path(destination)
    if not destination.exists():
        return
    is_empty = destination.is_dir() and not any(destination.iterdir())
    if is_empty:
        return

    name = _study_name(as_path(study_dir))
    has_same_study = _study_name(destination) == name
    # A study that is being trained has this file. An export has it in its archive.
    is_working_directory = (destination / 'plan.jsonl').exists()
    if is_working_directory or not has_same_study:
        raise ReportError(
            f'{str(destination)!r} holds something other than an export of study {name!r}; '
            'give an empty directory.'
        )


def _study_name(directory: Path) -> str | None:
    """Returns the name of the study in a directory; None if it has no readable study.json."""
    with contextlib.suppress(ValueError):
        return parse_file(directory / 'study.json', {'name': str})['name']


def _page(findings: Findings, pictures: Sequence[Picture]) -> str:
    """Returns the whole report as an HTML document without scripts.

    It adapts to light and dark, to wide and narrow screens, and to paper.
    """
    template = environment(html=True).get_template('report.html.j2')
    return template.render(
        study=findings.study,
        findings=findings,
        figures=[_figure_values(findings, drawn) for drawn in pictures],
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


def _figure_values(findings: Findings, drawn: Picture) -> dict[str, Any]:
    """Returns the values with which the page's template shows a figure.

    These are its title and caption, and its images as URLs: either panels with a legend, or the
    whole figure in two widths.
    """
    values = described(findings, drawn.drawing)
    grid = drawn.drawing.grid
    if grid is None:
        values['narrow'] = _data_url(drawn.narrow)
        values['wide'] = _data_url(drawn.wide)
        return values

    panels = []
    for panel in drawn.panels:
        source = _data_url(panel.svg)
        panels.append({'variant': panel.variant, 'notes': panel.notes, 'source': source})
    values['panels'] = panels
    values['legend'] = _data_url(drawn.legend)
    values['xlabel'] = grid.xlabel
    values['ylabel'] = grid.ylabel
    return values


def _data_url(svg: bytes) -> str:
    """Returns a URL that contains the image itself."""
    return f'data:image/svg+xml;base64,{base64.b64encode(svg).decode()}'


def described(findings: Findings, drawing: Drawing) -> dict[str, Any]:
    """Returns the stem, kind, title and caption of a figure, as pages show it.

    The kind is the first word of the stem. The macro of this name in templates/figures.j2 makes
    the title and the caption.
    """
    kind = drawing.stem.partition('_')[0]
    shared = {'study': findings.study}
    title, caption = macro('figures.j2', kind, shared, findings=findings, **drawing.values)
    return {'stem': drawing.stem, 'kind': kind, 'title': title, 'caption': caption}


def _provenance(study: TrainedStudy) -> dict[str, list[str]]:
    """Collects what the trials record about their origin: the different values of each fact.

    For example, {'python': ['3.12.1'], 'devices: kind': ['cpu', 'NVIDIA H200']}.
    """
    values_by_fact = dict[str, list[str]]()
    for trial in study.trials:
        facts = {
            'data': trial.data,
            'eval tokens': trial.eval_tokens,
            'lifting': trial.lifting,  # how the trials of a run were computed together
            **trial.provenance,
        }
        # A fact may be a mapping of facts: {'devices': {'kind': ...}} gives 'devices: kind'.
        for fact, value in flat(facts, separator=': '):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            values = values_by_fact.setdefault(fact, [])
            if text not in values:
                values.append(text)
    if study.command:
        values_by_fact['command'] = [study.command]
    return values_by_fact

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
from qkattn.report.figures.drawing import FORMATS, Drawing, Picture, write_plots
from qkattn.report.figures.drawing import picture as draw_picture
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
    """Returns the text of each report file by its name: table.md, table.csv and report.html."""
    texts = tables.files(findings)
    texts[PAGE_NAME] = _page(findings, pictures)
    return texts


def show_report(study_dir: str | Path, plots: Sequence[str] = ()) -> str:
    """Writes a study's report as `write_report` does; returns a summary for a terminal."""
    findings, page = write_report(study_dir, plots)
    return terminal_text(findings, page)


def write_report(study_dir: str | Path, plots: Sequence[str] = ()) -> tuple[Findings, Path]:
    """Writes table.md, table.csv and report.html to a study's directory.

    If the study has results beyond screening, the report counts as a look (an interim analysis),
    which is recorded in the study's ledger.

    Args:
        study_dir: The study directory.
        plots: Formats in which figures are also written to plots/: 'png', 'pdf' or 'svg'. All other
            figures are removed from plots/.

    Returns:
        The study's findings and the path of report.html.

    Raises:
        ReportError: The directory has no study, no results or a damaged ledger.
        ConfigError: A format is unknown.
    """
    for plot_format in plots:
        if plot_format not in FORMATS:
            raise ConfigError(f'plots={plot_format!r} is no format; valid are {", ".join(FORMATS)}')

    study = _with_recorded_look(load_study(study_dir))
    findings = find(study)
    drawings = figures(findings)
    write_plots(study.directory / 'plots', drawings, plots)
    pictures = [draw_picture(drawing) for drawing in drawings]
    # report.html is written last, so that its tables already exist.
    for name, text in documents(findings, pictures).items():
        write_atomic(study.directory / name, text)
    return findings, study.directory / PAGE_NAME


def _with_recorded_look(study: TrainedStudy) -> TrainedStudy:
    """Records a look (an interim analysis) in the study's ledger; returns the updated study.

    A study without new results beyond screening stays as it is.
    """
    has_results_beyond_screening = any(run.stage != SCREENING and run.trials for run in study.runs)
    if not has_results_beyond_screening:
        return study
    # The ledger records no look if the results are those of the last look.
    was_recorded = ledger.record_look(study.directory, study.files)
    if not was_recorded:
        return study

    new_ledger = ledger.read(study.directory / ledger.NAME)
    # A look is not recorded if a run was altered, so none is altered here.
    return dataclasses.replace(study, ledger=new_ledger, altered={})


def export(study_dir: str | Path, destination: str | Path) -> Path:
    """Exports a study in a few files, with table.md and table.csv.

    The study can be continued in a copy of the export. The file format is described in
    `qkattn.study.stored`.

    Args:
        study_dir: The study directory.
        destination: The directory to write; empty, or an earlier export of the same study.

    Returns:
        The path of the export.

    Raises:
        ReportError: `study_dir` has no study, or `destination` has other files.
    """
    check_export(study_dir, destination)
    findings = load_findings(study_dir)
    destination = as_path(destination)
    stored.pack(findings.study.files, destination)
    _warn_of_absolute_paths(destination / 'study.json')
    for name, text in tables.files(findings).items():
        write_atomic(destination / name, text)
    return destination


def _warn_of_absolute_paths(declaration: Path) -> None:
    """Logs a warning if an exported study.json contains absolute paths."""

    def has_absolute_path(value: Any) -> bool:
        if not isinstance(value, str):
            return False
        # `without_directories` shortens absolute paths, and leaves other text unchanged.
        return without_directories(value) != value

    study_json = parse_file(declaration, schema={})  # any object
    settings_with_paths = []
    for setting, value in flat(study_json):  # such as ('base.data.path', '/home/me/plays.txt')
        entries = value if isinstance(value, list) else [value]
        if any(has_absolute_path(entry) for entry in entries):
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
    """Checks that an export may write to `destination`.

    Raises:
        ReportError: `destination` exists, and is neither empty nor an export of the same study.
    """
    destination = as_path(destination)
    if not destination.exists():
        return
    is_empty = destination.is_dir() and not any(destination.iterdir())
    if is_empty:
        return

    name = _study_name(as_path(study_dir))
    has_same_study = _study_name(destination) == name
    # Only a study directory has plan.jsonl as a file. An export has it inside an archive.
    is_working_directory = (destination / 'plan.jsonl').exists()
    if is_working_directory or not has_same_study:
        raise ReportError(
            f'{str(destination)!r} holds something other than an export of study {name!r}; '
            'give an empty directory.'
        )


def _study_name(directory: Path) -> str | None:
    """Returns the name of a study; None if its study.json cannot be read."""
    with contextlib.suppress(ValueError):
        return parse_file(directory / 'study.json', {'name': str})['name']


def _page(findings: Findings, pictures: Sequence[Picture]) -> str:
    """Renders report.html."""
    settings = []
    for line in tables.settings(findings):
        settings.append(line.split(': ', 1))  # 'batch size: 16' becomes ['batch size', '16']
    template = environment(html=True).get_template('report.html.j2')
    return template.render(
        study=findings.study,
        findings=findings,
        figures=[_figure_values(findings, picture) for picture in pictures],
        summary=tables.summary(findings, with_arms=False),
        first_screen=printed(FIRST_SCREEN, findings, findings.arms),
        whole_table=printed(PAGE, findings, findings.arms),
        notes=tables.notes(findings),
        sheets=tables.sheets(findings),
        settings=settings,
        provenance=_provenance(findings.study),
        light=LIGHT,  # the colors of the page
        dark=DARK,
    )


def _figure_values(findings: Findings, picture: Picture) -> dict[str, Any]:
    """Returns the template values of a figure: title, caption, and images as data URLs."""
    values = described(findings, picture.drawing)
    grid = picture.drawing.grid  # of panels, one for each variant
    if grid is None:
        # The figure is a single image, drawn for narrow and for wide screens.
        values['narrow'] = _data_url(picture.narrow)
        values['wide'] = _data_url(picture.wide)
        return values

    values['panels'] = []
    for panel in picture.panels:
        source = _data_url(panel.svg)
        values['panels'].append({'variant': panel.variant, 'notes': panel.notes, 'source': source})
    values['legend'] = _data_url(picture.legend)
    values['xlabel'] = grid.xlabel
    values['ylabel'] = grid.ylabel
    return values


def _data_url(svg: bytes) -> str:
    """Returns an SVG image as a data URL."""
    return f'data:image/svg+xml;base64,{base64.b64encode(svg).decode()}'


def described(findings: Findings, drawing: Drawing) -> dict[str, Any]:
    """Returns the stem, kind, title and caption of a figure.

    The stem is the file name without its ending, such as 'sweep_learning_rate', and the kind is its
    first word. The macro of this name in templates/figures.j2 writes title and caption.
    """
    kind = drawing.stem.partition('_')[0]
    context = {'study': findings.study}
    title, caption = macro('figures.j2', kind, context, findings=findings, **drawing.values)
    return {'stem': drawing.stem, 'kind': kind, 'title': title, 'caption': caption}


def _provenance(study: TrainedStudy) -> dict[str, list[str]]:
    """Returns the distinct values of each provenance field over all trials.

    For example, {'python': ['3.12.1'], 'devices: kind': ['cpu', 'NVIDIA H200']}.
    """
    values_by_field = dict[str, list[str]]()
    for trial in study.trials:
        provenance = {
            'data': trial.data,
            'eval tokens': trial.eval_tokens,
            'lifting': trial.lifting,  # how the trials of a run were batched
            **trial.provenance,
        }
        # {'devices': {'kind': 'cpu'}} becomes ('devices: kind', 'cpu').
        for field, value in flat(provenance, separator=': '):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            field_values = values_by_field.setdefault(field, [])
            if text not in field_values:
                field_values.append(text)
    if study.command:
        values_by_field['command'] = [study.command]
    return values_by_field

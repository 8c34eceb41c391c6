"""HTML pages of a study and of a run: self-contained, no scripts; light, dark, narrow, printed."""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qkattn.config import Config, from_json
from qkattn.errors import ReportError
from qkattn.metrics import shown
from qkattn.report.columns import PAGE, Measure, printed_in
from qkattn.report.figures.style import (
    DARK,
    HUES,
    LIGHT,
    MUTED,
    WIDTH,
    Drawing,
    legend,
    render,
    style_sheet,
)
from qkattn.report.prose import (
    NONE,
    counted,
    data_name,
    environment,
    macro_sentences,
    plain,
    sentences,
    si,
)
from qkattn.report.sheets import Table, sheets
from qkattn.report.tables import cells, headings, notes, settings, summary
from qkattn.storage.files import as_path, write_atomic
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import (
    CONFIG,
    PROVENANCE,
    flat,
    metrics_of,
    read_json,
    read_results,
)
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

# The macros of figures.j2, with which the names of the figures' files begin.
KINDS = (
    *('verdicts', 'differences', 'losses', 'scores', 'sweep', 'curves'),
    *('loss_parameters', 'multipliers', 'retrieval'),
)


def report_page(
    study: Study, findings: Findings, drawn: Sequence[Drawing], svg: Mapping[str, bytes]
) -> str:
    """The whole report as an HTML document, with the figures that `svg` has by their stem."""
    figures = [
        described(study, findings, drawing) | {'source': _source(svg[drawing.stem])}
        for drawing in drawn
        if drawing.stem in svg
    ]
    of_study = printed_in(PAGE, study, findings)
    facts = sentences('facts.j2', study=study, findings=findings)
    return _page(
        'report.html.j2',
        study=study,
        findings=findings,
        figures=figures,
        summary=summary(study, findings, html=True),
        facts=[fact.partition(': ')[::2] for fact in facts],
        headings=headings(of_study),
        rows=cells(of_study, findings.arms),
        notes=notes(study, findings),
        sheets=sheets(study, findings),
        settings=settings(study, findings),
        provenance=_provenance(study),
    )


def _page(template: str, **values: Any) -> str:
    css = Path(__file__).with_name('templates').joinpath('style.css').read_text('utf-8')
    page = environment(html=True).get_template(template)
    return page.render(light=LIGHT, dark=DARK, css=css, **values)


def _source(svg: bytes) -> str:
    return f'data:image/svg+xml;base64,{base64.b64encode(svg).decode()}'


def described(study: Study, findings: Findings, figure: Drawing) -> dict[str, Any]:
    """A figure as pages show it: its kind names a macro of figures.j2."""
    kind = next(name for name in KINDS if figure.stem.startswith(name))
    title, caption = macro_sentences('figures.j2', kind, study, findings=findings, **figure.values)
    return {'stem': figure.stem, 'kind': kind, 'title': title, 'caption': caption}


def _provenance(study: Study) -> dict[str, list[str]]:
    """Recorded provenance: the values of each name, with their number of runs."""
    facts: dict[str, dict[str, set[str]]] = {}
    for trial in study.trials:
        about = {'data': trial.data, 'eval tokens': trial.eval_tokens, 'lifting': trial.lifting}
        for name, value in flat({**about, **trial.provenance}, ': '):
            facts.setdefault(name, {}).setdefault(plain(value), set()).add(trial.run)
    if study.command:
        facts |= {'command': {study.command: set()}}
    made = {}
    for name, values in facts.items():
        several = len(values) > 1
        made[name] = [f'{t} ({counted(r, "run")})' if several else t for t, r in values.items()]
    return made


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run directory."""

    directory: Path
    config: Config
    results: list[dict[str, Any]]  # of the trials; empty while the run is not finished
    records: list[dict[str, Any]]  # of metrics.jsonl
    starts: list[dict[str, Any]]  # of provenance.json

    @property
    def trials(self) -> list[str]:
        """A name for each trial, from the settings in which they differ."""
        trials = self.config.trials.trials()
        differing = [n for n in trials[0] if len({trial[n] for trial in trials}) > 1] or ['seed']
        return [
            ', '.join(f'{n.replace("_", " ")} {trial[n]:g}' for n in differing) for trial in trials
        ]


def load_run(directory: str | Path) -> Run:
    """Reads a run directory, finished or not.

    ReportError if it is not a run or nothing was logged yet, RunDirectoryError for a damaged file.
    """
    path = as_path(directory)
    if not (path / 'config.json').exists():
        raise ReportError(f'{path} holds no config.json, so this is not a run directory')
    config = from_json(Config, read_json(path / 'config.json', CONFIG)['config'])
    metrics, result = path / 'metrics.jsonl', path / 'result.json'
    records = read_metrics(metrics) if metrics.exists() else []
    if not records:
        raise ReportError(f'{path} holds no logged step yet')
    results = read_results(result, config.trials.trials()) if result.exists() else []
    starts = read_json(path / 'provenance.json', PROVENANCE)['starts']
    return Run(path, config, results, records, starts)


def write_run_report(directory: str | Path) -> tuple[Path, Table]:
    """Writes report.html into a run directory; returns its path and the table of its trials."""
    run = load_run(directory)
    table = trial_table(run)
    with style_sheet():
        source = _source(render(loss_curves(run), 'svg'))
    page = _page(
        'run.html.j2',
        run=run,
        facts=_facts(run),
        source=source,
        table_of_trials=table,
        settings=[(name, plain(v)) for name, v in flat(dataclasses.asdict(run.config))],
        starts=[[(name, plain(v)) for name, v in flat(start)] for start in run.starts],
    )
    return write_atomic(run.directory / 'report.html', page), table


def _facts(run: Run) -> dict[str, str]:
    """The main facts about the run, by name."""
    model, train, steps = run.config.model, run.config.train, run.records[-1]['step']
    about = {
        'model': f'{model.variant}, d_model {model.d_model}, ' + counted(model.num_layers, 'layer'),
        'data': run.config.data.name,
        'steps': f'{steps:,} of {train.num_steps:,}',
        'tokens per trial': si(steps * train.batch_size * model.context),
    }
    for first in run.results[:1]:
        about |= {
            'data': data_name(first['data']),
            'parameters': f'{first["parameters"]["total"]:,}',
            'FLOPs per token': si(first['flops_per_token']),
            'cache, floats per token': si(first['cache_floats_per_token']),
            'training time': f'{first["train_seconds"]:,.0f} s',
        }
    return about


def trial_table(run: Run) -> Table:
    """Settings, end and metrics of each trial; without results, the last logged losses."""

    def printed(values: Sequence[float | None], decimals: int, scale: float) -> list[str]:
        return [NONE if v is None else f'{scale * v:.{decimals}f}' for v in values]

    ends = ['unfinished'] * len(run.trials)
    columns: dict[str, list[str]] = {}
    if run.results:
        ends = [
            result['status'] + (f' at step {at:,}' if (at := result.get('diverged_at')) else '')
            for result in run.results
        ]
        for metric in shown(metrics_of(run.results[0]), run.results):
            for measure in (Measure(metric, split) for split in metric.prefixes):
                values = [result.get(measure.field) for result in run.results]
                if any(value is not None for value in values):
                    name = f'{measure.name},|{measure.unit}'.rstrip(',|')
                    columns[name] = printed(values, metric.decimals, metric.scale)
    else:
        for kind, field, split in (('train', 'loss', 'training'), ('eval', 'val_loss', 'val')):
            logged = [record[field] for record in run.records if record['kind'] == kind]
            values = logged[-1] if logged else [None] * len(ends)
            columns[f'{split} loss,|nats/token'] = printed(values, 4, 1.0)
    titles = [('trial', True), ('end', True), *((name, False) for name in columns)]
    return titles, list(map(list, zip(run.trials, ends, *columns.values(), strict=True)))


def loss_curves(run: Run) -> Figure:
    """Training loss (thin) and validation loss (a mark at each evaluation) by step."""
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots()
    thin: dict[str, Any] = {'linewidth': 0.8, 'alpha': 0.6}
    for kind, field, label, style in (
        ('train', 'loss', 'training', thin),
        ('eval', 'val_loss', 'validation', {'marker': 'o'}),
    ):
        records = [record for record in run.records if record['kind'] == kind]
        losses_EX = np.array([record[field] for record in records], np.float64)
        for x, name in enumerate(run.trials if records else ()):
            color = HUES[x] if len(run.trials) <= len(HUES) else MUTED
            steps = [record['step'] for record in records]
            axes.plot(steps, losses_EX[:, x], color=color, label=f'{name}, {label}', **style)
    # The first steps are far above the rest.
    train = [record for record in run.records if record['kind'] == 'train']
    late = [r['loss'] for r in train if r['step'] > 0.1 * train[-1]['step']]
    if np.isfinite(losses_X := np.array(late, np.float64)).any():
        low, high = np.nanmin(losses_X), np.nanmax(losses_X)
        pad = 0.06 * (high - low) + 0.01
        axes.set_ylim(low - pad, high + pad)
    axes.set(xlabel='training step', ylabel='loss, nats/token')
    if len(run.trials) <= len(HUES):
        legend(figure)
    return figure

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
KINDS = ('verdicts', 'differences', 'losses', 'scores', 'sweep', 'curves')
KINDS += ('loss_parameters', 'retrieval')


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


def write_run_report(directory: str | Path) -> tuple[Path, Table]:
    """Writes report.html into the directory of a run, finished or not.

    Returns its path and the table of the trials. ReportError if it is not a run or nothing was
    logged yet, RunDirectoryError for a damaged file.
    """
    path = as_path(directory)
    if not (path / 'config.json').exists():
        raise ReportError(f'{path} holds no config.json, so this is not a run directory')
    config = from_json(Config, read_json(path / 'config.json', CONFIG)['config'])
    log, result = path / 'metrics.jsonl', path / 'result.json'
    records = read_metrics(log) if log.exists() else []
    if not records:
        raise ReportError(f'{path} holds no logged step yet')
    trials = config.trials.trials()
    results = read_results(result, trials) if result.exists() else []
    names, starts = trial_names(trials), read_json(path / 'provenance.json', PROVENANCE)['starts']
    table = trial_table(names, results)
    with style_sheet():
        source = _source(render(loss_curves(names, records), 'svg'))
    page = _page(
        'run.html.j2',
        name=path.name,
        facts=_facts(config, results, records[-1]['step']),
        source=source,
        table_of_trials=table,
        settings=[(name, plain(v)) for name, v in flat(dataclasses.asdict(config))],
        starts=[[(name, plain(v)) for name, v in flat(start)] for start in starts],
    )
    return write_atomic(path / 'report.html', page), table


def trial_names(trials: Sequence[Mapping[str, float]]) -> list[str]:
    """A name for each trial, from the settings in which they differ."""
    differing = [n for n in trials[0] if len({trial[n] for trial in trials}) > 1] or ['seed']
    return [', '.join(f'{n.replace("_", " ")} {trial[n]:g}' for n in differing) for trial in trials]


def _facts(config: Config, results: Sequence[Mapping[str, Any]], steps: int) -> dict[str, str]:
    """The main facts about a run of so many steps, by name."""
    model, train = config.model, config.train
    about = {
        'model': f'{model.variant}, d_model {model.d_model}, ' + counted(model.num_layers, 'layer'),
        'data': config.data.name,
        'steps': f'{steps:,} of {train.num_steps:,}',
        'tokens per trial': si(steps * train.batch_size * model.context),
    }
    for first in results[:1]:
        about |= {
            'data': data_name(first['data']),
            'parameters': f'{first["parameters"]["total"]:,}',
            'FLOPs per token': si(first['flops_per_token']),
            'cache, floats per token': si(first['cache_floats_per_token']),
            'training time': f'{first["train_seconds"]:,.0f} s',
        }
    return about


def trial_table(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> Table:
    """The end and the metrics of each trial, once the run has ended."""
    columns = {'trial': list(names), 'end': ['unfinished'] * len(names)}
    if results:
        columns['end'] = [
            result['status'] + (f' at step {at:,}' if (at := result.get('diverged_at')) else '')
            for result in results
        ]
        for metric in shown(metrics_of(results[0]), results):
            for measure in (Measure(metric, split) for split in metric.prefixes):
                values = [result.get(measure.field) for result in results]
                if any(value is not None for value in values):
                    columns[f'{measure.name},|{measure.unit}'.rstrip(',|')] = [
                        NONE if v is None else f'{metric.scale * v:.{metric.decimals}f}'
                        for v in values
                    ]
    titles = [(name, name in ('trial', 'end')) for name in columns]
    return titles, list(map(list, zip(*columns.values(), strict=True)))


def loss_curves(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Figure:
    """Training loss (thin) and validation loss (a mark at each evaluation) by step."""
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = figure.subplots()
    thin: dict[str, Any] = {'linewidth': 0.8, 'alpha': 0.6}
    for kind, field, label, style in (
        ('train', 'loss', 'training', thin),
        ('eval', 'val_loss', 'validation', {'marker': 'o'}),
    ):
        logged = [record for record in records if record['kind'] == kind]
        losses_EX = np.array([record[field] for record in logged], np.float64)
        steps = [record['step'] for record in logged]
        for x, name in enumerate(names if logged else ()):
            color = HUES[x] if len(names) <= len(HUES) else MUTED
            axes.plot(steps, losses_EX[:, x], color=color, label=f'{name}, {label}', **style)
        # The first steps are far above the rest.
        late_EX = losses_EX[np.array(steps) > 0.1 * steps[-1]] if kind == 'train' and logged else []
        if np.isfinite(late_EX).any():
            low, high = np.nanmin(late_EX), np.nanmax(late_EX)
            pad = 0.06 * (high - low) + 0.01
            axes.set_ylim(low - pad, high + pad)
    axes.set(xlabel='training step', ylabel='loss, nats/token')
    if len(names) <= len(HUES):
        legend(figure)
    return figure

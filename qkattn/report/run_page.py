"""The page of a single run: loss curves, results, settings and provenance, from its files alone."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qkattn.config import Config, from_json
from qkattn.errors import ReportError
from qkattn.metrics import PREFIXES, shown
from qkattn.report.figures.curve_figure import evaluation_ticks
from qkattn.report.figures.style import (
    HUES,
    MARKERS,
    MUTED,
    WIDTH,
    Drawing,
    legend,
    render,
    style_sheet,
)
from qkattn.report.page import style
from qkattn.report.prose import NONE, counted, data_name, environment, plain, si
from qkattn.report.sheets import Heading
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


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run directory."""

    directory: Path
    config: Config
    results: list[dict[str, Any]]  # of the trials; empty while the run is not finished
    records: list[dict[str, Any]]  # of metrics.jsonl
    starts: list[dict[str, Any]]  # of provenance.json

    @property
    def steps(self) -> int:
        return self.records[-1]['step'] if self.records else 0

    @property
    def trials(self) -> list[str]:
        """A name for each trial, of the settings in which they differ."""
        trials = self.config.trials.trials()
        differing = [n for n in trials[0] if len({trial[n] for trial in trials}) > 1] or ['seed']
        return [
            ', '.join(f'{n.replace("_", " ")} {trial[n]:g}' for n in differing) for trial in trials
        ]


def load_run(directory: str | Path) -> Run:
    """Reads a run directory, finished or not.

    ReportError if it is none or nothing was logged yet, RunDirectoryError if a file is damaged.
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


def write_run_report(directory: str | Path) -> tuple[Path, list[Heading], list[list[str]]]:
    """Writes report.html into a run directory; returns its path and the table of its trials."""
    run = load_run(directory)
    with style_sheet():
        figure = render(Drawing(loss_curves(run), 'curves'))
    titles, rows = trial_table(run)
    page = (
        environment(html=True)
        .get_template('run.html.j2')
        .render(
            run=run,
            facts=facts(run),
            svg=figure.svg,
            titles=titles,
            rows=rows,
            settings=[(n, plain(v)) for n, v in flat(dataclasses.asdict(run.config))],
            starts=[[(n, plain(v)) for n, v in flat(start)] for start in run.starts],
            **style(),
        )
    )
    return write_atomic(run.directory / 'report.html', page), titles, rows


def facts(run: Run) -> dict[str, str]:
    """What the run is, in a few names and values."""
    model, train = run.config.model, run.config.train
    about = {
        'model': f'{model.variant}, d_model {model.d_model}, ' + counted(model.num_layers, 'layer'),
        'data': run.config.data.name,
        'steps': f'{run.steps:,} of {train.num_steps:,}',
        'tokens per trial': si(run.steps * train.batch_size * model.context),
    }
    if not run.results:
        return about
    first = run.results[0]
    about |= {
        'data': data_name(first['data']),
        'parameters': f'{first["parameters"]["total"]:,}',
        'FLOPs per token': si(first['flops_per_token']),
        'cache, floats per token': si(first['cache_floats_per_token']),
        'training time': f'{first["train_seconds"]:,.0f} s',
    }
    if 'checkpoint_seconds' in first:  # later than the other fields
        about['waiting for checkpoints'] = f'{first["checkpoint_seconds"]:,.1f} s'
    return about


def trial_table(run: Run) -> tuple[list[Heading], list[list[str]]]:
    """Settings, end and metrics of each trial; without results, the last logged losses."""
    titles: list[Heading] = [('trial', True), ('end', True)]
    if not run.results:
        loss = _last(run.records, 'train', 'loss'), _last(run.records, 'eval', 'val_loss')
        titles += [('training loss,|nats/token', False), ('validation loss,|nats/token', False)]
        rows = [
            [name, 'unfinished', *(_number(v[x]) for v in loss)]
            for x, name in enumerate(run.trials)
        ]
        return titles, rows
    rows = [[name, _end(result)] for name, result in zip(run.trials, run.results, strict=True)]
    for metric in shown(metrics_of(run.results[0]), run.results):
        for split, prefix in PREFIXES.items():
            values = [result.get(f'{prefix}_{metric.name}') for result in run.results]
            if any(value is not None for value in values):
                unit = metric.unit if metric.unit and metric.unit != metric.label else ''
                titles.append((f'{split} {metric.label},|{unit}'.rstrip(',|'), False))
                for row, value in zip(rows, values, strict=True):
                    row.append(_number(value, metric.decimals, metric.scale))
    return titles, rows


def loss_curves(run: Run) -> Figure:
    """Training loss (thin) and validation loss (a mark at each evaluation) by step."""
    figure = Figure(figsize=(WIDTH, 4.2))
    axes = figure.subplots()
    for x, name in enumerate(run.trials):
        colour = {'color': HUES[x] if len(run.trials) <= len(HUES) else MUTED}
        for kind, field, look in (
            ('train', 'loss', {'linewidth': 0.8, 'alpha': 0.6, 'label': f'{name}, training'}),
            ('eval', 'val_loss', {'marker': MARKERS[0], 'label': f'{name}, validation'}),
        ):
            records = [record for record in run.records if record['kind'] == kind]
            losses = np.array([record[field][x] for record in records], np.float64)
            axes.plot([record['step'] for record in records], losses, **colour, **look)
    # The first steps are far above the rest.
    late = [r['loss'] for r in run.records if r['kind'] == 'train' and r['step'] > 0.1 * run.steps]
    losses = np.array(late or [np.nan], np.float64)
    if np.isfinite(losses).any():
        low, high = np.nanmin(losses), np.nanmax(losses)
        axes.set_ylim(low - 0.06 * (high - low) - 0.01, high + 0.06 * (high - low) + 0.01)
    if steps := [record['step'] for record in run.records if record['kind'] == 'eval']:
        evaluation_ticks(axes, steps, 4)
    axes.set_xlabel('training step')
    axes.set_ylabel('loss, nats/token')
    if len(run.trials) <= len(HUES):
        legend(figure)
    return figure


def _last(records: Sequence[Mapping[str, Any]], kind: str, field: str) -> list[float | None]:
    found = [record[field] for record in records if record['kind'] == kind]
    trials = len(next(record['loss'] for record in records if record['kind'] == 'train'))
    return found[-1] if found else [None] * trials


def _end(result: Mapping[str, Any]) -> str:
    at = result.get('diverged_at')
    return result['status'] + (f' at step {at:,}' if at is not None else '')


def _number(value: float | None, decimals: int = 4, scale: float = 1.0) -> str:
    return NONE if value is None else f'{scale * value:.{decimals}f}'

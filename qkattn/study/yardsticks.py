"""Yardsticks of a study: what its baseline has to beat before arms are compared.

Recorded when training is finished, from the data that the models saw and from the checkpoints of
the baseline's verdict runs that are still there:

    yardsticks.json
      groups   of each size, corpus and length of training: the task, the tokens that its models
               saw, and what `Rows.yardsticks` measures: the tokens counted, and on each evaluation
               split the losses (nats/token) of counts of these tokens, by name; of a translation
               the BLEU of IBM model 1 on the sentences that its models translate; the definition
               (`yardstick_definitions`)
      runs     of each of its verdict runs the trials: loss, and `Rows.context_losses`: of a
               language model at position 4 ('early') and over the last half of the context
               ('late'), of a translator with the sources shuffled; or why not
"""

import logging
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, MeshConfig, from_json
from qkattn.config.imports import require_named
from qkattn.data import pipeline
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.vocabulary import as_recorded, names_in
from qkattn.errors import CheckpointError, ConfigError
from qkattn.jobs.display import waiting
from qkattn.metrics import PREFIXES
from qkattn.model.transformer import cross_entropy
from qkattn.storage import records
from qkattn.storage.files import Files, absolute
from qkattn.storage.ledger import YARDSTICKS
from qkattn.storage.run_directory import describe_start
from qkattn.study import stored
from qkattn.study.arm_key import LONGER, SAME_SHAPE
from qkattn.study.tuning import SCREENING, VERDICT
from qkattn.study.yardstick_definitions import definition_of, is_current
from qkattn.train import step
from qkattn.train.exported import load_stack
from qkattn.train.program import stack_program
from qkattn.train.sharding import make_mesh

# Between a logged loss and the same from a checkpoint, on another machine.
ROUNDING = 1e-3

log = logging.getLogger(__name__)

_Record = dict[str, Any]


def record(directory: str | Path, imports: Collection[str] | None = None) -> list[str]:
    """Writes yardsticks.json into a study's directory; what it holds already is kept.

    A group of an earlier definition is recorded again. `imports` are the import paths that configs
    of the study may name; None is any, of a study that this process has trained. Returns why
    yardsticks of a size and corpus could not be computed, a sentence each. Raises ConfigError for a
    directory without the files of a study.
    """
    if jax.process_count() > 1:  # reading checkpoints would take all of them
        return ['the job has several processes']
    path = absolute(directory)
    files = stored.opened(path)
    stored_groups: list[_Record] = []
    stored_runs: list[_Record] = []
    if (path / YARDSTICKS).exists():
        schema = {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]}
        before = records.read_json(path / YARDSTICKS, schema)
        stored_groups = before['groups']
        stored_runs = before['runs']
    group_by_run = {group['run']: group for group in stored_groups}
    measured_by_run = {run['run']: run for run in stored_runs}
    groups: list[_Record] = []
    runs: list[_Record] = []
    problems: list[str] = []
    # Runs of a baseline that read the same data, whose widths differ, have the same counts.
    counted: dict[tuple, _Record] = {}
    for run, results in _finished_runs(path, files):
        if imports is not None:
            _require_named(path, run, imports)
        name = run['run']
        config: Config = from_json(Config, run['config'])
        try:
            if name not in group_by_run or not is_current(group_by_run[name]):
                key = (
                    config.data,
                    config.model.context,
                    config.train.num_steps,
                    config.trials.seeds[0],
                )
                if key not in counted:
                    counted[key] = _group(config, results[0])
                group_by_run[name] = {
                    'run': name,
                    'size': run['size'],
                    'corpus': run['corpus'],
                    'longer': run['control'] == LONGER,
                    **counted[key],
                }
            is_measured = measured_by_run.get(name, {}).get('trials') is not None
            if run['stage'] == VERDICT and not is_measured:
                arm_key = {field: run[field] for field in records.ARM_KEY}
                measured_by_run[name] = {
                    'run': name,
                    **arm_key,
                    **_run(path, run, config, results),
                }
        except ConfigError as error:  # then what is recorded is kept
            problem = f'{run["size"]}, {run["corpus"]}: {error}'
            if problem not in problems:
                problems.append(problem)
        if name in group_by_run:
            groups.append(group_by_run[name])
        if name in measured_by_run:
            runs.append(measured_by_run[name])
    has_changed = any(group not in stored_groups for group in groups)
    has_changed |= any(run not in stored_runs for run in runs)
    if has_changed:
        start = describe_start()
        content = {
            'recorded': start['started'],
            'start': {key: start[key] for key in records.START},
            'groups': groups,
            'runs': runs,
        }
        records.write_json(path / YARDSTICKS, content)
    return problems


def _require_named(path: Path, run: _Record, imports: Collection[str]) -> None:
    """Raises ConfigError for an import path that the plan, or the run's own config, names alone."""
    remedy = 'if you trust it, give --imports={}'
    require_named(run['config'], imports, path / 'plan.jsonl', remedy)
    file = path / run['directory'] / 'config.json'
    if file.exists():
        config = records.read_json(file, records.CONFIG)['config']
        require_named(config, imports, file, remedy)


def _finished_runs(path: Path, files: Files) -> Iterator[tuple[_Record, list[_Record]]]:
    """The finished runs of the baseline but those of screening, each with its results.

    Controls at the baseline's shape are no baseline; the baseline trained longer is one.
    """
    baseline = records.read_json(path / 'study.json', {'baseline': str})['baseline']
    results_by_run: dict[str, list[_Record]] = {}
    for result in records.read_lines(files / 'results.jsonl', {}, take=records.check_result):
        results_by_run.setdefault(result['run'], []).append(result)
    schema = records.ARM_KEY | {
        'run': str,
        'stage': str,
        'trials': int,
        'config': dict,
        'directory': str,
    }
    for run in records.read_lines(files / 'plan.jsonl', schema, take=stored.check_run_directory):
        results = results_by_run.get(run['run'], [])
        is_baseline = run['variant'] == baseline and run['control'] != SAME_SHAPE
        is_finished = any(result['status'] == records.FINISHED for result in results)
        if is_baseline and is_finished and run['stage'] != SCREENING:
            yield run, results


def record_finished(directory: Path) -> None:
    """Records the yardsticks of a study whose training is finished; logs what it could not."""
    with waiting(directory.name, 'recording yardsticks'):
        problems = record(directory)
    command = f'python -m experiments.report --study={shlex.quote(str(directory))} --yardsticks'
    for problem in problems:
        log.warning(
            'yardsticks of %s not recorded: %s; %s records them', directory.name, problem, command
        )


def _group(config: Config, result: Mapping[str, Any]) -> _Record:
    """The tokens that models of this config saw, and what they have to beat.

    `result` is of a trial of the config. ConfigError where the data on this machine are others.
    """
    rows = _same_rows(config, result)
    measured = rows.yardsticks(config)
    group: _Record = {
        'seen': config.train.num_steps * config.train.batch_size * config.model.context,
        'tokens': measured.tokens,
        'losses': dict(measured.losses),
        'task': measured.task,
    }
    if measured.bleu is not None:
        group['bleu'] = dict(measured.bleu)
    group['definition'] = definition_of(measured.task)
    return group


def _same_rows(config: Config, result: Mapping[str, Any]) -> Rows:
    """The rows of a config; ConfigError if they differ from those of the result."""
    with as_recorded(*names_in(result['data'])):
        rows = rows_of(config)
    identity = records.to_jsonable(rows.identity())
    for name, value in identity.items():
        if result['data'].get(name) != value:
            raise ConfigError(
                f'data.name={config.data.name!r} gives other data on this machine than the study '
                'was trained on; record its yardsticks where the same versions are installed'
            )
    return rows


def _run(path: Path, run: _Record, config: Config, results: list[_Record]) -> _Record:
    """The trials of a verdict run of the baseline, {trials, why}.

    `path` is the directory of the study. Trials are None, and `why` says why, where the run has no
    checkpoint of its results.
    """
    directory = path / run['directory']
    try:
        if not (directory / 'checkpoints').is_dir():
            raise CheckpointError('it has no checkpoint')
        _, _, state = load_stack(directory)
    except (ConfigError, CheckpointError) as error:
        return {'trials': None, 'why': str(error)}
    if len(results) != run['trials']:
        return {'trials': None, 'why': 'results of its trials are missing'}
    rows = _same_rows(config, results[0])
    log.info('measuring the loss by position of %s', run['directory'])
    loss_field = f'{PREFIXES[rows.splits[-1]]}_loss'
    trials = []
    for result, measured in zip(results, _trials(config, rows, state['params']), strict=True):
        if result['status'] != records.FINISHED:
            continue
        loss = measured['loss']
        logged = result[loss_field]
        if not np.isclose(loss, logged, atol=ROUNDING):
            why = f'its checkpoint has a loss of {loss:.4f}, its result {logged:.4f}'
            return {'trials': None, 'why': why}
        trials.append({'seed': result['trial']['seed'], **measured})
    return {'trials': trials, 'why': None}


def _trials(config: Config, rows: Rows, params: dict) -> Iterator[_Record]:
    """Losses of each of the X stacked trials on the last split; None where not defined."""
    own_losses = _by_position(config, rows, params)

    def losses_by_position(other: Rows) -> tuple[np.ndarray, np.ndarray]:
        return own_losses if other is rows else _by_position(config, other, params)

    nats_XT, weights_T = own_losses
    loss_X = nats_XT.sum(1) / weights_T.sum()
    context_losses = rows.context_losses(losses_by_position)
    for x, loss in enumerate(loss_X):
        trial = {'early': None, 'late': None, 'shuffled': None, 'loss': float(loss)}
        for name, value_X in context_losses.items():
            trial[name] = float(value_X[x])
        yield trial


def _by_position(config: Config, rows: Rows, params: dict) -> tuple[np.ndarray, np.ndarray]:
    """The summed loss of each trial by position in the rows of the last split, and the weights.

    [X, T] and [T]. `params` are those of X stacked trials.
    """
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    measure = stack_program(config, 'map', mesh, _weighted_nats)
    batches = pipeline.eval_batches(
        rows,
        rows.splits[-1],
        batch_size=config.train.batch_size,
        max_rows=config.data.eval_sequences,
    )
    nats = []
    weights = []
    for batch in batches:
        nats_XBT = measure(params, batch)['nats_BT']
        nats.append(np.sum(nats_XBT, axis=1, dtype=float))
        weights.append(np.sum(batch['loss_weights_BT'], axis=0, dtype=float))
    return np.sum(nats, axis=0), np.sum(weights, axis=0)


def _weighted_nats(config: Config, params: dict, batch: Batch) -> dict[str, jax.Array]:
    """Loss weight times cross-entropy of every target of one trial."""

    def nats(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
        return {'nats_BT': cross_entropy(logits_BTV, targets_BT)}

    measured = step.on_targets(config, params, batch, nats)
    return {'nats_BT': measured['nats_BT'] * batch['loss_weights_BT']}

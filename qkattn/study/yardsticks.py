"""Yardsticks of a study: what the baseline has to beat before arms are compared with it.

Yardsticks are recorded in yardsticks.json once training is finished. The file has two lists:

    groups   One entry for each size, corpus and length of training. It has the task, the number of
             tokens that the models were trained on, and the measurements of `Rows.yardsticks`, such
             as n-gram losses in nats per token. `definition` is the version of the measurements
             (`yardstick_definitions`).
    runs     One entry for each verdict run of the baseline. It has the loss and the measurements of
             `Rows.context_losses` for each trial, computed from the checkpoint. For example, these
             are a language model's losses early and late in the context. If they could not be
             measured, the entry says why.
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
from qkattn.data.tasks.task_registry import rows_of, yardsticks_of
from qkattn.data.tokenizers.vocabulary import names_in, use_recorded_tokenizers
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

# The largest difference between a loss measured from a checkpoint and the logged loss.
ROUNDING = 1e-3

log = logging.getLogger(__name__)

_Record = dict[str, Any]


def record(directory: str | Path, imports: Collection[str] | None = None) -> list[str]:
    """Records the yardsticks of a study in yardsticks.json in its directory.

    Entries that the file already has are kept, unless their definition has changed.

    Args:
        directory: The directory of the study.
        imports: The import paths that configs of the study may name. None allows any path, for a
            study that was trained by this process.

    Returns:
        A sentence for each size and corpus whose yardsticks could not be measured.

    Raises:
        ConfigError: The directory lacks the files of a study.
    """
    if jax.process_count() > 1:  # all processes would have to read the checkpoints together
        return ['the job has several processes']
    path = absolute(directory)
    files = stored.open_files(path)
    stored_groups, stored_runs = _stored_entries(path)
    # The entries of each list by the id of their run.
    group_by_id = {group['run']: group for group in stored_groups}
    run_by_id = {run['run']: run for run in stored_runs}

    planned_and_results = list(_finished_runs(path, files))
    if imports is not None:
        _require_allowed_imports(path, [planned for planned, _ in planned_and_results], imports)
    groups: list[_Record] = []
    runs: list[_Record] = []
    problems: list[str] = []
    measured_by_data: dict[tuple, _Record] = {}  # shared by runs on the same data
    for planned, results in planned_and_results:
        run_id = planned['run']
        config: Config = from_json(Config, planned['config'])
        try:
            has_current_group = run_id in group_by_id and is_current(group_by_id[run_id])
            if not has_current_group:
                group_by_id[run_id] = _group_entry(planned, config, results[0], measured_by_data)
            is_measured = run_by_id.get(run_id, {}).get('trials') is not None
            if planned['stage'] == VERDICT and not is_measured:
                run_by_id[run_id] = _run_entry(path, planned, config, results)
        except ConfigError as error:
            problem = f'{planned["size"]}, {planned["corpus"]}: {error}'
            if problem not in problems:
                problems.append(problem)

        if run_id in group_by_id:
            groups.append(group_by_id[run_id])
        if run_id in run_by_id:
            runs.append(run_by_id[run_id])

    has_new_groups = any(group not in stored_groups for group in groups)
    has_new_runs = any(run not in stored_runs for run in runs)
    if has_new_groups or has_new_runs:
        _write(path, groups, runs)
    return problems


def _write(path: Path, groups: list[_Record], runs: list[_Record]) -> None:
    """Writes yardsticks.json to the directory of a study."""
    start = describe_start()  # the machine and versions of this process
    content = {
        'recorded': start['started'],
        'start': {field: start[field] for field in records.START},
        'groups': groups,
        'runs': runs,
    }
    records.write_json(path / YARDSTICKS, content)


def _group_entry(
    planned: _Record,
    config: Config,
    result: Mapping[str, Any],
    measured_by_data: dict[tuple, _Record],
) -> _Record:
    """Returns the entry of a run in the list `groups` of yardsticks.json.

    Runs with models of different sizes may read the same data, which is measured once.

    Args:
        planned: The run's line of plan.jsonl.
        config: The config of the run.
        result: The result of one of its trials.
        measured_by_data: The earlier measurements, by the data read. A further one is added.

    Raises:
        ConfigError: This machine does not have the same data.
    """
    # The settings that determine the data read.
    data_read = (
        config.data,
        config.model.kind,
        config.model.context,
        config.model.source_context,
        config.train.num_steps,
        config.train.batch_size,
        config.trials.seeds[0],
    )
    if data_read not in measured_by_data:
        measured_by_data[data_read] = _measure_group(config, result)
    return {
        'run': planned['run'],
        'size': planned['size'],
        'corpus': planned['corpus'],
        'longer': planned['control'] == LONGER,
        **measured_by_data[data_read],
    }


def _run_entry(path: Path, planned: _Record, config: Config, results: list[_Record]) -> _Record:
    """Returns the entry of a verdict run in the list `runs` of yardsticks.json.

    Args:
        path: The directory of the study.
        planned: The run's line of plan.jsonl.
        config: The config of the run.
        results: The results of the trials of the run.

    Raises:
        ConfigError: This machine does not have the same data.
    """
    arm_key = {field: planned[field] for field in records.ARM_KEY}
    measured = _measure_run(path, planned, config, results)
    return {'run': planned['run'], **arm_key, **measured}


def _stored_entries(path: Path) -> tuple[list[_Record], list[_Record]]:
    """Returns the `groups` and `runs` of yardsticks.json; empty lists without this file."""
    if not (path / YARDSTICKS).exists():
        return [], []
    schema = {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]}
    content = records.read_json(path / YARDSTICKS, schema)
    return content['groups'], content['runs']


def _require_allowed_imports(
    path: Path, runs: Collection[_Record], imports: Collection[str]
) -> None:
    """Raises ConfigError if configs of the runs name import paths that are not in `imports`.

    Args:
        path: The directory of the study.
        runs: The runs' lines of plan.jsonl.
        imports: The allowed import paths.
    """
    configs = []
    for run in runs:
        configs.append(run['config'])
        file = path / run['directory'] / 'config.json'  # read by `_measure_run`
        if file.exists():
            configs.append(records.read_json(file, records.CONFIG)['config'])
    advice = 'if you trust it, give --imports={}'  # {} becomes the import paths
    require_named(configs, imports, path, advice)


def _finished_runs(path: Path, files: Files) -> Iterator[tuple[_Record, list[_Record]]]:
    """Yields the baseline's runs that have a finished trial, except screening runs.

    Args:
        path: The directory of the study.
        files: The files of the study, from `stored.open_files`.

    Yields:
        The run's line of plan.jsonl, and its lines of results.jsonl.
    """
    study = records.read_json(path / 'study.json', {'baseline': str})
    results_by_id: dict[str, list[_Record]] = {}
    for result in records.read_lines(files / 'results.jsonl', {}, take=records.check_result):
        results_by_id.setdefault(result['run'], []).append(result)

    schema = records.ARM_KEY | {
        'run': str,
        'stage': str,
        'trials': int,
        'config': dict,
        'directory': str,
    }
    for run in records.read_lines(files / 'plan.jsonl', schema, take=stored.check_run_directory):
        is_baseline = run['variant'] == study['baseline'] and run['control'] != SAME_SHAPE
        if run['stage'] == SCREENING or not is_baseline:
            continue
        results = results_by_id.get(run['run'], [])
        if any(result['status'] == records.FINISHED for result in results):
            yield run, results


def record_finished(directory: Path) -> None:
    """Records the yardsticks of a study, and logs a warning for each yardstick that it cannot."""
    with waiting(directory.name, 'recording yardsticks'):
        problems = record(directory)
    command = f'python -m experiments.report --study={shlex.quote(str(directory))} --yardsticks'
    for problem in problems:
        log.warning(
            'yardsticks of %s not recorded: %s; %s records them', directory.name, problem, command
        )


def _measure_group(config: Config, result: Mapping[str, Any]) -> _Record:
    """Measures what a trained baseline has to beat, such as n-gram losses.

    Args:
        config: The config of a run.
        result: The result of one of its trials, which identifies the training data.

    Returns:
        An entry of `groups` in yardsticks.json, without the fields that name the run.

    Raises:
        ConfigError: This machine does not have the same data.
    """
    rows = _open_same_data(config, result)
    measured = yardsticks_of(config, rows)
    tokens_seen = config.train.num_steps * config.train.batch_size * config.model.context
    group: _Record = {
        'seen': tokens_seen,
        'tokens': measured.tokens,
        'losses': dict(measured.losses),
        'task': measured.task,
    }
    if measured.bleu is not None:
        group['bleu'] = dict(measured.bleu)
    group['definition'] = definition_of(measured.task)
    return group


def _open_same_data(config: Config, result: Mapping[str, Any]) -> Rows:
    """Opens the data that a trial was trained on.

    Args:
        config: The config of the run.
        result: The result of the trial. `result['data']` identifies the data.

    Raises:
        ConfigError: This machine does not have the same data.
    """
    recorded_data = result['data']
    tokenizer_names = names_in(recorded_data)
    # The names tell how the recorded tokenizers separate documents.
    with use_recorded_tokenizers(*tokenizer_names):
        rows = rows_of(config)
    data_here = records.to_jsonable(rows.identity())
    for name, value in data_here.items():
        if recorded_data.get(name) != value:
            raise ConfigError(
                f'data.name={config.data.name!r} gives other data on this machine than the study '
                'was trained on; record its yardsticks where the same versions are installed'
            )
    return rows


def _measure_run(path: Path, run: _Record, config: Config, results: list[_Record]) -> _Record:
    """Measures the losses of a verdict run again, from the checkpoint.

    Args:
        path: The directory of the study.
        run: The run's line of plan.jsonl.
        config: The config of the run.
        results: The results of the trials of the run.

    Returns:
        {'trials': [losses of each finished trial], 'why': None}, or {'trials': None, 'why': reason}
        if the losses cannot be measured or differ from the results.

    Raises:
        ConfigError: This machine does not have the same data.
    """
    directory = path / run['directory']
    if not (directory / 'checkpoints').is_dir():
        return {'trials': None, 'why': 'it has no checkpoint'}
    try:
        _, _, state = load_stack(directory)
    except (ConfigError, CheckpointError) as error:
        return {'trials': None, 'why': str(error)}
    if len(results) != run['trials']:
        return {'trials': None, 'why': 'results of its trials are missing'}

    rows = _open_same_data(config, results[0])
    log.info('measuring the loss by position of %s', run['directory'])
    measured_trials = _measure_trials(config, rows, state['params'])
    last_split = rows.splits[-1]
    loss_field = f'{PREFIXES[last_split]}_loss'  # such as 'test_loss' for the split 'test'
    trials = []
    for result, measured in zip(results, measured_trials, strict=True):
        if result['status'] != records.FINISHED:
            continue
        loss = measured['loss']
        logged_loss = result[loss_field]
        if not np.isclose(loss, logged_loss, atol=ROUNDING):
            why = f'its checkpoint has a loss of {loss:.4f}, its result {logged_loss:.4f}'
            return {'trials': None, 'why': why}
        trials.append({'seed': result['trial']['seed'], **measured})
    return {'trials': trials, 'why': None}


def _measure_trials(config: Config, rows: Rows, params: dict) -> Iterator[_Record]:
    """Yields the losses of each of the X stacked trials on the last split, in nats per token.

    For example {'early': 3.1, 'late': 2.4, 'shuffled': None, 'loss': 2.5}. 'loss' is the mean
    loss. `rows.context_losses` gives the other losses, as far as the task defines them.
    """
    nats_XT, weights_T = _losses_by_position(config, rows, params)
    loss_X = nats_XT.sum(axis=1) / weights_T.sum()

    def measure(rows_to_measure: Rows) -> tuple[np.ndarray, np.ndarray]:
        if rows_to_measure is rows:
            return nats_XT, weights_T  # measured above
        return _losses_by_position(config, rows_to_measure, params)

    context_losses = rows.context_losses(measure)  # such as {'early': [3.1, 3.2], ...}
    for x, loss in enumerate(loss_X):
        trial = {'early': None, 'late': None, 'shuffled': None, 'loss': float(loss)}
        for name, context_loss_X in context_losses.items():
            trial[name] = float(context_loss_X[x])
        yield trial


def _losses_by_position(config: Config, rows: Rows, params: dict) -> tuple[np.ndarray, np.ndarray]:
    """Measures the losses of X stacked trials at T positions, on the last split of `rows`.

    Returns:
        nats_XT: The cross-entropy times the loss weight, summed over rows.
        weights_T: The loss weight, summed over rows. The mean loss is nats_XT / weights_T.
    """
    one_device = make_mesh(MeshConfig(), jax.local_devices()[:1])
    # 'map' measures one trial after the other.
    measure = stack_program(config, 'map', one_device, _weighted_nats)
    batches = pipeline.eval_batches(
        rows,
        rows.splits[-1],
        batch_size=config.train.batch_size,
        max_rows=config.data.eval_sequences,
    )
    nats_of_batches = []
    weights_of_batches = []
    for batch in batches:
        nats_XBT = measure(params, batch)['nats_BT']  # stacked over X trials
        nats_of_batches.append(np.sum(nats_XBT, axis=1, dtype=float))
        weights_of_batches.append(np.sum(batch['loss_weights_BT'], axis=0, dtype=float))
    return np.sum(nats_of_batches, axis=0), np.sum(weights_of_batches, axis=0)


def _weighted_nats(config: Config, params: dict, batch: Batch) -> dict[str, jax.Array]:
    """Returns the loss weight times the cross-entropy of every target, for one trial."""

    def nats(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
        return {'nats_BT': cross_entropy(logits_BTV, targets_BT)}

    measured = step.measure_on_targets(config, params, batch, nats)
    return {'nats_BT': measured['nats_BT'] * batch['loss_weights_BT']}

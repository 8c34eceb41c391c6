"""Yardsticks of a study: what its baseline has to beat before arms are compared.

They are recorded in yardsticks.json once training is finished, from the data that the models saw
and from those checkpoints of the baseline's verdict runs that still exist. The file has two lists:

    groups   One entry for each size, corpus and length of training. It holds the task, the number
             of tokens that the models saw, and what `Rows.yardsticks` measures: the number of
             tokens counted and, for each evaluation split, the losses of counts of these tokens
             (nats/token, by name). A translation task adds the BLEU of IBM model 1 on the sentences
             that the models translate. The entry also names the version of its definition
             (`yardstick_definitions`).
    runs     One entry for each verdict run of the baseline. It holds, for each trial, the loss and
             `Rows.context_losses`: a language model's loss at position 4 ('early') and over the
             last half of the context ('late'), or a translator's loss with shuffled sources. If
             these could not be measured, it says why.
"""

import logging
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, MeshConfig, from_json
from qkattn.config.calls import call_with_config_errors
from qkattn.config.imports import require_named
from qkattn.data import pipeline
from qkattn.data.tasks.rows import Batch, Rows, Yardsticks
from qkattn.data.tasks.task_registry import rows_of
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

# A loss measured from a checkpoint, perhaps on another machine, may differ from the logged loss by
# this much.
ROUNDING = 1e-3

log = logging.getLogger(__name__)

_Record = dict[str, Any]


def record(directory: str | Path, imports: Collection[str] | None = None) -> list[str]:
    """Records the yardsticks of a study in yardsticks.json in its directory.

    Entries that the file already has are kept, except groups of an earlier definition, which are
    recorded again.

    Args:
        directory: The directory of the study.
        imports: The import paths that configs of the study may name. None allows any path; pass it
            only for a study that this process has trained.

    Returns:
        One sentence for each size and corpus whose yardsticks could not be computed, with the
        reason.

    Raises:
        ConfigError: The directory lacks the files of a study.
    """
    if jax.process_count() > 1:  # all processes would have to read the checkpoints together
        return ['the job has several processes']
    path = absolute(directory)
    files = stored.open_files(path)
    stored_groups, stored_runs = _stored_entries(path)
    group_by_run = {group['run']: group for group in stored_groups}
    measured_by_run = {run['run']: run for run in stored_runs}

    groups: list[_Record] = []
    runs: list[_Record] = []
    problems: list[str] = []
    # Baselines of different widths that read the same data share a group.
    group_of_data: dict[tuple, _Record] = {}
    for run, results in _finished_runs(path, files):
        if imports is not None:
            _require_allowed_imports(path, run, imports)
        name = run['run']
        config: Config = from_json(Config, run['config'])
        try:
            if name not in group_by_run or not is_current(group_by_run[name]):
                data_read = (
                    config.data,
                    config.model.context,
                    config.train.num_steps,
                    config.trials.seeds[0],
                )
                if data_read not in group_of_data:
                    group_of_data[data_read] = _measure_group(config, results[0])
                group_by_run[name] = {
                    'run': name,
                    'size': run['size'],
                    'corpus': run['corpus'],
                    'longer': run['control'] == LONGER,
                    **group_of_data[data_read],
                }

            is_measured = measured_by_run.get(name, {}).get('trials') is not None
            if run['stage'] == VERDICT and not is_measured:
                arm_key = {field: run[field] for field in records.ARM_KEY}
                measured_by_run[name] = {
                    'run': name,
                    **arm_key,
                    **_measure_run(path, run, config, results),
                }
        except ConfigError as error:
            # An entry that the file already has is kept below.
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


def _stored_entries(path: Path) -> tuple[list[_Record], list[_Record]]:
    """Returns the `groups` and `runs` of the yardsticks.json of a study; [] without this file."""
    if not (path / YARDSTICKS).exists():
        return [], []
    schema = {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]}
    content = records.read_json(path / YARDSTICKS, schema)
    return content['groups'], content['runs']


def _require_allowed_imports(path: Path, run: _Record, imports: Collection[str]) -> None:
    """Raises ConfigError if a config of the run names an import path that is not in `imports`.

    Both the config in the plan and the run's own config.json are checked. `path` is the directory
    of the study.
    """
    advice = 'if you trust it, give --imports={}'  # {} stands for the import path
    require_named(run['config'], imports, path / 'plan.jsonl', advice)
    file = path / run['directory'] / 'config.json'
    if file.exists():
        config = records.read_json(file, records.CONFIG)['config']
        require_named(config, imports, file, advice)


def _finished_runs(path: Path, files: Files) -> Iterator[tuple[_Record, list[_Record]]]:
    """Yields the finished runs of the baseline, without screening runs, each with its results.

    A run is finished if at least one of its trials is. The baseline that was trained longer counts
    as well. Same-shape controls are no baselines.

    Args:
        path: The directory of the study.
        files: The files of the study, which may be in an archive: `files / name`.

    Yields:
        The run's line of plan.jsonl, and its lines of results.jsonl.
    """
    study = records.read_json(path / 'study.json', {'baseline': str})
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
        if run['stage'] == SCREENING:
            continue
        if run['variant'] != study['baseline'] or run['control'] == SAME_SHAPE:
            continue
        results = results_by_run.get(run['run'], [])
        if any(result['status'] == records.FINISHED for result in results):
            yield run, results


def record_finished(directory: Path) -> None:
    """Records the yardsticks of a finished study. Logs a warning for each that it cannot record."""
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
    measured = _measure_yardsticks(config, rows)
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


def _measure_yardsticks(config: Config, rows: Rows) -> Yardsticks:
    """Measures the yardsticks of a task.

    Raises ConfigError if a task from outside the package fails, or returns something else than
    Yardsticks with losses by prefix of a split.
    """
    name = config.data.task
    if name is None or ':' not in name:
        return rows.yardsticks(config)
    measured = call_with_config_errors('data.task', name, lambda: rows.yardsticks(config))
    if not isinstance(measured, Yardsticks):
        raise ConfigError(
            f'yardsticks of data.task={name!r} must return Yardsticks, not {measured!r:.80}'
        )
    valid = [PREFIXES[split] for split in rows.splits[1:]]  # the first one is 'train'
    for prefix in measured.losses:
        if prefix not in valid:
            raise ConfigError(
                f'yardsticks of data.task={name!r} have losses of {prefix!r}; the prefixes of '
                f'splits are {", ".join(valid)}'
            )
    return measured


def _open_same_data(config: Config, result: Mapping[str, Any]) -> Rows:
    """Opens the data that a trial was trained on, from its config and its result.

    Raises ConfigError if this machine has other data.
    """
    # The result has the names of the tokenizers. A tokenizer file may give two tokenizers, and the
    # name says which of them the trial had.
    tokenizer_names = names_in(result['data'])
    with use_recorded_tokenizers(*tokenizer_names):
        rows = rows_of(config)
    identity = records.to_jsonable(rows.identity())
    for name, value in identity.items():
        if result['data'].get(name) != value:
            raise ConfigError(
                f'data.name={config.data.name!r} gives other data on this machine than the study '
                'was trained on; record its yardsticks where the same versions are installed'
            )
    return rows


def _measure_run(path: Path, run: _Record, config: Config, results: list[_Record]) -> _Record:
    """Measures the losses of a verdict run of the baseline again, from its checkpoint.

    Args:
        path: The directory of the study.
        run: The run's line of plan.jsonl.
        config: The config of the run.
        results: The results of its trials.

    Returns:
        {'trials': [losses of a finished trial, ...], 'why': None}. If the losses cannot be measured
        or are not those of the results, {'trials': None, 'why': the reason}.

    Raises:
        ConfigError: This machine has other data than the run read.
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
    logged_field = f'{PREFIXES[rows.splits[-1]]}_loss'  # such as 'test_loss'
    trials = []
    for result, measured in zip(results, measured_trials, strict=True):
        if result['status'] != records.FINISHED:
            continue
        loss = measured['loss']
        logged_loss = result[logged_field]
        if not np.isclose(loss, logged_loss, atol=ROUNDING):
            why = f'its checkpoint has a loss of {loss:.4f}, its result {logged_loss:.4f}'
            return {'trials': None, 'why': why}
        trials.append({'seed': result['trial']['seed'], **measured})
    return {'trials': trials, 'why': None}


def _measure_trials(config: Config, rows: Rows, params: dict) -> Iterator[_Record]:
    """Yields the losses of each of the X stacked trials on the last split, in nats per token.

    For example {'early': 3.1, 'late': 2.4, 'shuffled': None, 'loss': 2.5}. The mean loss is 'loss'.
    The task may define the others (`Rows.context_losses`): the losses early and late in the
    context, and the loss with shuffled source sentences.
    """
    nats_XT, weights_T = _losses_by_position(config, rows, params)
    loss_X = nats_XT.sum(1) / weights_T.sum()

    def measure(task_rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Measures the rows that the task needs: `rows`, or rows with shuffled sources."""
        if task_rows is rows:
            return nats_XT, weights_T  # measured already
        return _losses_by_position(config, task_rows, params)

    context_losses = rows.context_losses(measure)
    for x, loss in enumerate(loss_X):
        trial = {'early': None, 'late': None, 'shuffled': None, 'loss': float(loss)}
        for name, value_X in context_losses.items():
            trial[name] = float(value_X[x])
        yield trial


def _losses_by_position(config: Config, rows: Rows, params: dict) -> tuple[np.ndarray, np.ndarray]:
    """Measures the losses of X stacked trials at T positions, on the last split of `rows`.

    Returns:
        nats_XT: the cross-entropy times the loss weight, summed over rows.
        weights_T: the loss weight, summed over rows. nats_XT / weights_T is the mean loss.
    """
    # One device measures one trial after the other ('map').
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    measure = stack_program(config, 'map', mesh, _weighted_nats)
    batches = pipeline.eval_batches(
        rows,
        rows.splits[-1],
        batch_size=config.train.batch_size,
        max_rows=config.data.eval_sequences,
    )
    # Sum over the B rows of each batch, then over all batches.
    nats = []
    weights = []
    for batch in batches:
        nats_XBT = measure(params, batch)['nats_BT']  # with a leading axis of trials
        nats.append(np.sum(nats_XBT, axis=1, dtype=float))
        weights.append(np.sum(batch['loss_weights_BT'], axis=0, dtype=float))
    return np.sum(nats, axis=0), np.sum(weights, axis=0)


def _weighted_nats(config: Config, params: dict, batch: Batch) -> dict[str, jax.Array]:
    """Returns the loss weight times the cross-entropy of every target, for one trial."""

    def nats(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
        return {'nats_BT': cross_entropy(logits_BTV, targets_BT)}

    measured = step.measure_on_targets(config, params, batch, nats)
    return {'nats_BT': measured['nats_BT'] * batch['loss_weights_BT']}

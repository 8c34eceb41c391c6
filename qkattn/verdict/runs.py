"""Reads the runs of a study: their plan, their results and the files in their directories."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qkattn.config import fingerprint_of
from qkattn.errors import RunDirectoryError
from qkattn.metrics import CORPORA, PREFIXES, Metric, logged_fields
from qkattn.storage import records
from qkattn.storage.files import Files
from qkattn.storage.ledger import left_out_documents
from qkattn.storage.metrics_log import read_metrics
from qkattn.study.arm_key import ArmKey
from qkattn.study.stored import check_run_directory
from qkattn.study.tuning import MODEL_KNOBS, TRIAL_KNOBS, Settings

# A loss may differ from the sum over its documents by this fraction, because the numbers are added
# in another order.
_ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """The losses of one trial on the C documents of a split.

    The loss on the split is nats_C.sum() / tokens_C.sum().
    """

    names: tuple[str, ...]
    tokens_C: np.ndarray  # number of targets in each document
    nats_C: np.ndarray  # sum of losses over the targets of each document

    def has_targets_of(self, other: 'Documents') -> bool:
        """Returns whether both are losses on the same targets of the same documents."""
        return self.names == other.names and np.array_equal(self.tokens_C, other.tokens_C)


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A planned run with its results."""

    name: str
    key: ArmKey  # the arm that the run trains
    stage: Literal['screening', 'verdict', 'single']
    directory: str  # relative to the study
    num_trials: int  # as planned
    target: float | None  # the baseline's cost; None if arms are not matched
    residual: float | None  # (cost - target) / target; None if arms are not matched
    config: Mapping[str, Any]  # the resolved config as JSON
    trials: tuple['Trial', ...] = ()  # the trials that have results

    @property
    def num_steps(self) -> int:
        return self.config['train']['num_steps']

    @property
    def seeds(self) -> list[int]:
        return self.config['trials']['seeds']


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trained model: a line of results.jsonl."""

    run: TrainedRun  # with empty `trials`
    trial: Mapping[str, Any]  # seed, learning rate and weight decay
    settings: Settings  # one value for each of `tuning.KNOBS`
    status: str
    num_steps: int
    num_tokens: int
    parameters: Mapping[str, int]
    config: Mapping[str, Any]
    flops_per_token: float
    cache_floats_per_token: float | None
    declared_metrics: Mapping[str, Metric]  # built-in and imported metrics, by name
    metrics: Mapping[str, Any]  # such as 'val_loss'; None if not measured or diverged
    train_seconds: float | None  # for all trials of the run together
    tokens_per_second: float | None  # for all trials of the run together
    lifting: str | None
    data: Mapping[str, Any]
    eval_tokens: int | None
    provenance: Mapping[str, Any]
    eval_rows: int | None = None
    test_tokens: int | None = None
    # Losses by document, by split ('val', 'test').
    documents: Mapping[str, Documents] = dataclasses.field(default_factory=dict)
    # Validation loss by step. Empty if results of the run are missing or its log is damaged.
    evaluations: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.trial['seed']

    @property
    def learning_rate(self) -> float:
        return self.trial['learning_rate']

    @property
    def corpora(self) -> tuple[str, ...]:
        """The entries of data.evaluate."""
        return tuple(self.data.get(CORPORA, ()))

    @property
    def finished(self) -> bool:
        return self.status == records.FINISHED

    @property
    def val_loss(self) -> float | None:
        """The validation loss, nats/token; None if the trial diverged."""
        return self.metrics['val_loss']


# The settings that are read from the config of a planned run, with their types.
_CONFIG = {
    'model': dict.fromkeys(MODEL_KNOBS, float),
    'optimizer': {'schedule': str, 'final_fraction': float},
    'train': {'num_steps': int},
    'trials': {'seeds': tuple[int, ...]},
}


def parse_arm_key(record: Any) -> ArmKey:
    """Reads an arm's key from the fields variant, size, corpus and control of a JSON object.

    Raises:
        ValueError: A field is missing or has the wrong type.
    """
    records.check(record, records.ARM_KEY)  # the types of these four fields
    fields = {name: record[name] for name in records.ARM_KEY}
    return ArmKey(**fields)


def parse_run(record: Any) -> TrainedRun:
    """Reads a planned run from a JSON object, a line of plan.jsonl.

    Raises:
        ValueError: A field is invalid. The message names the field.
    """
    records.check(record, {'run': str, 'directory': str, 'trials': int, 'config': _CONFIG})
    check_run_directory(record)
    if record['trials'] < 1:
        raise ValueError(f"field 'trials' is {record['trials']}, expected 1 or more")
    # The other fields of the run are read from the record.
    return records.read_dataclass(
        TrainedRun,
        record,
        name=record['run'],
        key=parse_arm_key(record),
        num_trials=record['trials'],
        trials=(),  # they are in results.jsonl
    )


def parse_trial(record: Any, run: TrainedRun) -> Trial:
    """Reads a trial of `run` from a JSON object, a line of results.jsonl.

    The fields `documents` and `evaluations` stay empty, as their content is in other files
    (`with_run_files`).

    Raises:
        ValueError: A field is invalid or does not fit the run. The message names the field.
    """
    records.check_result(record)
    _check_planned(record, run)
    # Tunable settings (knobs), such as the learning rate, belong to the trial or to the model.
    trial_settings = [record['trial'][knob] for knob in TRIAL_KNOBS]
    model_settings = [run.config['model'][knob] for knob in MODEL_KNOBS]
    declared_metrics = records.metrics_of(record)
    metrics = {field: record.get(field) for field in records.metric_fields(record)}
    # The other fields of the trial are read from the record.
    return records.read_dataclass(
        Trial,
        record,
        run=run,
        settings=(*trial_settings, *model_settings),
        declared_metrics=declared_metrics,
        metrics=metrics,
        documents={},
        evaluations={},
    )


def _check_planned(result: Mapping[str, Any], run: TrainedRun) -> None:
    """Raises ValueError if a result has another config, arm, seed or settings than its run."""
    records.check_config_hash(result, run.name)
    key = parse_arm_key(result)
    if key != run.key:
        raise ValueError(f'run {run.name!r} is planned for {run.key}, but its result is of {key}')
    seed = result['trial']['seed']
    if seed not in run.seeds:
        raise ValueError(f'seed {seed} is not one of run {run.name!r}, which has {run.seeds}')
    for knob in TRIAL_KNOBS:  # such as 'learning_rate'
        value = result['trial'][knob]
        planned_values = run.config['trials'].get(f'{knob}s')  # such as trials.learning_rates
        if planned_values is not None and value not in planned_values:
            raise ValueError(
                f'{knob} {value} is not one of run {run.name!r}, which has {planned_values}'
            )


def with_run_files(run: TrainedRun, study: Files, problems: list[str]) -> TrainedRun:
    """Adds to a run its log and its losses by document, from the files in its directory.

    A run without results of all its trials stays as it is. Other files of the directory are only
    checked.

    Args:
        run: The run, with its trials.
        study: The files of the study.
        problems: Gets one more sentence for each bad file. The content of a bad file is not added
            to the run.
    """
    problems.extend(_problems_of_other_files(run, study))

    directory = study / run.directory
    documents_json = directory / 'documents.json'  # written at the end of a run
    if not run.trials and documents_json.exists():
        problems.append(f'results.jsonl lacks the results of {run.directory}, which has ended.')
    has_every_result = len(run.trials) == run.num_trials
    if not has_every_result:
        return run

    try:
        log_records = read_metrics(directory / 'metrics.jsonl')
        run = _with_log(run, log_records)
    except ValueError as error:
        problems.append(_describe_bad_file(run, study, 'metrics.jsonl', error))

    # Stored studies may keep only the SHA-256 of documents.json.
    sha256_of_left_out = left_out_documents(directory)  # None if the file itself is kept
    if sha256_of_left_out:
        return run
    try:
        losses = records.parse_file(documents_json, {'validation': records.DOCUMENTS})
        run = _with_documents(run, losses)
    except ValueError as error:
        problems.append(_describe_bad_file(run, study, 'documents.json', error))
    return run


def _problems_of_other_files(run: TrainedRun, study: Files) -> list[str]:
    """Returns a sentence for each bad file of a run among those that reports do not use.

    These are config.json, provenance.json and result.json. `study` has the files of the study.
    """
    problems = []
    for file_name, schema in records.RUN_FILES.items():
        path = study / run.directory / file_name
        try:
            if path.exists():
                content = records.parse_file(path, schema)
                _check_run_file(file_name, content, run)
        except ValueError as error:
            problems.append(_describe_bad_file(run, study, file_name, error))
    return problems


def _describe_bad_file(run: TrainedRun, study: Files, name: str, error: ValueError) -> str:
    """Returns a sentence that says why a file of a run could not be read.

    `name` is the name of the file, and `error` was raised while it was read.
    """
    path = study / run.directory / name
    if not path.exists():
        return f'{run.directory} has results, but {name} is missing.'
    if isinstance(error, RunDirectoryError):
        return f'{error}.'  # the error names the file
    return f'{run.directory}/{name} is damaged: {error}.'


def _check_run_file(name: str, content: Any, run: TrainedRun) -> None:
    """Raises ValueError if the content of a file is that of another run.

    The name of a run is the hash of its config, which result.json and config.json contain.
    """
    if name == 'result.json':
        for result in content:  # one for each trial
            records.check_config_hash(result, run.name)
    if name == 'config.json':
        if content['hash'] != run.name:
            raise ValueError(
                f"field 'hash' is {content['hash']!r}, expected {run.name!r}: it is the config of "
                'another run'
            )
        if fingerprint_of(content['config']) != content['hash']:
            raise ValueError('its hash does not match its config')


def _with_documents(run: TrainedRun, record: Any) -> TrainedRun:
    """Adds to each trial of a run its losses by document.

    Args:
        run: The run.
        record: The content of documents.json.

    Raises:
        ValueError: The losses do not agree with the results of the run.
    """
    # For each trial, its losses by document on 'val' and 'test'.
    documents_by_split: list[dict[str, Documents]] = [{} for _ in run.trials]
    for split, prefix in PREFIXES.items():  # ('validation', 'val'), then ('test', 'test')
        losses = [trial.metrics[f'{prefix}_loss'] for trial in run.trials]
        if split in record:
            documents_by_trial = _documents_of_split(record[split], split, losses)
            for trial_index, documents in enumerate(documents_by_trial):
                if documents is not None:  # None for a diverged trial
                    documents_by_split[trial_index][prefix] = documents
        elif any(loss is not None for loss in losses):
            raise ValueError(f'split {split!r} is missing, but its results have losses on it')
    return _with_each(run, 'documents', documents_by_split)


def _documents_of_split(
    record: Any, split: str, losses: Sequence[float | None]
) -> list[Documents | None]:
    """Reads the losses by document of each trial on one split.

    Args:
        record: The split's entry in documents.json, with names ('documents'), numbers of targets
            ('tokens') and summed losses of each trial ('nats').
        split: The name of the split.
        losses: The loss of each trial in the results, nats/token; None for a diverged trial.

    Returns:
        One entry for each trial; None for a diverged trial.

    Raises:
        ValueError: The record is malformed or does not agree with `losses`.
    """
    records.check(record, records.DOCUMENTS)
    names = tuple(record['documents'])
    tokens_C = np.array(record['tokens'])
    nats_by_trial = [None if row is None else np.array(row, float) for row in record['nats']]
    has_every_trial = len(nats_by_trial) == len(losses)
    if not has_every_trial or not _fit_together(names, tokens_C, nats_by_trial):
        raise ValueError(
            f'split {split!r} must have documents of different names, each with targets and '
            f'one number for each of {len(losses)} trials'
        )

    documents_by_trial: list[Documents | None] = []
    for trial_index, (nats_C, loss) in enumerate(zip(nats_by_trial, losses, strict=True)):
        # A diverged trial has NaN on both sides, which compare equal here.
        mean = math.nan if nats_C is None else float(nats_C.sum() / tokens_C.sum())
        expected = math.nan if loss is None else loss
        if not np.isclose(mean, expected, rtol=_ROUNDING, atol=0.0, equal_nan=True):
            raise ValueError(
                f'trial {trial_index} of split {split!r} has a loss of {mean} nats/token over its '
                f'documents, but its result has {loss}'
            )
        documents = None if nats_C is None else Documents(names, tokens_C, nats_C)
        documents_by_trial.append(documents)
    return documents_by_trial


def _fit_together(
    names: Sequence[str], tokens_C: np.ndarray, nats_by_trial: Sequence[np.ndarray | None]
) -> bool:
    """Returns whether C documents have different names, targets and one loss for each trial.

    Args:
        names: The names of the documents.
        tokens_C: The number of targets in each document.
        nats_by_trial: For each trial, the loss of each document; None for a diverged trial.
    """
    shapes = {tokens_C.shape}
    for nats_C in nats_by_trial:
        if nats_C is not None:
            shapes.add(nats_C.shape)
    has_documents = len(names) > 0
    has_distinct_names = len(set(names)) == len(names)
    has_every_document = shapes == {(len(names),)}  # every array has C numbers
    has_targets = bool((tokens_C > 0).all())
    return has_documents and has_distinct_names and has_every_document and has_targets


def _with_each(run: TrainedRun, field: str, values: Sequence[Any]) -> TrainedRun:
    """Sets a field of each trial of a run; `values` has one value for each trial."""
    trials = []
    for trial, value in zip(run.trials, values, strict=True):
        change = {field: value}
        trials.append(dataclasses.replace(trial, **change))
    return dataclasses.replace(run, trials=tuple(trials))


def _with_log(run: TrainedRun, log_records: list[dict[str, Any]]) -> TrainedRun:
    """Adds to each trial of a run its validation losses by step.

    Args:
        run: The run, with the results of its trials.
        log_records: The content of metrics.jsonl.

    Raises:
        ValueError: The log does not agree with the results of the run.
    """
    evaluations = _evaluations(log_records, run)

    # The log ends with the results: on the validation split in the last evaluation, and all of
    # them in the final record.
    results = _results_by_field(run.trials)
    any_trial = run.trials[0]
    validation_fields = logged_fields(any_trial.declared_metrics, any_trial.corpora)
    _check_logged(evaluations[-1], results, validation_fields)
    _check_logged(log_records[-1], results, results.keys())

    losses_by_step: list[dict[int, float]] = [{} for _ in run.trials]  # one dict for each trial
    for evaluation in evaluations:
        for trial_index, loss in enumerate(evaluation['val_loss']):
            if loss is not None:  # None for a diverged trial
                losses_by_step[trial_index][evaluation['step']] = loss
    return _with_each(run, 'evaluations', losses_by_step)


def _evaluations(log_records: list[dict[str, Any]], run: TrainedRun) -> list[dict[str, Any]]:
    """Returns the evaluations in the log of a run, each with the validation loss of every trial.

    For example, an evaluation is {'kind': 'eval', 'step': 100, 'val_loss': [4.1, None], ...}.

    Raises:
        ValueError: The log is not complete, or an evaluation lacks the loss of a trial.
    """
    evaluations = [record for record in log_records if record.get('kind') == 'eval']
    has_final_record = bool(log_records) and log_records[-1].get('kind') == 'final'

    last_evaluation_step = evaluations[-1]['step'] if evaluations else None
    final_step = log_records[-1]['step'] if has_final_record else None
    is_evaluated_at_end = last_evaluation_step == run.num_steps
    is_final_at_end = final_step == run.num_steps
    if not is_evaluated_at_end or not is_final_at_end:
        raise ValueError('it does not end with the last evaluation and the final record')
    for evaluation in evaluations:
        records.check(evaluation, {'val_loss': tuple[float | None, ...]})
        if len(evaluation['val_loss']) != len(run.trials):
            raise ValueError(
                f'step {evaluation["step"]} does not have one loss for each of '
                f'{len(run.trials)} trials'
            )
    return evaluations


def _results_by_field(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Returns the results of trials as the final record of a log has them.

    Returns:
        A list over trials for each field, such as {'val_loss': [1.41, 1.43], ...}.
    """
    results: dict[str, list[Any]] = {}
    for field in trials[0].metrics:  # the trials of a run have the same metrics
        results[field] = [trial.metrics[field] for trial in trials]
    results['trials'] = [trial.trial for trial in trials]
    results['eval_tokens'] = [trial.eval_tokens for trial in trials]
    results['test_tokens'] = [trial.test_tokens for trial in trials]
    return results


def _check_logged(
    record: Mapping[str, Any], results: Mapping[str, list], fields: Iterable[str]
) -> None:
    """Raises ValueError if a record of the log differs from the results.

    Args:
        record: The record. A field is a list over trials, or one value that all trials share.
        results: The results, as a list over trials for each field.
        fields: The fields to compare.
    """
    for field in fields:
        logged = record.get(field)
        expected = results[field]
        is_by_trial = isinstance(logged, list)
        logged_by_trial = logged if is_by_trial else [logged] * len(expected)
        if logged_by_trial != expected:
            raise ValueError(
                f'it ends with {field} {logged!r:.80}, its results with {expected!r:.80}'
            )

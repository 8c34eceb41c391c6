"""Reads the runs of a study: lines of plan.jsonl, their trials, and files of their directories."""

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

# A loss and the sum of its documents' losses may differ by this fraction: both add the same
# numbers, but in different orders.
_ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """The losses of one trial on the C documents of one split.

    The loss on the split is nats_C.sum() / tokens_C.sum().
    """

    names: tuple[str, ...]
    tokens_C: np.ndarray  # the number of targets of each document
    nats_C: np.ndarray  # the loss summed over the targets of each document

    def has_targets_of(self, other: 'Documents') -> bool:
        """Returns whether both are losses on the same targets of the same documents."""
        return self.names == other.names and np.array_equal(self.tokens_C, other.tokens_C)


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A planned run and its results."""

    name: str
    key: ArmKey
    stage: Literal['screening', 'verdict', 'single']
    directory: str  # relative to the study
    num_trials: int
    target: float | None  # the baseline's cost; None if arms are not matched
    residual: float | None  # (cost - target) / target; None if arms are not matched
    config: Mapping[str, Any]  # the resolved config as JSON
    trials: tuple['Trial', ...] = ()

    @property
    def num_steps(self) -> int:
        return self.config['train']['num_steps']

    @property
    def seeds(self) -> list[int]:
        return self.config['trials']['seeds']


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trained model: a line of results.jsonl."""

    run: TrainedRun  # the planned run, without its trials
    trial: Mapping[str, Any]  # seed, learning rate and weight decay
    settings: Settings  # one value for each of `tuning.KNOBS`
    status: str
    num_steps: int
    num_tokens: int
    parameters: Mapping[str, int]
    config: Mapping[str, Any]
    flops_per_token: float
    cache_floats_per_token: float | None
    declared_metrics: Mapping[str, Metric]  # METRICS, and the metrics that its config imports
    metrics: Mapping[str, Any]  # by `result_fields`; None if not measured or diverged
    train_seconds: float | None  # of the run, all trials together
    tokens_per_second: float | None  # of the run, all trials together
    lifting: str | None
    data: Mapping[str, Any]
    eval_tokens: int | None
    provenance: Mapping[str, Any]
    eval_rows: int | None = None
    test_tokens: int | None = None
    # Losses by document, for each split that has them. The key is the prefix of the split's
    # metrics, such as 'val'.
    documents: Mapping[str, Documents] = dataclasses.field(default_factory=dict)
    # Validation loss by step until the trial diverged. Empty while results of the run are missing,
    # and if the log does not fit the results.
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
        """Nats/token."""
        return self.metrics['val_loss']


# The settings of a planned run that are read, with their types.
_CONFIG = {
    'model': dict.fromkeys(MODEL_KNOBS, float),
    'optimizer': {'schedule': str, 'final_fraction': float},
    'train': {'num_steps': int},
    'trials': {'seeds': tuple[int, ...]},
}


def parse_arm_key(record: Any) -> ArmKey:
    """Reads the key of an arm from the fields variant, size, corpus and control of a JSON object.

    Raises ValueError if a field is missing or has another type.
    """
    records.check(record, records.ARM_KEY)
    fields = {name: record[name] for name in records.ARM_KEY}
    return ArmKey(**fields)


def parse_run(record: Any) -> TrainedRun:
    """Reads a planned run from its JSON object; raises ValueError that names the bad field."""
    records.check(record, {'run': str, 'directory': str, 'trials': int, 'config': _CONFIG})
    check_run_directory(record)
    if record['trials'] < 1:
        raise ValueError(f"field 'trials' is {record['trials']}, expected 1 or more")
    return records.read_dataclass(
        TrainedRun,
        record,
        name=record['run'],
        key=parse_arm_key(record),
        num_trials=record['trials'],
        trials=(),
    )


def parse_trial(record: Any, run: TrainedRun) -> Trial:
    """Reads a trial of `run` from its line of results.jsonl.

    The losses by document and by step stay empty: they are in other files (`with_run_files`).
    Raises ValueError that names the bad field.
    """
    records.check_result(record)
    _check_planned(record, run)
    # The value of each setting that may be tuned, in the order of KNOBS. Those in TRIAL_KNOBS
    # belong to the trial, and those in MODEL_KNOBS to the model.
    trial_values = [record['trial'][knob] for knob in TRIAL_KNOBS]
    model_values = [run.config['model'][knob] for knob in MODEL_KNOBS]
    declared_metrics = records.metrics_of(record)
    metrics = {name: record.get(name) for name in records.metric_fields(record)}
    # All other fields are read from the record as they are.
    return records.read_dataclass(
        Trial,
        record,
        run=run,
        settings=(*trial_values, *model_values),
        declared_metrics=declared_metrics,
        metrics=metrics,
        documents={},
        evaluations={},
    )


def _check_planned(result: Mapping[str, Any], run: TrainedRun) -> None:
    """Raises ValueError unless the result has the config, arm, seed and settings of its run."""
    records.check_config_hash(result, run.name)
    key = parse_arm_key(result)
    if key != run.key:
        raise ValueError(f'run {run.name!r} is planned for {run.key}, but its result is of {key}')
    seed = result['trial']['seed']
    if seed not in run.seeds:
        raise ValueError(f'seed {seed} is not one of run {run.name!r}, which has {run.seeds}')
    for knob in TRIAL_KNOBS:
        value = result['trial'][knob]
        # The values of 'learning_rate' are in trials.learning_rates, if the config lists them.
        planned = run.config['trials'].get(f'{knob}s')
        if planned is not None and value not in planned:
            raise ValueError(f'{knob} {value} is not one of run {run.name!r}, which has {planned}')


def with_run_files(run: TrainedRun, study: Files, problems: list[str]) -> TrainedRun:
    """Adds to a run its log and its losses by document, from the files of its directory.

    There are three kinds of files:

    1. config.json, provenance.json and result.json are only checked. No number of a report comes
       from them.
    2. metrics.jsonl, the log, is read if every trial of the run has a result.
    3. documents.json, the losses by document, is read on the same condition. A stored study may
       leave it out.

    For each bad file, a sentence is added to `problems`, and its content is left out.
    """
    directory = study / run.directory
    documents_json = directory / 'documents.json'

    for name, schema in records.RUN_FILES.items():
        path = directory / name
        try:
            if path.exists():
                _check_run_file(name, records.parse_file(path, schema), run)
        except ValueError as error:
            problems.append(_describe_bad_file(run, study, name, error))

    # A run writes documents.json at its end.
    if not run.trials and documents_json.exists():
        problems.append(f'results.jsonl lacks the results of {run.directory}, which has ended.')
    has_every_result = len(run.trials) == run.num_trials
    if not has_every_result:
        return run

    try:
        run = _with_log(run, read_metrics(directory / 'metrics.jsonl'))
    except ValueError as error:
        problems.append(_describe_bad_file(run, study, 'metrics.jsonl', error))

    # Where a stored study leaves out documents.json, it has a file with its SHA-256.
    sha256_of_left_out = left_out_documents(directory)
    if sha256_of_left_out:
        return run
    try:
        losses = records.parse_file(documents_json, {'validation': records.DOCUMENTS})
        run = _with_documents(run, losses)
    except ValueError as error:
        problems.append(_describe_bad_file(run, study, 'documents.json', error))
    return run


def _describe_bad_file(run: TrainedRun, study: Files, name: str, error: ValueError) -> str:
    """Returns a sentence on a file of a run that could not be read because of `error`."""
    path = study / run.directory / name
    if not path.exists():
        return f'{run.directory} has results, but {name} is missing.'
    if isinstance(error, RunDirectoryError):
        return f'{error}.'  # the error names the file
    return f'{run.directory}/{name} is damaged: {error}.'


def _check_run_file(name: str, content: Any, run: TrainedRun) -> None:
    """Raises ValueError if one of RUN_FILES was written by another run."""
    if name == 'result.json':
        for result in content:
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
    """Adds to a run the losses by document in `record`, the content of documents.json.

    Raises ValueError if a split on which the results have losses is missing, or if the losses over
    its documents do not add up to the losses of the results.
    """
    documents_by_trial: list[dict[str, Documents]] = [{} for _ in run.trials]
    # The split 'validation' of documents.json has the prefix 'val' in names of metrics: 'val_loss'.
    for split, prefix in PREFIXES.items():
        losses = [trial.metrics[f'{prefix}_loss'] for trial in run.trials]
        if split in record:
            documents_on_split = _documents_of_split(record[split], split, losses)
            for index, documents in enumerate(documents_on_split):
                if documents is not None:  # None for a diverged trial
                    documents_by_trial[index][prefix] = documents
        elif any(loss is not None for loss in losses):
            raise ValueError(f'split {split!r} is missing, but its results have losses on it')
    return _with_each(run, 'documents', documents_by_trial)


def _documents_of_split(
    record: Any, split: str, losses: Sequence[float | None]
) -> list[Documents | None]:
    """Reads the losses by document of each trial on one split; None for a diverged trial.

    Args:
        record: The split's entry in documents.json: names of documents, tokens by document, and
            nats by trial and document.
        split: The name of the split.
        losses: The loss of each trial on the split, from the results, nats/token.

    Raises:
        ValueError: The losses over documents do not add up to those of the results, names repeat,
            or a list does not have one entry for each document or trial.
    """
    records.check(record, records.DOCUMENTS)
    names = tuple(record['documents'])
    tokens_C = np.array(record['tokens'])
    nats_by_trial = [None if row is None else np.array(row, float) for row in record['nats']]

    shapes = {tokens_C.shape}
    for nats_C in nats_by_trial:
        if nats_C is not None:
            shapes.add(nats_C.shape)
    has_every_document = shapes == {(len(names),)}
    has_different_names = len(set(names)) == len(names)
    has_every_trial = len(nats_by_trial) == len(losses)
    has_targets = bool((tokens_C > 0).all())
    requirements = (
        bool(names),
        has_different_names,
        has_every_document,
        has_every_trial,
        has_targets,
    )
    if not all(requirements):
        raise ValueError(
            f'split {split!r} must have documents of different names, each with targets and '
            f'one number for each of {len(losses)} trials'
        )

    documents_by_trial: list[Documents | None] = []
    for number, (nats_C, loss) in enumerate(zip(nats_by_trial, losses, strict=True)):
        # NaN stands for the loss of a diverged trial. Two NaN count as equal.
        mean = math.nan if nats_C is None else float(nats_C.sum() / tokens_C.sum())
        expected = math.nan if loss is None else loss
        if not np.isclose(mean, expected, rtol=_ROUNDING, atol=0.0, equal_nan=True):
            raise ValueError(
                f'trial {number} of split {split!r} has a loss of {mean} nats/token over its '
                f'documents, but its result has {loss}'
            )
        documents = None if nats_C is None else Documents(names, tokens_C, nats_C)
        documents_by_trial.append(documents)
    return documents_by_trial


def _with_each(run: TrainedRun, field: str, values: Sequence[Any]) -> TrainedRun:
    """Sets a field of every trial of a run to the trial's value in `values`."""
    trials = tuple(
        dataclasses.replace(trial, **{field: value})
        for trial, value in zip(run.trials, values, strict=True)
    )
    return dataclasses.replace(run, trials=trials)


def _with_log(run: TrainedRun, lines: list[dict[str, Any]]) -> TrainedRun:
    """Adds to a run its validation losses by step; `lines` are the records of metrics.jsonl.

    Raises ValueError unless the log agrees with the results: the last evaluation has their
    validation metrics, and the final record has all their numbers.
    """
    evaluations = [record for record in lines if record.get('kind') == 'eval']
    has_final_record = bool(lines) and lines[-1].get('kind') == 'final'

    # The last evaluation and the final record are made at the last step.
    evaluated_at = evaluations[-1]['step'] if evaluations else None
    ended_at = lines[-1]['step'] if has_final_record else None
    if evaluated_at != run.num_steps or ended_at != run.num_steps:
        raise ValueError('it does not end with the last evaluation and the final record')
    for record in evaluations:
        records.check(record, {'val_loss': tuple[float | None, ...]})
        if len(record['val_loss']) != len(run.trials):
            raise ValueError(
                f'step {record["step"]} does not have one loss for each of {len(run.trials)} trials'
            )

    # They have the numbers of the results.
    results = _results_by_field(run.trials)
    first_trial = run.trials[0]
    validation_fields = logged_fields(first_trial.declared_metrics, first_trial.corpora)
    _check_logged(evaluations[-1], results, validation_fields)
    _check_logged(lines[-1], results, results.keys())

    losses_by_trial: list[dict[int, float]] = [{} for _ in run.trials]
    for record in evaluations:
        for index, loss in enumerate(record['val_loss']):
            if loss is not None:
                losses_by_trial[index][record['step']] = loss
    return _with_each(run, 'evaluations', losses_by_trial)


def _results_by_field(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Returns the numbers of results as lists over trials, by the fields of the final record."""
    results: dict[str, list[Any]] = {}
    for name in trials[0].metrics:
        results[name] = [trial.metrics[name] for trial in trials]
    results['trials'] = [trial.trial for trial in trials]
    results['eval_tokens'] = [trial.eval_tokens for trial in trials]
    results['test_tokens'] = [trial.test_tokens for trial in trials]
    return results


def _check_logged(
    record: Mapping[str, Any], results: Mapping[str, list], names: Iterable[str]
) -> None:
    """Raises ValueError unless a record of the log has the same values as the results.

    Args:
        record: The record. A field is a list over trials, or one value that all trials share.
        results: The values of the results, by field, as lists over trials.
        names: The fields to compare.
    """
    for name in names:
        value = record.get(name)
        expected = results[name]
        logged = value if isinstance(value, list) else [value] * len(expected)
        if logged != expected:
            raise ValueError(
                f'it ends with {name} {value!r:.80}, its results with {expected!r:.80}'
            )

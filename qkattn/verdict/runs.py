"""Runs of a study: a line of plan.jsonl, its trials, and the files of the run's directory."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qkattn.config import fingerprint_of
from qkattn.errors import RunDirectoryError
from qkattn.metrics import PREFIXES, Metric, logged_fields, result_fields
from qkattn.storage import records
from qkattn.storage.files import Files, Readable
from qkattn.storage.ledger import left_out_documents
from qkattn.storage.metrics_log import read_metrics
from qkattn.study.arm_key import ArmKey
from qkattn.study.stored import check_run_directory
from qkattn.study.tuning import MODEL_KNOBS, TRIAL_KNOBS, Settings

_ROUNDING = 1e-5  # relative; losses are sums of the same numbers in another order


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """One trial on one split: the names of C documents, their targets and their nats.

    The split's loss is nats_C.sum() / tokens_C.sum().
    """

    names: tuple[str, ...]
    tokens_C: np.ndarray
    nats_C: np.ndarray

    def has_targets_of(self, other: 'Documents') -> bool:
        """Whether the losses of both are sums over the same targets of the same documents."""
        return self.names == other.names and np.array_equal(self.tokens_C, other.tokens_C)


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A planned run and its results."""

    name: str
    key: ArmKey
    stage: Literal['screening', 'verdict', 'single']
    directory: str  # relative to the study
    num_trials: int
    target: float | None  # None if nothing is matched, as `residual`
    residual: float | None
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

    run: TrainedRun  # as planned, without its trials
    trial: Mapping[str, Any]  # its seed and settings, as the config has them
    settings: Settings  # the values of all knobs, in the order of `tuning.KNOBS`
    status: str
    num_steps: int
    num_tokens: int
    parameters: Mapping[str, int]
    config: Mapping[str, Any]
    flops_per_token: float
    cache_floats_per_token: float | None
    declared_metrics: Mapping[str, Metric]  # METRICS, and those from outside of its run
    metrics: Mapping[str, Any]  # by their `result_fields`; None if not measured or diverged
    # These two are of the run, all trials together.
    train_seconds: float | None
    tokens_per_second: float | None
    lifting: str | None
    data: Mapping[str, Any]
    eval_tokens: int | None
    provenance: Mapping[str, Any]
    eval_rows: int | None = None
    test_tokens: int | None = None
    # Losses by document on each split that has them, by the prefix of its metrics.
    documents: Mapping[str, Documents] = dataclasses.field(default_factory=dict)
    # Validation losses by step until it diverged; empty while results of its run are missing, and
    # if its log is of other ones.
    evaluations: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.trial['seed']

    @property
    def learning_rate(self) -> float:
        return self.trial['learning_rate']

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
    """The arm that an object names by variant, size, corpus and control; ValueError as `check`."""
    records.check(record, records.ARM_KEY)
    return ArmKey(*(record[name] for name in records.ARM_KEY))


def parse_run(record: Any) -> TrainedRun:
    """Reads a planned run from its JSON object; raises ValueError that names the bad field."""
    records.check(record, {'run': str, 'directory': str, 'trials': int, 'config': _CONFIG})
    check_run_directory(record)
    if record['trials'] < 1:
        raise ValueError(f"field 'trials' is {record['trials']}, expected 1 or more")
    return records.read(
        TrainedRun,
        record,
        name=record['run'],
        key=parse_arm_key(record),
        num_trials=record['trials'],
        trials=(),
    )


def parse_trial(record: Any, run: TrainedRun) -> Trial:
    """Reads the result of a trial of `run`; ValueError names the bad field."""
    records.check_result(record)
    _check_planned(record, run)
    of_trial = [record['trial'][knob] for knob in TRIAL_KNOBS]
    of_model = [run.config['model'][knob] for knob in MODEL_KNOBS]
    declared_metrics = records.metrics_of(record)
    return records.read(
        Trial,
        record,
        run=run,
        settings=(*of_trial, *of_model),
        declared_metrics=declared_metrics,
        metrics={name: record.get(name) for name in result_fields(declared_metrics)},
        documents={},
        evaluations={},
    )


def _check_planned(result: Mapping[str, Any], run: TrainedRun) -> None:
    """Raises ValueError unless a result is of an arm, a config and a trial of its planned run."""
    records.check_config_hash(result, run.name)
    key = parse_arm_key(result)
    if key != run.key:
        raise ValueError(f'run {run.name!r} is planned for {run.key}, but its result is of {key}')
    seed = result['trial']['seed']
    if seed not in run.seeds:
        raise ValueError(f'seed {seed} is not one of run {run.name!r}, which has {run.seeds}')
    for knob in TRIAL_KNOBS:
        value = result['trial'][knob]
        planned = run.config['trials'].get(f'{knob}s')
        if planned is not None and value not in planned:
            raise ValueError(f'{knob} {value} is not one of run {run.name!r}, which has {planned}')


def with_files(run: TrainedRun, study: Files, problems: list[str]) -> TrainedRun:
    """The run with its log and its losses by document, from the files of its directory.

    These two are read once no result of the run is missing. Of a bad file `problems` gets a
    sentence, and what it holds is left out. Other files of the directory are only checked: no
    number of a report comes from them.
    """
    directory = study / run.directory

    @contextlib.contextmanager
    def file_named(name: str) -> Iterator[Readable]:
        """The path of a file; a ValueError inside the block becomes a sentence of `problems`."""
        path = directory / name
        try:
            yield path
        except ValueError as error:
            if not path.exists():
                problems.append(f'{run.directory} has results, but {name} is missing.')
            elif isinstance(error, RunDirectoryError):  # which names the file
                problems.append(f'{error}.')
            else:
                problems.append(f'{run.directory}/{name} is damaged: {error}.')

    for name, schema in records.RUN_FILES.items():
        with file_named(name) as path:
            if path.exists():
                _check_of_run(name, records.parse_file(path, schema), run)
    if not run.trials and (directory / 'documents.json').exists():
        problems.append(f'results.jsonl lacks the results of {run.directory}, which has ended.')
    if len(run.trials) != run.num_trials:
        return run
    with file_named('metrics.jsonl') as path:
        run = _with_log(run, read_metrics(path))
    if not left_out_documents(directory):
        with file_named('documents.json') as path:
            losses = records.parse_file(path, {'validation': records.DOCUMENTS})
            run = _with_documents(run, losses)
    return run


def _check_of_run(name: str, content: Any, run: TrainedRun) -> None:
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
    """The run with the losses by document of documents.json.

    ValueError unless each split on which results have losses is there, and its sums over
    documents are these losses.
    """
    by_trial: list[dict[str, Documents]] = [{} for _ in run.trials]
    for split, prefix in PREFIXES.items():
        losses = [trial.metrics[f'{prefix}_loss'] for trial in run.trials]
        if split in record:
            of_split = _documents_of_split(record[split], split, losses)
            for documents, of_trial in zip(of_split, by_trial, strict=True):
                if documents is not None:
                    of_trial[prefix] = documents
        elif any(loss is not None for loss in losses):
            raise ValueError(f'split {split!r} is missing, but its results have losses on it')
    return _with_each(run, 'documents', by_trial)


def _documents_of_split(
    record: Any, split: str, losses: Sequence[float | None]
) -> list[Documents | None]:
    """The losses by document of each trial on one split; None of a diverged trial.

    `losses` are those of the results, nats/token. ValueError if the sums over documents are
    others, or if a list has another length than that of documents.
    """
    records.check(record, records.DOCUMENTS)
    names = tuple(record['documents'])
    tokens_C = np.array(record['tokens'])
    nats_by_trial = [None if row is None else np.array(row, float) for row in record['nats']]
    shapes = {tokens_C.shape}
    shapes |= {nats_C.shape for nats_C in nats_by_trial if nats_C is not None}
    num_names = len(set(names))
    is_whole = len(nats_by_trial) == len(losses) and shapes == {(num_names,)}
    if not names or not is_whole or not (tokens_C > 0).all():
        raise ValueError(
            f'split {split!r} must have documents of different names, each with targets and '
            f'one number for each of {len(losses)} trials'
        )
    by_trial: list[Documents | None] = []
    for number, (nats_C, loss) in enumerate(zip(nats_by_trial, losses, strict=True)):
        mean = math.nan if nats_C is None else float(nats_C.sum() / tokens_C.sum())
        expected = math.nan if loss is None else loss
        if not np.isclose(mean, expected, _ROUNDING, 0.0, equal_nan=True):
            raise ValueError(
                f'trial {number} of split {split!r} has a loss of {mean} nats/token over its '
                f'documents, but its result has {loss}'
            )
        by_trial.append(None if nats_C is None else Documents(names, tokens_C, nats_C))
    return by_trial


def _with_each(run: TrainedRun, field: str, values: Sequence[Any]) -> TrainedRun:
    """The run with a value of a field for each of its trials."""
    trials = tuple(
        dataclasses.replace(trial, **{field: value})
        for trial, value in zip(run.trials, values, strict=True)
    )
    return dataclasses.replace(run, trials=trials)


def _with_log(run: TrainedRun, lines: list[dict[str, Any]]) -> TrainedRun:
    """The run with the evaluations of metrics.jsonl, whose records are `lines`.

    ValueError unless the log ends with the last evaluation, which has the validation metrics of
    the results, and with the final record, which has all that results hold.
    """
    evaluations = [record for record in lines if record.get('kind') == 'eval']
    ends = [(record.get('kind'), record['step']) for record in (*evaluations[-1:], *lines[-1:])]
    if ends != [('eval', run.num_steps), ('final', run.num_steps)]:
        raise ValueError('it does not end with the last evaluation and the final record')
    for record in evaluations:
        records.check(record, {'val_loss': tuple[float | None, ...]})
        if len(record['val_loss']) != len(run.trials):
            raise ValueError(
                f'step {record["step"]} does not have one loss for each of {len(run.trials)} trials'
            )
    first = run.trials[0]
    results = {name: [trial.metrics[name] for trial in run.trials] for name in first.metrics}
    results['trials'] = [trial.trial for trial in run.trials]
    results['eval_tokens'] = [trial.eval_tokens for trial in run.trials]
    results['test_tokens'] = [trial.test_tokens for trial in run.trials]
    _check_logged(evaluations[-1], results, logged_fields(first.declared_metrics))
    _check_logged(lines[-1], results, results)
    by_trial: list[dict[int, float]] = [{} for _ in run.trials]
    for record in evaluations:
        for of_trial, loss in zip(by_trial, record['val_loss'], strict=True):
            if loss is not None:
                of_trial[record['step']] = loss
    return _with_each(run, 'evaluations', by_trial)


def _check_logged(
    record: Mapping[str, Any], results: Mapping[str, list], names: Iterable[str]
) -> None:
    """Raises ValueError unless a record of a log has the fields `names` of the results.

    A field of a record is a list over trials, or one value that all of them share.
    """
    for name in names:
        value = record.get(name)
        of_trials = results[name]
        logged = value if isinstance(value, list) else [value] * len(of_trials)
        if logged != of_trials:
            expected = f'{of_trials!r:.80}'
            raise ValueError(f'it ends with {name} {value!r:.80}, its results with {expected}')

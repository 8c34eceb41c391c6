"""One run of a study: its line of plan.jsonl, its trials, and what its directory holds of them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal

import numpy as np

from qkattn.metrics import METRICS, PREFIXES, Metric, logged_fields, result_fields
from qkattn.storage.ledger import left_out_documents
from qkattn.storage.records import (
    ARM_KEY,
    DOCUMENTS,
    FINAL,
    FINISHED,
    check,
    check_result,
    for_each_line,
    metrics_of,
    parse_file,
    read,
)
from qkattn.study.arm_key import ArmKey
from qkattn.study.tuning import MODEL_KNOBS, TRIAL_KNOBS, Settings

LOG, DOCUMENTS_FILE = 'metrics.jsonl', 'documents.json'
# The field of a result that counts the targets of a split.
COUNTS = {'val': 'eval_tokens', 'test': 'test_tokens'}
MAX_NAMED = 2  # bad lines of a log that are named; the others are counted
_ROUNDING = 1e-5  # relative; losses are sums of the same numbers in another order


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """One trial on one split: the names of C documents, their targets and their nats.

    The split's loss is nats_C.sum() / tokens_C.sum().
    """

    names: tuple[str, ...]
    tokens_C: np.ndarray
    nats_C: np.ndarray

    @property
    def loss(self) -> float:
        return float(self.nats_C.sum() / self.tokens_C.sum())

    def alike(self, other: 'Documents') -> bool:
        """Whether both are sums over the same targets."""
        return self.names == other.names and np.array_equal(self.tokens_C, other.tokens_C)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trained model: a line of results.jsonl.

    Of its run: run, key, stage, knob, target_parameters, residual, model_knobs, planned_steps.
    """

    run: str
    key: ArmKey
    stage: str
    knob: str | None
    target_parameters: float | None
    residual: float | None
    seed: int
    learning_rate: float
    settings: tuple[tuple[str, Any], ...]  # all trial settings but the seed, sorted by name
    model_knobs: tuple[float, ...]
    planned_steps: int
    status: str
    num_steps: int
    num_tokens: int
    parameters: Mapping[str, int]
    config: Mapping[str, Any]
    flops_per_token: float
    cache_floats_per_token: float | None
    declared_metrics: Mapping[str, Metric]  # METRICS, and those from outside of its run
    metrics: Mapping[str, Any]  # by their `result_fields`; None if not measured or diverged
    # These three are of the run, all trials together.
    train_seconds: float | None
    compile_seconds: float | None
    tokens_per_second: float | None
    lifting: str | None
    data: Mapping[str, Any]
    eval_tokens: int | None
    provenance: Mapping[str, Any]
    eval_rows: int | None = None
    test_tokens: int | None = None
    diverged_at: int | None = None  # first step without a finite loss and gradient; None if unknown
    # Losses by document on each split that has them, by the prefix of its metrics.
    documents: Mapping[str, Documents] = dataclasses.field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.status == FINISHED

    @property
    def stopped_early(self) -> bool:
        return self.num_steps < self.planned_steps

    @property
    def val_loss(self) -> float | None:
        """Nats/token."""
        return self.metrics['val_loss']

    @property
    def at(self) -> Settings:
        """The values of all knobs."""
        return (*(dict(self.settings)[knob] for knob in TRIAL_KNOBS), *self.model_knobs)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluations of one run: steps [E], and values [E, X] by the `logged_fields` of its metrics.

    NaN where a trial has diverged or has no such metric, as bits/byte where there are no bytes.
    """

    steps_E: np.ndarray
    values_EX: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Run:
    """A planned run and its results."""

    name: str
    key: ArmKey
    stage: Literal['screening', 'verdict', 'single']
    knob: str | None
    directory: str  # relative to the study
    num_trials: int
    target: float | None  # None if nothing is matched, as `residual`
    residual: float | None
    config: Mapping[str, Any]  # the resolved config as JSON
    trials: tuple[Trial, ...] = ()
    curve: Curve | None = None
    step: int | None = None  # the last logged one, if any

    @property
    def num_steps(self) -> int:
        return self.config['train']['num_steps']

    @property
    def seeds(self) -> list[int]:
        return self.config['trials']['seeds']


_CONFIG = {
    'model': dict.fromkeys(MODEL_KNOBS, float),
    'optimizer': {'schedule': str, 'final_fraction': float},
    'train': {'num_steps': int},
    'trials': {'seeds': tuple[int, ...]},
}
_ROW = tuple[float | None, ...]


def parse_arm_key(record: Any) -> ArmKey:
    """The arm that an object names by variant, size, corpus and control; ValueError as `check`."""
    check(record, ARM_KEY)
    return ArmKey(*(record[name] for name in ARM_KEY))


def parse_run(record: Any) -> Run:
    """Reads a planned run from its JSON object; raises ValueError that names the bad field."""
    check(record, {'run': str, 'trials': int, 'config': _CONFIG})
    given = {'name': record['run'], 'num_trials': record['trials'], 'trials': ()}
    return read(Run, record, key=parse_arm_key(record), **given)


def parse_trial(record: Any, run: Run) -> Trial:
    """Reads a trial of `run`; ValueError names the field that is bad or contradicts the plan."""
    shared = {'stage': run.stage, 'knob': run.knob, 'residual': run.residual, 'run': run.name}
    shared['target_parameters'] = run.target
    planned = run.key._asdict() | shared | {'config_hash': run.name}
    check(record, dict.fromkeys(planned, object))
    for field, value in planned.items():
        if record[field] != value:
            raise ValueError(
                f'{field} {record[field]!r} contradicts plan.jsonl, where run {run.name!r} has '
                f'{value!r}'
            )
    check_result(record)
    if 'source' in record['data'] or 'target' in record['data']:
        check(record['data'], {'source': dict, 'target': dict})
    for data in corpora(record['data']):
        check(data, {'name': str, 'version': str | int})
    seed = record['trial']['seed']
    if seed not in run.seeds:
        raise ValueError(f'seed {seed} is not one of run {run.name!r}, which has {run.seeds}')
    declared = metrics_of(record)
    return read(
        Trial,
        record,
        **shared,
        key=run.key,
        documents={},
        seed=seed,
        learning_rate=record['trial']['learning_rate'],
        settings=tuple(sorted((k, v) for k, v in record['trial'].items() if k != 'seed')),
        model_knobs=tuple(run.config['model'][knob] for knob in MODEL_KNOBS),
        planned_steps=run.num_steps,
        declared_metrics=declared,
        metrics={name: record.get(name) for name in result_fields(declared)},
    )


def corpora(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The data sets of a trial: source and target of parallel text, otherwise one."""
    return (data['source'], data['target']) if 'source' in data else (data,)


def lost_logs(runs: Sequence[Run], directory: Path) -> Iterator[str]:
    """The logs that runs with results lack, of a kind that others of the study have."""
    for name in (LOG, DOCUMENTS_FILE):
        absent = [not (directory / run.directory / name).exists() for run in runs]
        for run, is_absent in zip(runs, absent, strict=True):
            left_out = name == DOCUMENTS_FILE and left_out_documents(directory / run.directory)
            if run.trials and is_absent and not all(absent) and not left_out:
                yield f'{run.directory} has results, but {name} is missing.'


def with_documents(run: Run, directory: Path, problems: list[str]) -> Run:
    """The run whose trials have the losses of documents.json, if no result of it is missing."""
    path = directory / run.directory / DOCUMENTS_FILE
    if len(run.trials) < run.num_trials or not path.exists():
        return run
    by_trial: list[dict[str, Documents]] = [{} for _ in run.trials]
    try:
        record = parse_file(path, {'validation': DOCUMENTS})
        for split, prefix in PREFIXES.items():
            losses = [trial.metrics[f'{prefix}_loss'] for trial in run.trials]
            if split in record:
                count = getattr(run.trials[0], COUNTS[prefix])
                for documents, parsed in zip(
                    by_trial, _documents(record[split], split, losses, count), strict=True
                ):
                    documents |= {} if parsed is None else {prefix: parsed}
            elif any(loss is not None for loss in losses):
                raise ValueError(f'split {split!r} is missing, of which its results have losses')
    except ValueError as error:
        problems.append(f'{run.directory}/{path.name} was left out: {error}.')
        return run
    pairs = zip(run.trials, by_trial, strict=True)
    trials = [dataclasses.replace(trial, documents=documents) for trial, documents in pairs]
    return dataclasses.replace(run, trials=tuple(trials))


def _documents(
    record: Any, split: str, losses: Sequence[float | None], count: int | None
) -> list[Documents | None]:
    """The documents of every trial, None for one without losses; they add up to its loss."""
    check(record, DOCUMENTS)
    names, tokens_C = tuple(record['documents']), np.array(record['tokens'], float)
    rows = [None if row is None else np.array(row, float) for row in record['nats']]
    if len(rows) != len(losses):
        raise ValueError(f'split {split!r} has nats of {len(rows)} trials, not of {len(losses)}')
    if any(row is not None and row.shape != (len(names),) for row in (tokens_C, *rows)):
        raise ValueError(f'split {split!r} does not have one number for each of its documents')
    if len(set(names)) < len(names) or not names or not (tokens_C > 0).all():
        raise ValueError(f'split {split!r} repeats a document, or has one without targets')
    if count not in (None, tokens := sum(record['tokens'])):
        raise ValueError(f'it has {tokens} tokens of split {split!r}, but its results {count}')
    parsed = [None if row is None else Documents(names, tokens_C, row) for row in rows]
    for number, (documents, loss) in enumerate(zip(parsed, losses, strict=True)):
        total = None if documents is None else documents.loss
        close = math.isclose(total or math.nan, loss or math.nan, rel_tol=_ROUNDING)
        if total != loss and not close:
            raise ValueError(
                f'trial {number} of split {split!r} has a loss of {total} nats/token over its '
                f'documents, its result has {loss}'
            )
    return parsed


def with_log(run: Run, directory: Path, problems: list[str]) -> Run:
    """The run with what metrics.jsonl holds: the last step and, if no trial is missing, a curve."""
    path = directory / run.directory / LOG
    if not path.exists():
        return run
    label, steps, last_kind = f'{run.directory}/{path.name}', [0], ''
    rows: dict[int, dict[str, list]] = {}
    bad: list[str] = []
    metrics = run.trials[0].declared_metrics if run.trials else METRICS
    logged, fields = logged_fields(metrics), result_fields(metrics).items()
    columns = {name: GenericAlias(tuple, (hint | None, ...)) | None for name, hint in fields}

    def add(record: Any) -> None:
        nonlocal last_kind
        check(record, {'kind': str, 'step': int})
        steps.append(record['step'])
        if record['kind'] == 'final':
            check(record, FINAL | {n: hint for n, hint in columns.items() if n in record})
        if record['kind'] == 'eval':
            hints = {name: _ROW | None for name in logged if name in record}
            check(record, hints | {'val_loss': _ROW})
            number = run.num_trials if run.trials else len(record['val_loss'])
            row = {name: record.get(name) or [None] * number for name in logged}
            for name, values in row.items():
                if len(values) != number:
                    raise ValueError(f'field {name!r} has {len(values)} values for {number} trials')
            if rows and record['step'] <= (last := max(rows)):
                raise ValueError(f'step {record["step"]} follows step {last}')
            rows[record['step']] = row
        last_kind = record['kind']

    for_each_line(path, label, bad, add)
    problems += bad[:MAX_NAMED]
    if more := len(bad[MAX_NAMED:]):
        problems.append(f'{label}: {more} more lines were left out.')
    if run.trials and not bad and (not rows or max(rows) != run.trials[0].num_steps):
        problems.append(f'{label}: the run was not evaluated at its last step.')
    elif run.trials and not bad and last_kind != 'final':
        problems.append(f'{label} has no final record at the end of its log.')
    if not run.trials and last_kind == 'final':
        problems.append(f'results.jsonl lacks the results of {run.directory}, which has ended.')
    curve = None
    if rows and len(run.trials) == run.num_trials:
        values_EX = {n: np.array([row[n] for row in rows.values()], float) for n in logged}
        curve = Curve(np.array(list(rows)), values_EX)
    return dataclasses.replace(run, curve=curve, step=max(steps))

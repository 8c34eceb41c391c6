"""One run of a study: its line of plan.jsonl, its trials and its evaluations during training."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any

import numpy as np

from qkattn.metrics import LOGGED, PREFIXES, result_fields
from qkattn.storage.ledger import left_out_documents
from qkattn.storage.records import (
    ARM_KEY,
    FINAL,
    FINISHED,
    check,
    check_result,
    for_each_line,
    read,
)
from qkattn.study.place import CONTROLS, Place
from qkattn.study.tuning import KNOBS, MODEL_KNOBS, SCREENING, STAGES, TRIAL_KNOBS, Settings
from qkattn.verdict import documents
from qkattn.verdict.documents import Documents

SPLITS = tuple(PREFIXES.values())
LOG, DOCUMENTS = 'metrics.jsonl', 'documents.json'
MAX_NAMED = 2  # bad lines of a log that are named; the others are counted


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trained model: a line of results.jsonl.

    Attributes:
      run, place, stage, knob, target_parameters, residual: of the trial's run.
      settings: all trial settings but the seed, sorted by name; trials of a run with the same
        settings are repetitions of each other.
      model_knobs, planned_steps: of the run's config; they are not among the trial settings.
      status: FINISHED or DIVERGED.
      diverged_at: its first step without a finite loss and gradient; None if that is not known.
      metrics: all fields of `qkattn.metrics.result_fields()`; None if not measured or diverged.
      train_seconds, compile_seconds, tokens_per_second: of the run, all trials together.
      documents: losses by document on each split that has them, by the prefix of its metrics.
    """

    run: str
    place: Place
    stage: str
    knob: str | None
    target_parameters: float | None
    residual: float | None
    seed: int
    learning_rate: float
    settings: tuple[tuple[str, Any], ...]
    model_knobs: tuple[float, ...]
    planned_steps: int
    status: str
    num_steps: int
    num_tokens: int
    parameters: Mapping[str, int]
    config: Mapping[str, Any]
    flops_per_token: float
    cache_floats_per_token: float | None
    metrics: Mapping[str, Any]
    train_seconds: float | None
    compile_seconds: float | None
    tokens_per_second: float | None
    lifting: str | None
    data: Mapping[str, Any]
    eval_tokens: int | None
    provenance: Mapping[str, Any]
    eval_rows: int | None = None
    test_tokens: int | None = None
    diverged_at: int | None = None
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

    @property
    def key(self) -> tuple:
        """Identifies the trial within its run."""
        return self.seed, self.settings


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluations of one run: steps [E], and by field of `qkattn.metrics.LOGGED` values [E, X].

    NaN where a trial has diverged or has no such metric, as bits/byte where there are no bytes.
    """

    steps_E: np.ndarray
    values_EX: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A planned run and its results.

    `directory` is relative to the study; `target` and `residual` are None if nothing is matched;
    `config` is the resolved config as JSON; `step` is the last logged step, if any.
    """

    name: str
    place: Place
    stage: str
    knob: str | None
    directory: str
    num_trials: int
    target: float | None
    residual: float | None
    config: Mapping[str, Any]
    trials: tuple[Trial, ...] = ()
    curve: Curve | None = None
    step: int | None = None

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
    'data': {'name': str},
}
# What both a trial and its planned run state: the field of Trial and that of PlannedRun.
_SHARED = {name: name for name in ('stage', 'knob', 'residual')} | {
    'run': 'name',
    'target_parameters': 'target',
}
_METRIC_FIELDS = result_fields()
_ROW = tuple[float | None, ...]
_OF_TRIALS = {n: GenericAlias(tuple, (h | None, ...)) | None for n, h in _METRIC_FIELDS.items()}


def parse_place(record: Any) -> Place:
    """The arm that an object names by variant, size, corpus and control; ValueError as `check`."""
    check(record, ARM_KEY)
    return Place(*(record[name] for name in ARM_KEY))


def parse_run(record: Any) -> PlannedRun:
    """Reads a planned run from its JSON object; raises ValueError that names the bad field."""
    check(record, {'run': str, 'trials': int, 'config': _CONFIG})
    given = {'name': record['run'], 'num_trials': record['trials'], 'trials': ()}
    run = read(PlannedRun, record, place=parse_place(record), **given)
    if run.stage not in STAGES:
        raise ValueError(f"field 'stage' is {run.stage!r}, expected {', '.join(STAGES)}")
    valid = KNOBS if run.stage == SCREENING else ('null',)
    if (run.knob or 'null') not in valid:
        listed = ', '.join(valid)
        raise ValueError(f"field 'knob' is {run.knob!r}, expected {listed} at stage {run.stage!r}")
    if run.place.control not in (None, *CONTROLS):
        listed = ', '.join(CONTROLS)
        raise ValueError(f"field 'control' is {run.place.control!r}, expected null, {listed}")
    if run.config['data']['name'] != run.place.corpus:
        raise ValueError(
            f"field 'corpus' is {run.place.corpus!r}, but its config has data.name="
            f'{run.config["data"]["name"]!r}'
        )
    if not run.seeds:
        raise ValueError("field 'seeds' is [], expected at least one whole number")
    return run


def parse_trial(record: Any, run: PlannedRun) -> Trial:
    """Reads a trial of `run`; ValueError names the field that is bad or contradicts the plan."""
    check(record, dict.fromkeys((*ARM_KEY, *_SHARED), object))
    shared = {field: getattr(run, name) for field, name in _SHARED.items()}
    for field, planned in (run.place._asdict() | shared).items():
        if record[field] != planned:
            raise ValueError(
                f'{field} {record[field]!r} contradicts plan.jsonl, where run {run.name!r} has '
                f'{planned!r}'
            )
    check_result(record)
    if 'source' in record['data'] or 'target' in record['data']:
        check(record['data'], {'source': dict, 'target': dict})
    for data in corpora(record['data']):
        check(data, {'name': str, 'version': str | int})
    trial = read(
        Trial,
        record,
        **shared,
        place=run.place,
        documents={},
        seed=record['trial']['seed'],
        learning_rate=record['trial']['learning_rate'],
        settings=tuple(sorted((k, v) for k, v in record['trial'].items() if k != 'seed')),
        model_knobs=tuple(run.config['model'][knob] for knob in MODEL_KNOBS),
        planned_steps=run.num_steps,
        metrics=dict.fromkeys(_METRIC_FIELDS)
        | {name: record[name] for name in _METRIC_FIELDS if name in record},
    )
    if record['config_hash'] != run.name:
        raise ValueError(
            f'its config_hash {record["config_hash"]!r} is not that of the planned run '
            f'{run.name!r}, so it was trained with other settings'
        )
    if trial.seed not in run.seeds:
        raise ValueError(f'seed {trial.seed} is not one of run {run.name!r}, which has {run.seeds}')
    return trial


def corpora(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The data sets of a trial: source and target of parallel text, otherwise one."""
    return (data['source'], data['target']) if 'source' in data else (data,)


def lost_logs(runs: Sequence[PlannedRun], directory: Path) -> Iterator[str]:
    """The logs that runs with results lack, of a kind that others of the study have."""
    for name in (LOG, DOCUMENTS):
        absent = [not (directory / run.directory / name).exists() for run in runs]
        for run, is_absent in zip(runs, absent, strict=True):
            left_out = name == DOCUMENTS and left_out_documents(directory / run.directory)
            if run.trials and is_absent and not all(absent) and not left_out:
                yield f'{run.directory} has results, but {name} is missing.'


def with_documents(run: PlannedRun, directory: Path, problems: list[str]) -> PlannedRun:
    """The run whose trials have the losses of documents.json, if no result of it is missing."""
    path = directory / run.directory / DOCUMENTS
    if len(run.trials) < run.num_trials or not path.exists():
        return run
    losses = [{split: t.metrics[f'{split}_loss'] for split in SPLITS} for t in run.trials]
    counts = {split: getattr(run.trials[0], field) for split, field in documents.COUNTS.items()}
    try:
        found = documents.read(path, losses, counts)
    except ValueError as error:
        problems.append(f'{run.directory}/{path.name} was left out: {error}.')
        return run
    pairs = zip(run.trials, found, strict=True)
    return dataclasses.replace(
        run, trials=tuple(dataclasses.replace(trial, documents=of) for trial, of in pairs)
    )


def with_log(run: PlannedRun, directory: Path, problems: list[str]) -> PlannedRun:
    """The run with what metrics.jsonl holds: the last step and, if no trial is missing, a curve."""
    path = directory / run.directory / LOG
    if not path.exists():
        return run
    label, logged, kinds = f'{run.directory}/{path.name}', [0], ['']
    rows: dict[int, dict[str, list]] = {}
    bad: list[str] = []

    def add(record: Any) -> None:
        check(record, {'kind': str, 'step': int})
        logged.append(record['step'])
        if record['kind'] == 'final':
            check(record, FINAL | {n: hint for n, hint in _OF_TRIALS.items() if n in record})
        if record['kind'] != 'eval':
            kinds.append(record['kind'])
            return
        hints = {name: _ROW | None for name in LOGGED if name in record}
        check(record, hints | {'val_loss': _ROW})
        number = run.num_trials if run.trials else len(record['val_loss'])
        row = {name: (name in hints and record[name]) or [None] * number for name in LOGGED}
        for name, values in row.items():
            if len(values) != number:
                raise ValueError(f'field {name!r} has {len(values)} values for {number} trials')
        if rows and record['step'] <= (last := max(rows)):
            raise ValueError(f'step {record["step"]} follows step {last}')
        rows[record['step']] = row
        kinds.append('eval')

    for_each_line(path, label, bad, add)
    problems += bad[:MAX_NAMED]
    if more := len(bad[MAX_NAMED:]):
        problems.append(f'{label}: {more} more lines were left out.')
    if run.trials and not bad and (not rows or max(rows) != run.trials[0].num_steps):
        problems.append(f'{label}: the run was not evaluated at its last step.')
    elif run.trials and not bad and kinds[-1] != 'final':
        problems.append(f'{label} has no final record at the end of its log.')
    if not run.trials and kinds[-1] == 'final':
        problems.append(f'results.jsonl lacks the results of {run.directory}, which has ended.')
    curve = None
    if rows and len(run.trials) == run.num_trials:
        values_EX = {n: np.array([row[n] for row in rows.values()], float) for n in LOGGED}
        curve = Curve(np.array(list(rows)), values_EX)
    return dataclasses.replace(run, curve=curve, step=max(logged))

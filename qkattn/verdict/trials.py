"""The result of a trial: a line of results.jsonl or an entry of a run's result.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from qkattn.metrics import METRICS, result_fields
from qkattn.run.records import DIVERGED, FINISHED
from qkattn.study.tuning import KNOBS, SCREENING, STAGES, Settings
from qkattn.verdict import reading


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trained model.

    Attributes:
      run, variant, size, stage, knob: of the trial's run.
      settings: all trial settings but the seed, sorted by name; trials of a run with the same
        settings are repetitions of each other.
      status: FINISHED or DIVERGED.
      target_parameters, residual: of matching; None if nothing is matched.
      metrics: all fields of `qkattn.metrics.result_fields()`; None if not measured or diverged.
      train_seconds, compile_seconds, tokens_per_second: of the run, all trials together.
      score_scale: of the model; it is not among the trial settings.
    """

    run: str
    variant: str
    size: str
    stage: str
    knob: str | None
    config_hash: str
    seed: int
    learning_rate: float
    settings: tuple[tuple[str, Any], ...]
    status: str
    num_steps: int
    num_tokens: int
    parameters: Mapping[str, int]
    target_parameters: float | None
    residual: float | None
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
    score_scale: float | None = None
    eval_rows: int | None = None

    @property
    def finished(self) -> bool:
        return self.status == FINISHED

    @property
    def val_loss(self) -> float | None:
        """Nats/token."""
        return self.metrics['val_loss']

    @property
    def at(self) -> Settings:
        """The values of all knobs."""
        return self.learning_rate, dict(self.settings)['weight_decay'], self.score_scale

    @property
    def key(self) -> tuple:
        """Identifies the trial within its run."""
        return self.seed, self.settings


_PARTS = {
    'trial': {'seed': int, 'learning_rate': float, 'weight_decay': float},
    'parameters': {'attention': int, 'total': int},
    'config': {'d_model': int, 'd_ff': int},
    'data': dict,
}
_METRIC_FIELDS = result_fields()
# Losses that every result holds, null if not measured.
_LOSSES = [
    name
    for metric in METRICS.values()
    if metric.role == 'loss' and metric.logged
    for name in metric.fields
]


def parse_trial(record: Any) -> Trial:
    """Reads a trial from its JSON object; raises ValueError that names the bad field."""
    reading.check(record, {'run': str})
    measured = [*_LOSSES, *(name for name in _METRIC_FIELDS if name in record)]
    reading.check(record, _PARTS | {name: _METRIC_FIELDS[name] | None for name in measured})
    if 'source' in record['data'] or 'target' in record['data']:
        reading.check(record['data'], {'source': dict, 'target': dict})
    for data in corpora(record['data']):
        reading.check(data, {'name': str, 'version': str | int})
    trial = record['trial']
    result = reading.read(
        Trial,
        record,
        seed=trial['seed'],
        learning_rate=trial['learning_rate'],
        settings=tuple(sorted((k, v) for k, v in trial.items() if k != 'seed')),
        metrics={name: record.get(name) for name in _METRIC_FIELDS},
    )
    check_stage(result.stage, result.knob)
    _check_outcome(result)
    if result.config_hash != result.run:
        raise ValueError(
            f'its config_hash {result.config_hash!r} is not that of the planned run '
            f'{result.run!r}, so it was trained with other settings'
        )
    return result


def check_stage(stage: str, knob: str | None) -> None:
    """Raises ValueError unless stage and knob are valid and consistent."""
    if stage not in STAGES:
        raise ValueError(f"field 'stage' is {stage!r}, expected {', '.join(STAGES)}")
    valid = KNOBS if stage == SCREENING else (None,)
    if knob not in valid:
        listed = ', '.join('null' if name is None else name for name in valid)
        raise ValueError(f"field 'knob' is {knob!r}, expected {listed} at stage {stage!r}")


def corpora(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The data sets of a trial: source and target of parallel text, otherwise one."""
    return (data['source'], data['target']) if 'source' in data else (data,)


def _check_outcome(trial: Trial) -> None:
    if trial.status not in (FINISHED, DIVERGED):
        raise ValueError(f"field 'status' is {trial.status!r}, expected {FINISHED} or {DIVERGED}")
    if not trial.finished:
        return
    if trial.val_loss is None:
        raise ValueError("field 'val_loss' of a finished trial is None")
    for name, value in trial.metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f'field {name!r} of a finished trial is {value}')

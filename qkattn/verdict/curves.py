"""Reads the evaluations during training of a run; a bad line is left out and named."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.metrics import LOGGED
from qkattn.verdict import reading
from qkattn.verdict.declared import Planned

MAX_NAMED = 2


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluations of one run: steps [E], and by field of `qkattn.metrics.LOGGED` values [E, X].

    NaN where a trial has diverged or has no such metric, as bits/byte where there are no bytes.
    """

    steps_E: np.ndarray
    values_EX: Mapping[str, np.ndarray]


def read_curve(
    directory: Path, run: Planned, num_trials: int, problems: list[str]
) -> tuple[Curve | None, int | None]:
    """The curve of a run with `num_trials` results, and its last logged step."""
    path = directory / 'metrics.jsonl'
    if not path.is_file():
        return None, None
    label = f'{run.directory}/{path.name}'
    steps: list[int] = []
    rows: dict[str, list[list[float]]] = {name: [] for name in LOGGED}
    last_step = 0
    bad: list[str] = []
    for place, record in reading.json_lines(path, label, bad):
        try:
            reading.check(record, {'kind': str, 'step': int})
            last_step = max(last_step, record['step'])
            if record['kind'] != 'eval':
                continue
            values = _per_trial(record, num_trials)
            if steps and record['step'] <= steps[-1]:
                raise ValueError(f'step {record["step"]} follows step {steps[-1]}')
            steps.append(record['step'])
            for name in LOGGED:
                rows[name].append(values[name])
        except ValueError as error:
            bad.append(f'{place} was left out: {error}.')
    problems += bad[:MAX_NAMED]
    if more := len(bad[MAX_NAMED:]):
        problems.append(f'{label}: {more} more lines were left out.')
    if not num_trials or not steps:
        return None, last_step
    return Curve(np.array(steps), {name: np.array(rows[name]) for name in LOGGED}), last_step


def _per_trial(record: Mapping[str, Any], num_trials: int) -> dict[str, list[float]]:
    """The values of all trials by field; `num_trials` is 0 if it is not known."""
    reading.check(record, {'val_loss': tuple[float | None, ...]})
    reading.check(
        record, {name: tuple[float | None, ...] | None for name in LOGGED if name in record}
    )
    number = num_trials or len(record['val_loss'])
    values = {name: record.get(name) or [None] * number for name in LOGGED}
    for name, row in values.items():
        if len(row) != number:
            raise ValueError(f'field {name!r} has {len(row)} values for {number} trials')
    return {
        name: [math.nan if value is None else value for value in row]
        for name, row in values.items()
    }

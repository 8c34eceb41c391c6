"""Reads the evaluations during training of a run; a bad line is named and left out."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qkattn.verdict.trials import NUMBER, OPTIONAL, TEXT, check_fields


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluations of one run: steps [E], nats/token and bits/byte [E, X].

    NaN where a trial has diverged, and for bits/byte where there are no bytes.
    """

    steps_E: np.ndarray
    val_loss_EX: np.ndarray
    val_bits_per_byte_EX: np.ndarray


def json_lines(path: Path, label: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields ('file:line', object); lines that are not JSON become problems."""
    with path.open(encoding='utf-8', errors='replace') as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f'{label}:{number}', json.loads(line)
            except ValueError as error:
                problems.append(f'{label}:{number} is not JSON ({error}) and was left out.')


class _Planned(Protocol):
    directory: str
    config: Mapping[str, Any]


def read_curve(
    directory: Path, run: _Planned, num_trials: int, problems: list[str]
) -> tuple[Curve | None, int | None]:
    """The curve of a run with `num_trials` results, and the last step that it has logged."""
    path = directory / 'metrics.jsonl'
    if not path.is_file():
        return None, None
    label = f'{run.directory}/{path.name}'
    steps, losses, bits, last_step, bad = [], [], [], 0, []
    for place, record in json_lines(path, label, bad):
        try:
            check_fields(record, {'kind': TEXT, 'step': (int,)})
            last_step = max(last_step, record['step'])
            if record['kind'] != 'eval':
                continue
            check_fields(record, {'val_loss': (list,), 'val_bits_per_byte': (list, *OPTIONAL)})
            loss = _per_trial(record, 'val_loss')
            if num_trials and len(loss) != num_trials:
                raise ValueError(f'{len(loss)} evaluations for {num_trials} trials')
            absent = record['val_bits_per_byte'] is None
            size = [math.nan] * len(loss) if absent else _per_trial(record, 'val_bits_per_byte')
            if len(size) != len(loss):
                raise ValueError(f'{len(loss)} losses, but bits/byte of {len(size)} trials')
            if steps and record['step'] <= steps[-1]:
                raise ValueError(f'step {record["step"]} follows step {steps[-1]}')
            steps.append(record['step'])
            losses.append(loss)
            bits.append(size)
        except ValueError as error:
            bad.append(f'{place} was left out: {error}.')
    problems += bad[:2]
    if bad[2:]:
        problems.append(f'{label}: {len(bad[2:])} more lines were left out.')
    if not num_trials or not steps:
        return None, last_step
    return Curve(np.asarray(steps), np.asarray(losses, float), np.asarray(bits, float)), last_step


def _per_trial(record: dict[str, Any], field: str) -> list[float]:
    row = [math.nan if value is None else value for value in record[field]]
    for value in row:
        if isinstance(value, bool) or not isinstance(value, NUMBER):
            raise ValueError(f'field {field!r} holds {value!r}')
    return row

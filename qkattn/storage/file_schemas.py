"""What the files of runs and studies hold: the schemas that they are read back by."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.metrics import METRICS, TIMES, result_fields
from qkattn.storage.json_schema import check
from qkattn.storage.records import DIVERGED, FINISHED, damaged, read_json

CONFIG = {'hash': str, 'config': dict}
# A start in provenance.json, and the file.
START = {'git': dict, 'python': str, 'versions': dict, 'devices': dict}
PROVENANCE = {'starts': [START]}
# A result: an entry of result.json. `check_result` adds the metrics.
RESULT = {
    'trial': {'seed': int, 'learning_rate': float, 'weight_decay': float},
    'status': str,
    'num_steps': int,
    'num_tokens': int,
    'config_hash': str,
    'parameters': {'attention': int, 'total': int},
    'config': {'d_model': int, 'd_ff': int},
    'flops_per_token': float,
    'cache_floats_per_token': float | None,
    'eval_tokens': int | None,
    'data': dict,
    'provenance': dict,
}
# The last record of metrics.jsonl, beside the metrics of all trials.
FINAL = {'trials': tuple[dict, ...], 'eval_tokens': int | None, 'test_tokens': int | None}
# A split of documents.json: names and targets of documents, and nats of each trial.
DOCUMENTS = {
    'documents': tuple[str, ...],
    'tokens': tuple[float, ...],
    'nats': tuple[tuple[float, ...] | None, ...],
}

# Files of a run that reports are not made from.
RUN_FILES = {'config.json': CONFIG, 'provenance.json': PROVENANCE, 'result.json': [RESULT]}
# What is read of study.json before it is compared field by field, and an arm in it.
STUDY = {
    'base': dict,
    **dict.fromkeys(('variants', 'sizes', 'corpora', 'arms'), list),
}
ORPHAN = {
    'directory': str,
    'run': str | None,
    'config': dict | None,
    'results': list | None,
}
PLACE = {'variant': str, 'size': str, 'corpus': str, 'control': str | None}

_METRICS = result_fields()
# Losses that every result holds, null if not measured.
_LOSSES = {f for m in METRICS.values() if m.role == 'loss' and m.logged for f in m.fields}


def read_results(path: Path, trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results of a run's trials.

    Raises:
      RunDirectoryError: the file is damaged, or holds other trials.
    """
    return as_results(read_json(path, [{}], _ADVICE), trials, path)


def as_results(
    results: list[dict[str, Any]], trials: Sequence[Mapping[str, Any]], path: Path
) -> list[dict[str, Any]]:
    """`results`, which were read from `path`, if they are those of the trials; raises likewise."""
    try:
        for number, result in enumerate(results):
            try:
                check_result(result)
            except ValueError as error:
                raise ValueError(f'trial {number}: {error}') from error
        found = [result['trial'] for result in results]
        # Settings that trials have gained since the file was written are not in it.
        known = [{n: v for n, v in trial.items() if n in found[0]} for trial in trials]
        if found != known:
            raise ValueError(f'it has results of {len(found)} trials that are not those of the run')
    except ValueError as error:
        raise damaged(path, error, _ADVICE) from error
    return results


def check_result(record: Any) -> None:
    """Raises ValueError that names the field unless `record` is a result, or has more fields."""
    check(record, RESULT)
    check(record, {n: hint | None for n, hint in _METRICS.items() if n in record or n in _LOSSES})
    check(record, {name: float | None for name in TIMES if name in record})
    if 'diverged_at' in record:  # later than the other fields
        check(record, {'diverged_at': int | None})
    if record['status'] not in (FINISHED, DIVERGED):
        raise ValueError(
            f"field 'status' is {record['status']!r}, expected {FINISHED} or {DIVERGED}"
        )
    if record['status'] == FINISHED and record['val_loss'] is None:
        raise ValueError("field 'val_loss' of a finished trial is None")


_ADVICE = (
    'restore it from a copy, or remove it: the same command then makes it again from the newest '
    'checkpoint'
)

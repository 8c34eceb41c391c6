"""What a run leaves for reports: an object per trial, per evaluation, and per document."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.config import fingerprint
from qkattn.data import pipeline
from qkattn.errors import ConfigError
from qkattn.metrics import (
    PREFIXES,
    Metric,
    bits_per_byte,
    logged_fields,
    result_fields,
    with_outside,
)
from qkattn.model import cost
from qkattn.model.sites import attention_spec
from qkattn.storage.records import (
    DIVERGED,
    FINISHED,
    PROVENANCE,
    START,
    described,
    metrics_of,
    read_json,
    to_jsonable,
)
from qkattn.train.trials import Evaluation, Stack


def trial_results(
    stack: Stack,
    evaluations: Mapping[str, Evaluation],
    costs: Mapping[str, Any],
    about: Mapping[str, Any],
    diverged_at: Mapping[int, int | None],
) -> list[dict[str, Any]]:
    """The results of a finished run, in trial order; JSON.

    Args:
      stack: the trained trials.
      evaluations: the last evaluation of each split but 'train'.
      costs: times of the run, which all results hold.
      about: further fields that all results hold.
      diverged_at: by trial number, the step at which a trial diverged.
    """
    num_steps = stack.step
    validation = evaluations['validation']
    evaluated = {
        name: metric for name, metric in validation.metrics.items() if metric.value is not None
    }
    of_task = {metric.name: metric for metric in stack.rows.metrics}
    common = {**_common(stack, evaluations, costs), **about, **described({**evaluated, **of_task})}
    alive_X = stack.alive_X
    # A finite gradient in the last step may still have left parameters with an infinite loss.
    finished_X = alive_X & np.isfinite(validation.values['loss'])
    end_metrics = _end_metrics(stack, finished_X)
    results = []
    for x, trial in enumerate(stack.config.trials.trials()):
        is_finished = bool(finished_X[x])
        result: dict[str, Any] = {'trial': trial}
        result['status'] = FINISHED if is_finished else DIVERGED
        result['diverged_at'] = diverged_at.get(x)
        if alive_X[x] and not is_finished:
            result['diverged_at'] = num_steps
        result |= common
        sound_evaluations = evaluations if is_finished else {}
        result |= _metrics_of_trial(x, sound_evaluations, evaluated)
        for field, values_X in end_metrics.items():
            result[field] = values_X[x] if is_finished else None
        results.append(result)
    return to_jsonable(results)


def _metrics_of_trial(
    x: int, evaluations: Mapping[str, Evaluation], evaluated: Mapping[str, Metric]
) -> dict[str, float | None]:
    """The metrics of trial x on each split, as 'val_loss'; None where there is no value."""
    fields: dict[str, float | None] = {}
    for split, prefix in PREFIXES.items():
        values: Mapping[str, np.ndarray | None] = {}
        if split in evaluations:
            values = evaluations[split].values
        for name, metric in evaluated.items():
            if prefix in metric.prefixes:
                value_X = values.get(name)
                fields[metric.field(prefix)] = None if value_X is None else float(value_X[x])
    return fields


def _end_metrics(stack: Stack, finished_X: np.ndarray) -> Mapping[str, Any]:
    """What the task measures when training ends, [X] by result field.

    ConfigError for a field that no metric of the package or of the task has.
    """
    measured = stack.rows.end_metrics(stack, finished_X)
    known = result_fields(with_outside(stack.rows.metrics))
    for field in measured:
        if field not in known:
            raise ConfigError(
                f'end_metrics of {type(stack.rows).__name__} measures {field!r}, which is no field '
                f'of a metric; valid: {", ".join(known)}'
            )
    return measured


def _common(
    stack: Stack, evaluations: Mapping[str, Evaluation], costs: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that the results of all trials share."""
    config = stack.config
    model = config.model
    rows = stack.rows
    num_steps = stack.step
    spec = attention_spec(model)
    unigram_nats = rows.unigram_nats('validation')
    bytes_per_token = rows.bytes_per_token('validation')
    unigram_bits_per_byte = None
    if unigram_nats is not None and bytes_per_token is not None:
        unigram_bits_per_byte = bits_per_byte(unigram_nats, bytes_per_token)
    return {
        'num_steps': num_steps,
        'num_tokens': num_steps * config.train.batch_size * model.context,
        'parameters': cost.count(model),
        'config': {
            'd_model': model.d_model,
            'd_ff': model.mlp_width,
            'num_layers': model.num_layers,
            'num_heads': model.num_heads,
            'num_kv_heads': spec.num_kv_heads,
            'head_size': spec.head_size,
        },
        'config_hash': fingerprint(config),
        'flops_per_token': cost.flops_per_token(model),
        'cache_floats_per_token': cost.cache_floats_per_token(model),
        **costs,
        'data': {
            **rows.identity(),
            'unigram_loss': unigram_nats,
            'unigram_bits_per_byte': unigram_bits_per_byte,
        },
        'eval_tokens': evaluations['validation'].num_targets,
        'test_tokens': evaluations['test'].num_targets if 'test' in evaluations else None,
        'eval_rows': evaluations['validation'].num_rows,
    }


def document_results(
    stack: Stack, evaluations: Mapping[str, Evaluation], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Targets and nats of every document of each split: {split: {documents, tokens, nats}}.

    `nats` [X, C] are null for a trial that diverged; of the others, sum(nats) / sum(tokens) is the
    loss. Rows of no document are dealt out in turn.
    """
    splits = {}
    for split, evaluation in evaluations.items():
        max_rows = stack.config.data.eval_sequences
        names, document_R = pipeline.clusters(stack.rows, split, max_rows)
        by_document = functools.partial(_sums_by_document, document_R, len(names))
        targets_C = by_document(evaluation.targets_R)
        has_targets_C = targets_C > 0
        nats: list[list[float] | None] = []
        for nats_R, result in zip(evaluation.nats_RX.T, results, strict=True):
            if result['status'] == FINISHED:
                nats.append(by_document(nats_R)[has_targets_C].tolist())
            else:
                nats.append(None)
        splits[split] = {
            'documents': list(itertools.compress(names, has_targets_C)),
            'tokens': targets_C[has_targets_C].astype(int).tolist(),
            'nats': nats,
        }
    return splits


def _sums_by_document(
    document_R: np.ndarray, num_documents: int, values_R: np.ndarray
) -> np.ndarray:
    """The sums [C] of values over the rows of each document, whose number document_R holds.

    Values of rows beyond these, which pad the last batch, are left out.
    """
    values_R = values_R[: len(document_R)]
    return np.bincount(document_R, weights=values_R, minlength=num_documents)


def eval_record(step: int, evaluation: Evaluation) -> dict[str, Any]:
    """The record of an evaluation on the validation split, for all trials."""
    logged = {
        field: evaluation.values[field.removeprefix('val_')]
        for field in logged_fields(evaluation.metrics)
    }
    return {'kind': 'eval', 'step': step, **logged}


def final_record(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last record of metrics.jsonl: the results' metrics, one value per trial."""
    first = results[0]
    fields = result_fields(metrics_of(first))
    present = [name for name in fields if any(name in result for result in results)]
    return {
        'kind': 'final',
        'step': first['num_steps'],
        'trials': [result['trial'] for result in results],
        'eval_tokens': first['eval_tokens'],
        'test_tokens': first['test_tokens'],
        **{name: [result.get(name) for result in results] for name in present},
    }


def with_this_start(directory: Path, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The code, without repetition, of the starts `before` and of this one, which is the last."""
    start = read_json(directory / 'provenance.json', PROVENANCE)['starts'][-1]
    code = {name: start[name] for name in ('git', 'imported')}
    others = [earlier for earlier in before if earlier != code]
    return [*others, code]


def software_of(
    directory: Path, read_files: Mapping[str, str], code: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The provenance of results: the software and devices of the last start.

    'imported' holds the sha256 of modules from outside and of `read_files`, which the run read.
    'earlier' holds the `code` of earlier starts that the run was resumed from, if it was another
    one. Both are absent where they are empty. User and host stay in provenance.json.
    """
    start = read_json(directory / 'provenance.json', PROVENANCE)['starts'][-1]
    provenance = {name: start[name] for name in START}
    imported = {**start['imported'], **read_files}
    earlier = list(code[:-1])
    if imported:
        provenance['imported'] = imported
    if earlier:
        provenance['earlier'] = earlier
    return provenance

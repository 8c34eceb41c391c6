"""What a run leaves for reports: an object per trial, per evaluation, and per document."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.config import fingerprint
from qkattn.data import pipeline
from qkattn.decode.translate import score_trial
from qkattn.metrics import PREFIXES, bits_per_byte, logged_fields, result_fields
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

    `evaluations` are the last of each split but 'train', `diverged_at` the steps by trial number;
    `costs` and `about` are what all results hold.
    """
    num_steps = stack.step
    evaluated = {n: m for n, m in evaluations['validation'].metrics.items() if m.value is not None}
    common = {**_common(stack, evaluations, costs), **about, **described(evaluated)}
    measured = stack.induction() or {}
    loss_X, alive_X = evaluations['validation'].values['loss'], stack.alive_X
    results = []
    for x, trial in enumerate(stack.config.trials.trials()):
        # A finite gradient in the last step may still have left parameters with an infinite loss.
        finite = bool(alive_X[x] and np.isfinite(loss_X[x]))
        at = num_steps if alive_X[x] and not finite else diverged_at.get(x)
        status = {'status': FINISHED if finite else DIVERGED, 'diverged_at': at}
        result = {'trial': trial, **status, **common}
        for split, prefix in PREFIXES.items():
            values = evaluations[split].values if finite and split in evaluations else {}
            for name, metric in evaluated.items():
                if prefix in metric.prefixes:
                    value_X = values.get(name)
                    result[metric.field(prefix)] = None if value_X is None else float(value_X[x])
        result |= {name: float(v_X[x]) if finite else None for name, v_X in measured.items()}
        if finite:
            params = functools.partial(stack.params, x)
            result |= score_trial(stack.config, stack.rows, params) or {}
        results.append(result)
    return to_jsonable(results)


def _common(
    stack: Stack, evaluations: Mapping[str, Evaluation], costs: Mapping[str, Any]
) -> dict[str, Any]:
    config, rows, num_steps = stack.config, stack.rows, stack.step
    model, spec = config.model, attention_spec(config.model)
    unigram, size = rows.unigram_nats('validation'), rows.bytes_per_token('validation')
    known = unigram is not None and size is not None
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
            'unigram_loss': unigram,
            'unigram_bits_per_byte': bits_per_byte(unigram, size) if known else None,
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
        count = len(document_R)  # rows that pad the last batch follow
        sums = functools.partial(np.bincount, document_R, minlength=len(names))
        targets_C = sums(weights=evaluation.targets_R[:count])
        present_C = targets_C > 0
        splits[split] = {
            'documents': [name for name, present in zip(names, present_C, strict=True) if present],
            'tokens': targets_C[present_C].astype(int).tolist(),
            'nats': [
                sums(weights=nats_R[:count])[present_C].tolist()
                if result['status'] == FINISHED
                else None
                for nats_R, result in zip(evaluation.nats_RX.T, results, strict=True)
            ],
        }
    return splits


def eval_record(step: int, evaluation: Evaluation) -> dict[str, Any]:
    """The record of an evaluation on the validation split, for all trials."""
    names = {field: field.removeprefix('val_') for field in logged_fields(evaluation.metrics)}
    logged = {field: evaluation.values[name] for field, name in names.items()}
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
    return [*(other for other in before if other != code), code]


def software_of(
    directory: Path, given: Mapping[str, str], code: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The provenance of results, with the sha256 of what the run was `given` beside its modules.

    It is that of the last start, beside the `code` of earlier ones, if another, that the run was
    resumed from. User and host stay in provenance.json.
    """
    start = read_json(directory / 'provenance.json', PROVENANCE)['starts'][-1]
    imported, earlier = {**start['imported'], **given}, list(code[:-1])
    parts = {'imported': imported, 'earlier': earlier}
    return {name: start[name] for name in START} | {n: part for n, part in parts.items() if part}

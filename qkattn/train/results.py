"""What a run leaves for reports: an object per trial, per evaluation, and per document."""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config import Config, fingerprint
from qkattn.data.tasks.rows import Rows
from qkattn.metrics import EVALUATED, METRICS, PREFIXES, bits_per_byte, result_fields
from qkattn.model import cost
from qkattn.model.sites import attention_spec
from qkattn.storage.records import DIVERGED, FINISHED, to_jsonable
from qkattn.train.measurements import (
    STACK_MEASUREMENTS,
    TRIAL_MEASUREMENTS,
    Evaluation,
    by_document,
)
from qkattn.train.placement import fetch
from qkattn.train.program import Program

log = logging.getLogger(__name__)

MAX_NAMED = 4  # diverged trials in a warning; the others are counted


def of_trials(
    config: Config,
    program: Program,
    rows: Rows,
    state: dict,
    reached: Mapping[str, Evaluation],
    costs: Mapping[str, Any],
    provenance: Mapping[str, Any],
    diverged_at: Sequence[int | None],
) -> list[dict[str, Any]]:
    """The results of a finished run, in trial order; JSON.

    Args:
      reached: the last evaluation of each split but 'train'.
      costs: seconds, tokens per second and lifting, of the whole run.
      provenance: of the software and devices; user and host stay in provenance.json.
      diverged_at: the step at which each trial diverged; None for those that did not.
    """
    model, num_steps = config.model, int(state['step'])
    unigram, size = rows.unigram_nats('validation'), rows.bytes_per_token('validation')
    common = {
        'num_steps': num_steps,
        'num_tokens': num_steps * config.train.batch_size * model.context,
        'parameters': cost.count(model),
        'config': {
            'd_model': model.d_model,
            'd_ff': model.mlp_width,
            'num_layers': model.num_layers,
            'num_heads': model.num_heads,
            'num_kv_heads': attention_spec(model).num_kv_heads,
            'head_size': attention_spec(model).head_size,
        },
        'config_hash': fingerprint(config),
        'flops_per_token': cost.flops_per_token(model),
        'cache_floats_per_token': cost.cache_floats_per_token(model),
        **costs,
        'data': {
            **rows.identity(),
            'unigram_loss': unigram,
            'unigram_bits_per_byte': (
                None if unigram is None or size is None else bits_per_byte(unigram, size)
            ),
        },
        'eval_tokens': reached['validation'].num_targets,
        'test_tokens': reached['test'].num_targets if 'test' in reached else None,
        'eval_rows': reached['validation'].num_rows,
        'provenance': provenance,
    }
    measured: dict[str, np.ndarray] = {}
    for measure_stack in STACK_MEASUREMENTS:
        measured |= measure_stack(config, program, rows, state) or {}
    alive_X = fetch(state['trials']['alive'])
    loss_X = reached['validation'].values['loss']
    results = []
    for x, trial in enumerate(config.trials.trials()):
        # A finite gradient in the last step may still have left parameters with an infinite loss.
        finite = bool(alive_X[x] and np.isfinite(loss_X[x]))
        at = num_steps if alive_X[x] and not finite else diverged_at[x]
        status = {'status': FINISHED if finite else DIVERGED, 'diverged_at': at}
        result = {'trial': trial, **status, **common}
        for split, prefix in PREFIXES.items():
            result |= _of_split(reached.get(split) if finite else None, prefix, x)
        result |= {name: float(v_X[x]) if finite else None for name, v_X in measured.items()}
        for measure_trial in TRIAL_MEASUREMENTS if finite else ():
            result |= measure_trial(config, rows, functools.partial(_params, state, x)) or {}
        results.append(result)
    return to_jsonable(results)


def of_documents(
    config: Config,
    rows: Rows,
    reached: Mapping[str, Evaluation],
    trial_results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Targets and nats of every document of each split: {split: {documents, tokens, nats}}.

    `nats` are null for a trial that diverged; of the others, sum(nats) / sum(tokens) is the loss.
    """
    splits = {split: by_document(config, rows, split, found) for split, found in reached.items()}
    for found in splits.values():
        found['nats'] = [
            nats_C if result['status'] == FINISHED else None
            for nats_C, result in zip(found['nats'], trial_results, strict=True)
        ]
    return splits


def final_record(trial_results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last record of metrics.jsonl: the results' metrics, one value per trial."""
    first = trial_results[0]
    present = [n for n in result_fields() if any(n in result for result in trial_results)]
    return {
        'kind': 'final',
        'step': first['num_steps'],
        'trials': [result['trial'] for result in trial_results],
        'eval_tokens': first['eval_tokens'],
        'test_tokens': first['test_tokens'],
        **{name: [result.get(name) for result in trial_results] for name in present},
    }


def warn_of_diverged(directory: Path, trial_results: Sequence[Mapping[str, Any]]) -> None:
    """Logs how many trials diverged, if any, at which seeds, learning rates and steps."""
    lost = [result for result in trial_results if result['status'] == DIVERGED]
    if not lost:
        return
    number = len(trial_results)
    named = [
        f'seed {of["trial"]["seed"]} at learning rate {of["trial"]["learning_rate"]:g}'
        + ('' if of['diverged_at'] is None else f' at step {of["diverged_at"]:,}')
        for of in lost[:MAX_NAMED]
    ]
    named += [f'{len(lost) - MAX_NAMED} more'] * (len(lost) > MAX_NAMED)
    who, advice = f'{len(lost)} of {number} trials diverged', ''
    if len(lost) == number:
        who = 'the only trial' if number == 1 else f'all {number} trials'
        who, advice = f'{who} diverged, the run has no losses', '; lower trials.learning_rates'
    log.warning('%s: %s: %s%s', directory, who, ', '.join(named), advice)


def of_evaluation(step: int, reached: Evaluation) -> dict[str, Any]:
    """The record of an evaluation on the validation split, for all trials."""
    logged = {m.field('val'): reached.values[m.name] for m in METRICS.values() if m.logged}
    return {'kind': 'eval', 'step': step, **logged, **reached.attention}


def _of_split(reached: Evaluation | None, prefix: str, x: int) -> dict[str, float | None]:
    """Every evaluated metric of one trial on one split; None where there is no value."""
    measured = {}
    for name, metric in EVALUATED.items():
        values_X = None if reached is None else reached.values[name]
        measured[metric.field(prefix)] = None if values_X is None else float(values_X[x])
    return measured


def _params(state: dict, x: int) -> dict:
    """One trial's parameters, on one device."""
    return jax.tree.map(lambda a: jnp.asarray(fetch(a[x])), state['trials']['params'])

"""What a run leaves for reports: one object per trial, and one per evaluation on the way."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config import Config, fingerprint
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.translation import TranslationRows
from qkattn.decode.translate import score_split
from qkattn.metrics import PREFIXES, bits_per_byte, perplexity
from qkattn.model import cost, with_params
from qkattn.model.sites import attention_spec
from qkattn.run.records import to_jsonable
from qkattn.train.evaluation import Evaluation, Induction

# Trial outcomes.
FINISHED, DIVERGED = 'finished', 'diverged'

# Of an evaluation on the way; a result has more.
MEASURES = ('loss', 'bits_per_byte', 'accuracy', 'solved')


def of_trials(
    config: Config,
    rows: Rows,
    state: dict,
    reached: Mapping[str, Evaluation],
    induction: Induction | None,
    costs: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The results of a finished run, in trial order; JSON.

    Args:
      reached: the last evaluation of each split but 'train'.
      induction: on the validation split, where there is such a thing.
      costs: seconds and the like, of the whole run.
      provenance: what made the numbers; who and where stays in provenance.json.
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
        'eval_rows': reached['validation'].num_rows,
        'provenance': provenance,
    }
    alive_X = np.asarray(state['trials']['alive'])
    found = []
    for x, trial in enumerate(config.trials.trials()):
        # The last update, too, may have left what cannot be evaluated.
        finite = bool(alive_X[x] and np.isfinite(reached['validation'].loss_X[x]))
        result = {'trial': trial, 'status': FINISHED if finite else DIVERGED, **common}
        for split, prefix in PREFIXES.items():
            result |= _of_split(reached.get(split) if finite else None, prefix, x)
        result |= _of_induction(induction if finite else None, x)
        if finite and isinstance(rows, TranslationRows):
            result |= _translation_scores(config, rows, state, x)
        found.append(result)
    return to_jsonable(found)


def of_evaluation(step: int, reached: Evaluation) -> dict[str, Any]:
    """The record of an evaluation on the validation split, for all trials."""
    measured = {f'val_{name}': getattr(reached, f'{name}_X') for name in MEASURES}
    return {'kind': 'eval', 'step': step, **measured}


def _of_split(reached: Evaluation | None, prefix: str, x: int) -> dict[str, float | None]:
    """One trial on one split; None for each measure where there is no such split."""
    names = (*MEASURES, 'loss_se')
    values = [None if reached is None else getattr(reached, f'{name}_X') for name in names]
    measured = {
        name: None if value is None else float(value[x])
        for name, value in zip(names, values, strict=True)
    }
    loss = measured['loss']
    measured['perplexity'] = None if loss is None else perplexity(loss)
    return {f'{prefix}_{name}': value for name, value in measured.items()}


def _of_induction(found: Induction | None, x: int) -> dict[str, float | None]:
    """One trial of the induction probe; None where it means nothing."""
    return {
        'val_induction_gain': None if found is None else float(found.gain_X[x]),
        'val_induction_accuracy': None if found is None else float(found.accuracy_X[x]),
    }


def _translation_scores(
    config: Config, rows: TranslationRows, state: dict, x: int
) -> dict[str, Any]:
    """BLEU and the like of one trial, on one device."""
    params = jax.tree.map(lambda a: jnp.asarray(np.asarray(a[x])), state['trials']['params'])
    model = with_params(config.model, params)
    scores = {}
    for split in rows.splits[1:]:
        found = score_split(
            model, rows.pairs, split, config.decode, lowercase=config.data.lowercase
        )
        scores |= {f'{PREFIXES[split]}_{name}': value for name, value in found.items()}
    return scores

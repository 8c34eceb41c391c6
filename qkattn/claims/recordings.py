"""The drift between two factorizations of one function, trained side by side (B3).

A single head of `qk` has the logits x W_Q (y W_K)^T, and the same as `query_free` with the one
matrix W_K' = W_K W_Q^T. From the same parameters, both are trained on the same batches with the
optimizer of all studies, without weight decay, in three precisions. On a fixed sample X, the normed
streams that the layers read at initialization, the logits X (X W_K')^T and X W_Q (X W_K)^T are
compared before and after training:

    products   of the trained qk, by two products against by one: rounding alone
    rounding   of the trained qk against the qk trained in float64: rounding, amplified by training
    apart      of the trained qk against the trained query_free: all that differs in training

A difference is |other - reference| / |reference| over all causal pairs, mean over the layers.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.analysis.matrices import drift
from qkattn.analysis.patterns import walk
from qkattn.claims.claim import Kind, Measure, Row, Speaks
from qkattn.claims.protocol import language_model, pick
from qkattn.claims.studies import recording
from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.model import with_params
from qkattn.storage.records import read_json
from qkattn.train.step import init_trial, train_trial

DTYPES = ('float64', 'float32', 'bfloat16')
COMPARED = {
    'products': 'rounding alone',
    'rounding': 'rounding, trained',
    'apart': 'trained apart',
}
SCHEMA = {'steps': tuple[int, ...], 'dtypes': Mapping[str, Mapping[str, tuple[float, ...]]]}
BEYOND = 3.0  # times rounding: a larger difference is not explained by it
Factors = dict[str, Any]  # by name, of all layers: w_q_DNH and w_k_DKH, or w_k_DKH alone


def record_drift(scale: str) -> dict[str, Any]:
    """The differences in each precision, at the first and the last step."""
    config = drift_config(scale)
    rows, by_dtype, reference = rows_of(config), {}, None
    x_LBTD = _sample(config, rows)
    for dtype in DTYPES:
        qk, free = (_trained(config, rows, score, dtype) for score in ('qk', 'query_free'))
        reference = reference or qk
        by_dtype[dtype] = {
            'products': [_difference(x_LBTD, a, merged(a, dtype), dtype) for a in qk],
            'rounding': [_difference(x_LBTD, *pair) for pair in zip(reference, qk, strict=True)],
            'apart': [_difference(x_LBTD, *pair) for pair in zip(qk, free, strict=True)],
        }
    return {'scale': scale, 'steps': [0, config.train.num_steps], 'dtypes': by_dtype}


def read_drift(directory: Path) -> list[Row]:
    """The differences in each precision at the first and the last step recorded.

    The claim is that the difference is numerical. It fails if the trained models differ by more
    than BEYOND times the difference that rounding explains.
    """
    recorded, rows = read_json(recording(directory), SCHEMA), []
    for dtype, values in recorded['dtypes'].items():
        explained = max(values['products'][-1], values['rounding'][-1])
        decides = Speaks.AGAINST if values['apart'][-1] > BEYOND * explained else Speaks.FOR
        for name, quantity in COMPARED.items():
            for place in (0, -1):
                speaks = decides if (name, place) == ('apart', -1) else Speaks.BESIDE
                context = {'precision': dtype, 'step': str(recorded['steps'][place])}
                numbers = values[name][place], speaks, 'fraction of the logits'
                rows.append(Row(quantity, Kind.MEASURED, context, *numbers))
    return rows


DRIFT = Measure('drift', read_drift, record_drift)


def drift_config(scale: str) -> Config:
    """A decoder of single heads and its training."""
    d_model = pick(scale, smoke=16, cpu=48, gpu=48)
    scale = 'smoke' if scale == 'smoke' else 'cpu'
    return language_model(scale, num_heads=1, seeds=1, d_model=d_model)


def merged(factors: Factors, dtype: str) -> Factors:
    """Single heads of `qk` as those of `query_free`: W_K' = W_K W_Q^T, computed in `dtype`."""
    with jax.enable_x64(dtype == 'float64'):
        w_q_LDNH, w_k_LDKH = (jnp.asarray(factors[n], dtype) for n in ('w_q_DNH', 'w_k_DKH'))
        return {'w_k_DKH': jnp.einsum('LDNH,LENH->LDNE', w_k_LDKH, w_q_LDNH)}


def _trained(config: Config, rows: Rows, score: str, dtype: str) -> list[Factors]:
    """The factors of the Score in float64, before and after training."""
    wide = 'float64' if dtype == 'float64' else 'float32'
    with jax.enable_x64(dtype == 'float64'):
        start = init_trial(config, jnp.uint32(0))['params']
        params = jax.tree.map(lambda p: jnp.asarray(p, wide), start)
        if score == 'query_free':
            attention = params['blocks']['attention']
            attention['score'] = merged(attention['score'], wide)
        model = dataclasses.replace(config.model, score=score, compute_dtype=dtype)
        config = dataclasses.replace(config, model=model)
        untrained = trial = init_trial(config, jnp.uint32(0)) | {'params': params}
        rate = jnp.float32(config.trials.learning_rates[0])
        hyper = {'seed': jnp.uint32(0), 'learning_rate': rate, 'weight_decay': jnp.float32(0)}
        step = jax.jit(lambda k, trial, batch: train_trial(config, k, trial, hyper, batch)[0])
        for number in range(config.train.num_steps):
            batch = train_batch(rows, seed=0, step=number, batch_size=config.train.batch_size)
            trial = step(jnp.int32(number), trial, jax.tree.map(lambda a: a[None], batch))
        if not trial['alive']:
            raise ConfigError(f'{score} in {dtype} diverged; lower the learning rate of the drift')
        factors = [one['params']['blocks']['attention']['score'] for one in (untrained, trial)]
        return [{n: np.asarray(w, np.float64) for n, w in one.items()} for one in factors]


def _sample(config: Config, rows: Rows) -> np.ndarray:
    """x_LBTD: what the attention of each layer reads at initialization on 8 validation rows."""
    batch = next(eval_batches(rows, 'validation', batch_size=8, max_rows=8))
    params = init_trial(config, jnp.uint32(0))['params']

    @jax.jit
    def read_by_layers(params: dict) -> list[jax.Array]:
        seen: list[jax.Array] = []
        model = with_params(config.model, params)
        inputs = {'tokens_BT': batch['tokens_BT']}
        walk(model, inputs, lambda site, layer, attention, x_BTD, *_: seen.append(x_BTD))
        return seen

    return np.stack(read_by_layers(params)).astype(np.float64)


def _difference(
    x_LBTD: np.ndarray, reference: Factors, other: Factors, dtype: str = 'float64'
) -> float:
    """|other - reference| / |reference| of logits computed in `dtype`, mean over the layers."""
    pairs = zip(*(logits(x_LBTD, one, dtype) for one in (reference, other)), strict=True)
    return float(np.mean([drift(a, b) for a, b in pairs]))


def logits(x_LBTD: np.ndarray, factors: Factors, dtype: str) -> list[np.ndarray]:
    """Causal logits x W_Q (x W_K)^T of each layer in `dtype`, or x (x W_K)^T, as float64."""
    with jax.enable_x64(dtype == 'float64'):
        x_LBTD = jnp.asarray(x_LBTD, dtype)
        w_LDH = {name: jnp.asarray(w[:, :, 0], dtype) for name, w in factors.items()}
        k_LBSH = jnp.einsum('LBSD,LDH->LBSH', x_LBTD, w_LDH['w_k_DKH'])
        q_LBTH = x_LBTD
        if 'w_q_DNH' in w_LDH:
            q_LBTH = jnp.einsum('LBTD,LDH->LBTH', x_LBTD, w_LDH['w_q_DNH'])
        s_LBTS = np.asarray(jnp.einsum('LBTH,LBSH->LBTS', q_LBTH, k_LBSH), np.float64)
    return list(s_LBTS[..., np.tri(s_LBTS.shape[-1], dtype=bool)])

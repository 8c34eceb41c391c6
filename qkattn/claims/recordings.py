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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.analysis.matrices import drift
from qkattn.analysis.patterns import walk
from qkattn.claims.claim import Kind, Measure, Row, Speaks
from qkattn.claims.protocol import language_model, pick
from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.model import with_params
from qkattn.train.optimizer import optimizer
from qkattn.train.step import init_trial, train_trial

DTYPES = ('float64', 'float32', 'bfloat16')
COMPARED = {
    'products': 'rounding alone',
    'rounding': 'rounding, trained',
    'apart': 'trained apart',
}
BEYOND = 3.0  # times rounding: a larger difference is not explained by it


def record_drift(scale: str) -> dict[str, Any]:
    """The differences in each precision, at the first and the last step."""
    config = drift_config(scale)
    rows, by_dtype, reference = rows_of(config), {}, None
    x_LBTD = _sample(config, rows)
    for dtype in DTYPES:
        qk, free = (_trained(config, rows, score, dtype) for score in ('qk', 'query_free'))
        reference = reference or qk
        by_dtype[dtype] = _compared(x_LBTD, qk, free, reference, dtype)
    return {'scale': scale, 'steps': [0, config.train.num_steps], 'dtypes': by_dtype}


def read_drift(recorded: Mapping[str, Any]) -> list[Row]:
    """The differences in each precision at the first and the last step recorded.

    The claim is that the difference is numerical. It fails if the trained models differ by more
    than BEYOND times the difference that rounding explains.
    """
    rows = []
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


DRIFT = Measure(
    'drift',
    read_drift,
    record_drift,
    {'steps': tuple[int, ...], 'dtypes': Mapping[str, Mapping[str, tuple[float, ...]]]},
)


def drift_config(scale: str) -> Config:
    """A decoder of single heads and its training."""
    config = language_model('smoke' if scale == 'smoke' else 'cpu', num_heads=1, seeds=1)
    model = dataclasses.replace(config.model, d_model=pick(scale, smoke=16, cpu=48, gpu=48))
    train = dataclasses.replace(config.train, num_steps=pick(scale, smoke=20, cpu=500, gpu=500))
    return dataclasses.replace(config, model=model, train=train)


def as_query_free(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of single heads of `qk` as those of `query_free`: W_K' = W_K W_Q^T, exactly."""
    score = params['blocks']['attention']['score']
    w_k_LDKH = jnp.einsum('LDNH,LENH->LDNE', score['w_k_DKH'], score['w_q_DNH'])
    attention = {**params['blocks']['attention'], 'score': {'w_k_DKH': w_k_LDKH}}
    return {**params, 'blocks': {**params['blocks'], 'attention': attention}}


def _trained(config: Config, rows: Rows, score: str, dtype: Any) -> list[dict[str, np.ndarray]]:
    """The parameters of the Score in float64, before and after training."""
    with jax.enable_x64(dtype == 'float64'):
        start = init_trial(config, jnp.uint32(0))['params']
        model = dataclasses.replace(config.model, score=score, compute_dtype=dtype)
        config = dataclasses.replace(config, model=model)
        wide = jnp.float64 if dtype == 'float64' else jnp.float32
        params = jax.tree.map(lambda p: jnp.asarray(p, wide), start)
        params = params if score == 'qk' else as_query_free(params)
        zero = jnp.float32(0)
        state = optimizer(config.optimizer, zero, zero).init(params)
        trial = {'params': params, 'opt_state': state, 'alive': jnp.bool(True)}
        rate = jnp.float32(config.trials.learning_rates[0])
        hyper = {'seed': jnp.uint32(0), 'learning_rate': rate, 'weight_decay': zero}
        step = jax.jit(lambda k, trial, batch: train_trial(config, k, trial, hyper, batch)[0])
        untrained = trial
        for number in range(config.train.num_steps):
            batch = train_batch(rows, seed=0, step=number, batch_size=config.train.batch_size)
            trial = step(jnp.int32(number), trial, jax.tree.map(lambda a: a[None], batch))
        if not trial['alive']:
            raise ConfigError(f'{score} in {dtype} diverged; lower the learning rate of the drift')
        factors = [one['params']['blocks']['attention']['score'] for one in (untrained, trial)]
        return [{n: np.asarray(w, np.float64) for n, w in one.items()} for one in factors]


def _compared(
    x_LBTD: np.ndarray,
    trained: list[dict[str, np.ndarray]],
    apart: list[dict[str, np.ndarray]],
    reference: list[dict[str, np.ndarray]],
    dtype: str,
) -> dict[str, list[float]]:
    """COMPARED by step, of factors of qk, of query_free, and of qk trained in float64."""
    differences: dict[str, list[float]] = {name: [] for name in COMPARED}
    for qk, free, exact in zip(trained, apart, reference, strict=True):
        pairs = {
            'products': (logits(x_LBTD, qk, dtype, 2), logits(x_LBTD, qk, dtype, 1)),
            'rounding': (logits(x_LBTD, exact, 'float64', 2), logits(x_LBTD, qk, 'float64', 2)),
            'apart': (logits(x_LBTD, qk, 'float64', 2), logits(x_LBTD, free, 'float64', 1)),
        }
        for name, pair in pairs.items():
            layers = [drift(a, b) for a, b in zip(*pair, strict=True)]
            differences[name].append(float(np.mean(layers)))
    return differences


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


def logits(
    x_LBTD: np.ndarray, factors: Mapping[str, np.ndarray], dtype: str, products: int
) -> list[np.ndarray]:
    """Causal logits of each layer in `dtype`, as float64.

    With one product the keys are X W_K', where W_K' = W_K W_Q^T for factors of qk; with two, the
    keys are X W_K and the queries X W_Q.
    """
    with jax.enable_x64(dtype == 'float64'):
        y_LBSD = jnp.asarray(x_LBTD, dtype)
        w_k_LDH = jnp.asarray(factors['w_k_DKH'][:, :, 0], dtype)
        q_LBTH = y_LBSD
        if 'w_q_DNH' in factors:
            w_q_LDH = jnp.asarray(factors['w_q_DNH'][:, :, 0], dtype)
            if products == 2:
                q_LBTH = jnp.einsum('LBTD,LDH->LBTH', y_LBSD, w_q_LDH)
            else:
                w_k_LDH = jnp.einsum('LDH,LEH->LDE', w_k_LDH, w_q_LDH)
        k_LBSH = jnp.einsum('LBSD,LDH->LBSH', y_LBSD, w_k_LDH)
        s_LBTS = np.asarray(jnp.einsum('LBTH,LBSH->LBTS', q_LBTH, k_LBSH), np.float64)
    return list(s_LBTS[..., np.tri(s_LBTS.shape[-1], dtype=bool)])

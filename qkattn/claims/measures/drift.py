"""Two factorizations of one function, trained side by side from the same parameters.

A single head of `qk` has the logits x W_Q (y W_K)^T, and the same as `query_free` with the one
matrix W_K' = W_K W_Q^T. Both are trained on the same batches with the optimizer of all studies,
without weight decay, in three precisions. On a fixed sample X, the normed streams that the layers
read at initialization, the logits X (X W_K')^T and X W_Q (X W_K)^T are compared step by step:

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
from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.claims.protocol import language_model, pick
from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.model import with_params
from qkattn.storage.records import read_json, write_json
from qkattn.train.optimizer import optimizer
from qkattn.train.step import init_trial, train_trial

STUDY, FILE = 'drift', 'measures/drift.json'
DTYPES = ('float64', 'float32', 'bfloat16')
VARIANTS = ('qk', 'query_free')
CURVES = {
    'products': 'rounding alone',
    'rounding': 'rounding, trained',
    'apart': 'trained apart',
}
BEYOND = 3.0  # times rounding: a larger difference is not explained by it
_BY_STEP = Mapping[str, tuple[float, ...]]
_SCHEMA = {'steps': tuple[int, ...], 'dtypes': Mapping[str, _BY_STEP]}


def record(directory: Path, scale: str) -> None:
    """Writes measures/drift.json; precisions that it holds already are not trained again."""
    path, config = directory / FILE, settings(scale)
    found = read_json(path, _SCHEMA) if path.exists() else {}
    steps = sampled(config.train.num_steps)
    if found.get('scale') != scale:
        found = {'scale': scale, 'steps': steps, 'dtypes': {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, reference = rows_of(config), None
    for dtype in DTYPES:
        if dtype in found['dtypes']:
            continue
        if reference is None and dtype != DTYPES[0]:  # resumed: its parameters are not kept
            reference = _trained(config, rows, 'qk', DTYPES[0])
        trained = {score: _trained(config, rows, score, dtype) for score in VARIANTS}
        reference = trained['qk'] if reference is None else reference
        found['dtypes'][dtype] = _compared(config, rows, trained, reference, dtype)
        write_json(path, found)


def read(directory: Path) -> list[Row]:
    """Points of the three curves in each precision; the last ones decide.

    The claim is that the difference is numerical; it is not where models trained apart by more than
    BEYOND times what rounding explains. RunDirectoryError if the file is damaged.
    """
    path = directory / FILE
    if not path.exists():
        return []
    found, rows = read_json(path, _SCHEMA), []
    for dtype, curves in found['dtypes'].items():
        explained = max(curves['products'][-1], curves['rounding'][-1])
        speaks = Speaks.AGAINST if curves['apart'][-1] > BEYOND * explained else Speaks.FOR
        for name, what in CURVES.items():
            for step, value in zip(found['steps'], curves[name], strict=True):
                last = name == 'apart' and step == found['steps'][-1]
                rows.append(
                    Row(
                        what=what,
                        kind=Kind.MEASURED,
                        context={'precision': dtype},
                        value=value,
                        speaks=speaks if last else Speaks.BESIDE,
                        unit='fraction of the logits',
                        x=step,
                        x_label='step',
                        study=directory.name,
                    )
                )
    return rows


def settings(scale: str) -> Config:
    """A decoder of single heads and its training."""
    config = language_model('smoke' if scale == 'smoke' else 'cpu', num_heads=1, seeds=1)
    model = dataclasses.replace(config.model, d_model=pick(scale, smoke=16, cpu=48, gpu=48))
    train = dataclasses.replace(config.train, num_steps=pick(scale, smoke=20, cpu=500, gpu=500))
    return dataclasses.replace(config, model=model, train=train)


def sampled(num_steps: int) -> list[int]:
    """Steps at which the logits are compared, twice as far apart each time, and the last one."""
    return [0, *(2**n for n in range(num_steps.bit_length()) if 2**n < num_steps), num_steps]


def as_query_free(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of single heads of `qk` as those of `query_free`: W_K' = W_K W_Q^T, exactly."""
    score = params['blocks']['attention']['score']
    w_k_LDKH = jnp.einsum('LDNH,LENH->LDNE', score['w_k_DKH'], score['w_q_DNH'])
    attention = {**params['blocks']['attention'], 'score': {'w_k_DKH': w_k_LDKH}}
    return {**params, 'blocks': {**params['blocks'], 'attention': attention}}


def _trained(config: Config, rows: Rows, score: str, dtype: Any) -> list[dict[str, np.ndarray]]:
    """The parameters of the Score in float64, and the loss, at each of the sampled steps."""
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
        step = jax.jit(lambda k, trial, batch: train_trial(config, k, trial, hyper, batch))
        found = []
        for number in range(config.train.num_steps + 1):
            batch = train_batch(rows, seed=0, step=number, batch_size=config.train.batch_size)
            later, metrics = step(jnp.int32(number), trial, jax.tree.map(lambda a: a[None], batch))
            if number in sampled(config.train.num_steps):
                factors = trial['params']['blocks']['attention']['score']
                found.append({n: np.asarray(w, np.float64) for n, w in factors.items()})
                found[-1]['loss'] = np.asarray(metrics['loss'], np.float64)
            trial = later
        if not trial['alive']:
            raise ConfigError(f'{score} in {dtype} diverged; lower the learning rate of the drift')
    return found


def _compared(
    config: Config,
    rows: Rows,
    trained: Mapping[str, list[dict[str, np.ndarray]]],
    reference: list[dict[str, np.ndarray]],
    dtype: str,
) -> dict[str, list[float]]:
    """The curves, and the losses of both models, by step."""
    x_LBTD = _sample(config, rows)
    found: dict[str, list[float]] = {name: [] for name in CURVES}
    for qk, free, exact in zip(*(trained[score] for score in VARIANTS), reference, strict=True):
        logits = _logits(x_LBTD, qk, 'float64', products=2)
        others = {
            'products': (
                _logits(x_LBTD, qk, dtype, products=2),
                _logits(x_LBTD, qk, dtype, products=1),
            ),
            'rounding': (_logits(x_LBTD, exact, 'float64', products=2), logits),
            'apart': (logits, _logits(x_LBTD, free, 'float64', products=1)),
        }
        for name, (one, other) in others.items():
            by_layer = [drift(a, b) for a, b in zip(one, other, strict=True)]
            found[name].append(float(np.mean(by_layer)))
    losses = {f'loss_{score}': [float(s['loss']) for s in trained[score]] for score in VARIANTS}
    return found | losses


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


def _logits(
    x_LBTD: np.ndarray, factors: Mapping[str, np.ndarray], dtype: str, *, products: int
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

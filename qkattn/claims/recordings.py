"""Measures that record while checkpoints are there: drift, times of the scores, norms of factors.

Drift: two factorizations of one function, trained side by side from the same parameters. A single
head of `qk` has the logits x W_Q (y W_K)^T, and the same as `query_free` with the one matrix
W_K' = W_K W_Q^T. Both are trained on the same batches with the optimizer of all studies, without
weight decay, in three precisions. On a fixed sample X, the normed streams that the layers read at
initialization, the logits X (X W_K')^T and X W_Q (X W_K)^T are compared step by step:

    products   of the trained qk, by two products against by one: rounding alone
    rounding   of the trained qk against the qk trained in float64: rounding, amplified by training
    apart      of the trained qk against the trained query_free: all that differs in training

A difference is |other - reference| / |reference| over all causal pairs, mean over the layers.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.analysis import means
from qkattn.analysis.matrices import drift
from qkattn.analysis.patterns import walk
from qkattn.attention import Attention, AttentionSpec
from qkattn.claims.checks.counts import factored, merged, scores
from qkattn.claims.claim import Kind, Measure, Row, Speaks
from qkattn.claims.protocol import language_model, pick
from qkattn.config import Config
from qkattn.convert import loading
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.model import with_params
from qkattn.stats.inference import estimate
from qkattn.study.tuning import SCREENING
from qkattn.train.optimizer import optimizer
from qkattn.train.step import init_trial, train_trial

DTYPES = ('float64', 'float32', 'bfloat16')
CURVES = {
    'products': 'rounding alone',
    'rounding': 'rounding, trained',
    'apart': 'trained apart',
}
BEYOND = 3.0  # times rounding: a larger difference is not explained by it
QUANTITIES = {
    'qk_factor_norm': "norm of the score's parameters",
    'qk_norm': 'norm of A[n]',
    'qk_effective_rank': 'effective rank of A[n]',
    'ov_factor_norm': "norm of the value's parameters",
    'ov_norm': 'norm of B[n]',
    'ov_effective_rank': 'effective rank of B[n]',
}


def record_drift(directory: Path, scale: str) -> dict[str, Any]:
    """The curves in each precision, by step."""
    config = drift_config(scale)
    rows, by_dtype, reference = rows_of(config), {}, None
    for dtype in DTYPES:
        qk, free = (_trained(config, rows, score, dtype) for score in ('qk', 'query_free'))
        reference = reference or qk
        by_dtype[dtype] = _compared(_sample(config, rows), qk, free, reference, dtype)
    return {'scale': scale, 'steps': sampled(config.train.num_steps), 'dtypes': by_dtype}


def read_drift(recorded: Mapping[str, Any]) -> list[Row]:
    """Points of the three curves in each precision; the last ones decide.

    The claim is that the difference is numerical. It fails if the trained models differ by more
    than BEYOND times the difference that rounding explains.
    """
    rows = []
    for dtype, curves in recorded['dtypes'].items():
        explained = max(curves['products'][-1], curves['rounding'][-1])
        decides = Speaks.AGAINST if curves['apart'][-1] > BEYOND * explained else Speaks.FOR
        for name, quantity in CURVES.items():
            for step, value in zip(recorded['steps'], curves[name], strict=True):
                last = name == 'apart' and step == recorded['steps'][-1]
                speaks, unit = decides if last else Speaks.BESIDE, 'fraction of the logits'
                row = Row(quantity, Kind.MEASURED, {'precision': dtype}, value, speaks, unit)
                rows.append(dataclasses.replace(row, x=step, x_label='step'))
    return rows


DRIFT = Measure(
    'drift',
    read_drift,
    'drift',
    record_drift,
    {'steps': tuple[int, ...], 'dtypes': Mapping[str, Mapping[str, tuple[float, ...]]]},
)


def drift_config(scale: str) -> Config:
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
    """The parameters of the Score in float64 at each of the sampled steps."""
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
        kept = []
        for number in range(config.train.num_steps + 1):
            if number in sampled(config.train.num_steps):
                factors = trial['params']['blocks']['attention']['score']
                kept.append({n: np.asarray(w, np.float64) for n, w in factors.items()})
            batch = train_batch(rows, seed=0, step=number, batch_size=config.train.batch_size)
            trial = step(jnp.int32(number), trial, jax.tree.map(lambda a: a[None], batch))
        if not trial['alive']:
            raise ConfigError(f'{score} in {dtype} diverged; lower the learning rate of the drift')
    return kept


def _compared(
    x_LBTD: np.ndarray,
    trained: list[dict[str, np.ndarray]],
    apart: list[dict[str, np.ndarray]],
    reference: list[dict[str, np.ndarray]],
    dtype: str,
) -> dict[str, list[float]]:
    """The curves by step, of factors of qk, of query_free, and of qk trained in float64."""
    curves: dict[str, list[float]] = {name: [] for name in CURVES}
    for qk, free, exact in zip(trained, apart, reference, strict=True):
        pairs = {
            'products': (logits(x_LBTD, qk, dtype, 2), logits(x_LBTD, qk, dtype, 1)),
            'rounding': (logits(x_LBTD, exact, 'float64', 2), logits(x_LBTD, qk, 'float64', 2)),
            'apart': (logits(x_LBTD, qk, 'float64', 2), logits(x_LBTD, free, 'float64', 1)),
        }
        for name, pair in pairs.items():
            curves[name].append(float(np.mean([drift(a, b) for a, b in zip(*pair, strict=True)])))
    return curves


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


def record_times(directory: Path, scale: str) -> dict[str, Any]:
    """Times both forms of the scores at several T for D = 4 H, H < D < 2 H and D = H."""
    D = pick(scale, smoke=64, cpu=128, gpu=1024)
    lengths = pick(
        scale, smoke=(32, 512), cpu=(16, 64, 256, 512, 1024, 2048), gpu=(256, 1024, 4096, 16384)
    )
    pairs = pick(scale, smoke=5, cpu=15, gpu=15)
    measured = [
        {'D': D, 'H': H, 'T': T, 'ratios': _ratios(T, D, H, pairs)}
        for H in (D // 4, 3 * D // 4, D)
        for T in lengths
    ]
    return {'device': jax.devices()[0].device_kind, 'measured': measured}


def _ratios(T: int, D: int, H: int, pairs: int) -> list[float]:
    """Seconds with one matrix over seconds with two, float32, N = 1, compiled, pair after pair."""
    x_BTD = jax.random.normal(jax.random.key(0), (1, T, D))
    runs = []
    for name in ('merged', 'qk'):
        spec = AttentionSpec(score=name, d_model=D, num_heads=1, head_size=H)
        layer = Attention(spec, key=jax.random.key(1))
        program = jax.jit(scores).lower(layer, x_BTD).compile()
        runs.append(lambda layer=layer, program=program: program(layer, x_BTD))
    repeats = 1 + int(0.01 / max(_seconds(runs[1], 3), 1e-6))
    return [_seconds(runs[0], repeats) / _seconds(runs[1], repeats) for _ in range(pairs)]


def _seconds(run: Any, repeats: int) -> float:
    """Seconds of one call, the mean over several."""
    started = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - started) / repeats


def read_times(recorded: Mapping[str, Any]) -> list[Row]:
    """The ratio at each T with its counted one, and how often their order differs; none decides."""
    rows, against, clear = [], 0, 0
    context = {'device': recorded['device']}
    for measured in recorded['measured']:
        T, D, H = measured['T'], measured['D'], measured['H']
        log = estimate([math.log(ratio) for ratio in measured['ratios']])
        mean, low, high = (math.exp(x) for x in (log.mean, log.low, log.high))
        counted = merged(T, D) / factored(T, D, H)
        quantity = f'seconds with one matrix over those with two, D = {D}, H = {H}'
        row = Row(quantity, Kind.MEASURED, context, mean, Speaks.BESIDE, '', low, high, counted)
        rows.append(dataclasses.replace(row, x=T, x_label='tokens'))
        if not low < 1 < high and counted != 1:
            clear += 1
            against += (mean > 1) != (counted > 1)
    quantity = f'lengths of {clear} with a clear order in seconds that differs from the counts'
    return [*rows, Row(quantity, Kind.MEASURED, context, against, Speaks.BESIDE, expected=0)]


TIMES = Measure(
    'crossover',
    read_times,
    'crossover',
    record_times,
    {'device': str, 'measured': [{'D': int, 'H': int, 'T': int, 'ratios': tuple[float, ...]}]},
)


def record_norms(directory: Path, scale: str) -> dict[str, Any]:
    """Of every run but those of a screening, `norms` by trial."""
    runs = []
    for run in sorted((directory / 'runs').iterdir()):
        if f'-{SCREENING}-' in run.name or not (run / 'result.json').exists():
            continue
        source = loading.load(run)
        model = source.model.config
        about = {'variant': str(model.variant), 'size': f'd_model={model.d_model}'}
        alive = [one for one, well in zip(source.models, source.alive, strict=True) if well]
        runs.append({'run': run.name, **about, 'trials': [norms(one) for one in alive]})
    return {'scale': scale, 'runs': runs}


def norms(model: Any) -> dict[str, float]:
    """QUANTITIES of one model, mean over layers and heads; NaN without one matrix a head."""
    measured = jax.jit(means)(model)
    return {name: float(measured[name]) for name in QUANTITIES}


def read_norms(recorded: Mapping[str, Any]) -> list[Row]:
    """A row for each arm and quantity: the mean over seeds with its interval; decides nothing."""
    rows = []
    for run in recorded['runs']:
        for name, quantity in QUANTITIES.items():
            values = [trial[name] for trial in run['trials'] if trial[name] is not None]
            if values:
                mean = estimate(values)
                row = Row(quantity, Kind.MEASURED, {'size': run['size']}, mean.mean, Speaks.BESIDE)
                low, high = mean.low, mean.high
                rows.append(dataclasses.replace(row, low=low, high=high, arm=run['variant']))
    return rows


NORMS = Measure(
    'overparameterised',
    read_norms,
    'factors',
    record_norms,
    {'runs': [{'variant': str, 'size': str, 'trials': list}]},
)

"""What claims measure: early losses, growth, untuned differences, the drift of two factorizations.

Rows that are not differences between the arms of a study: read from its logs, or recorded once.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.analysis.matrices import drift
from qkattn.analysis.patterns import walk
from qkattn.claims.claim import Kind, Measure, Row, Speaks, difference_row
from qkattn.claims.protocol import language_model, pick
from qkattn.claims.studies import Loaded
from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.model import with_params
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import EQUAL_SHAPE
from qkattn.train.step import init_trial, train_trial
from qkattn.verdict.arms import Arm, compare, with_baselines

DTYPES = ('float64', 'float32', 'bfloat16')
COMPARED = {
    'products': 'rounding alone',
    'rounding': 'rounding, trained',
    'apart': 'trained apart',
}
BEYOND = 3.0  # times rounding: a larger difference is not explained by it
Factors = dict[str, Any]  # by name, of all layers: w_q_DNH and w_k_DKH, or w_k_DKH alone


def early(loaded: Loaded) -> list[Row]:
    """How many differences change after they are read early, by fraction of training.

    Differences of primary arms on the validation split, paired by seed. An early difference that
    is more than the margin away from the annealed one supports the claim; if all are equivalent,
    they refute it. The tests are those of a verdict, without the errors of documents and tuning.
    """
    margin, planned = loaded.study.margin, loaded.findings.num_comparisons
    curves = {arm.key: _curves(arm, other) for arm, other in _compared(loaded) if not arm.control}
    steps = {step for seeds in curves.values() for seed in seeds for step in seed}
    last, rows = max(steps, default=0), []
    for step in sorted(steps - {last}):
        changes = {
            arm: [seed[step] - seed[last] for seed in seeds if {step, last} <= seed.keys()]
            for arm, seeds in curves.items()
        }
        tested = {arm: inference.paired(x, margin) if x else None for arm, x in changes.items()}
        decided = [d.decision for d in decision.judge(tested, planned=planned).values()]
        changed = sum(one in (Decision.BETTER, Decision.WORSE) for one in decided)
        speaks = Speaks.FOR if changed else Speaks.OPEN
        if {*decided} == {Decision.EQUIVALENT}:
            speaks = Speaks.AGAINST
        context = {'arms': str(len(curves)), 'fraction of the steps': f'{step / last:g}'}
        quantity = 'differences that change by more than the margin'
        rows.append(Row(quantity, Kind.MEASURED, context, float(changed), speaks, 'arms'))
    return rows


def growth(loaded: Loaded, variant: str) -> list[Row]:
    """By how much the loss of a control of equal shape grows away from the baseline, on each group.

    The difference at the last step minus that at the first evaluation, paired by seed, on the
    validation split. Less than the margin, by its interval, speaks for a difference that does not
    grow; above zero speaks against it.
    """
    rows = []
    for arm, baseline in _compared(loaded):
        if (arm.variant, arm.control) != (variant, EQUAL_SHAPE):
            continue
        seeds = _curves(arm, baseline)
        if seeds and len(seeds[0]) > 1:
            first, last, margin = min(seeds[0]), max(seeds[0]), loaded.study.margin
            grown = inference.paired([seed[last] - seed[first] for seed in seeds], margin)
            quantity = f'growth of the difference from {first / last:.0%} of the steps on'
            speaks, context = _speaks(grown, margin), loaded.context(arm)
            rows.append(difference_row(quantity, Kind.MEASURED, context, grown, speaks=speaks))
    return rows


def at_one_rate(loaded: Loaded, variant: str) -> list[Row]:
    """Differences of a study without tuning, at each learning rate that both arms have.

    That at the lowest one, where published baselines tend to stand, decides: better if its interval
    is below zero, not so if it is above.
    """
    rows = []
    for arm, baseline in _compared(loaded):
        if loaded.study.bare(arm.variant) != variant:
            continue
        speaks = None
        for rate in arm.learning_rates:
            if comparison := compare(_at(rate, arm), _at(rate, baseline), loaded.study):
                difference = comparison.difference
                speaks = Speaks.BESIDE if speaks else _speaks(difference, 0.0)
                context = loaded.context(arm)
                context |= {'baseline': 'untuned', 'learning rate': f'{rate:g}'}
                about = f'{variant} at one learning rate for both', Kind.MEASURED, context
                rows.append(difference_row(*about, difference, speaks=speaks))
    return rows


def _speaks(difference: Difference, bound: float) -> Speaks:
    """For, if the interval lies below `bound`; against, if it lies above zero."""
    if difference.low is None or difference.high is None:
        return Speaks.OPEN
    if difference.high < bound:
        return Speaks.FOR
    return Speaks.AGAINST if difference.low > 0 else Speaks.OPEN


def _compared(loaded: Loaded) -> Iterator[tuple[Arm, Arm]]:
    """All arms and controls but the baselines, each with its baseline, if that has results."""
    arms = (*loaded.findings.arms, *loaded.findings.controls)
    pairs = with_baselines(arms)
    return ((arm, other) for arm, other in pairs if other and not arm.is_baseline)


def _at(rate: float, arm: Arm) -> Arm:
    """The arm restricted to the trials at one learning rate."""
    trials = tuple(trial for trial in arm.trials if trial.learning_rate == rate)
    finished = tuple(trial for trial in trials if trial.finished)
    return dataclasses.replace(arm, trials=trials, verdict_trials=trials, chosen=finished)


def _curves(arm: Arm, baseline: Arm) -> list[dict[int, float]]:
    """For each seed that both arms finished, the differences in validation loss by step."""
    shared = [seed for seed in arm.by_seed if seed in baseline.by_seed]
    pairs = [(arm.by_seed[seed].evaluations, baseline.by_seed[seed].evaluations) for seed in shared]
    return [{step: a[step] - b[step] for step in a if step in b} for a, b in pairs if a and b]


def record_drift(scale: str) -> dict[str, Any]:
    """The drift between two factorizations of one function, trained side by side, by precision.

    A single head of `qk` has the logits x W_Q (y W_K)^T, and the same as `query_free` with the one
    matrix W_K' = W_K W_Q^T. From the same parameters, both are trained on the same batches with the
    optimizer of all studies, without weight decay. On a fixed sample X, the normed streams that the
    layers read at initialization, X (X W_K')^T and X W_Q (X W_K)^T are compared at the first and
    the last step, as |other - reference| / |reference| over causal pairs, mean over the layers:

        products   of the trained qk, by two products against by one: rounding alone
        rounding   of the trained qk against that of float64: rounding, amplified by training
        apart      of the trained qk against the trained query_free: all that differs in training
    """
    config = drift_config(scale)
    rows, by_dtype, reference = rows_of(config), {}, None
    x_LBTD = _sample(config, rows)
    for dtype in DTYPES:
        qk, free = (_trained(config, rows, score, dtype) for score in ('qk', 'query_free'))
        reference = reference or qk
        with jax.enable_x64(True):
            by_dtype[dtype] = {
                'products': [_difference(x_LBTD, a, merged(a, dtype), dtype) for a in qk],
                'rounding': [_difference(x_LBTD, *ab) for ab in zip(reference, qk, strict=True)],
                'apart': [_difference(x_LBTD, *ab) for ab in zip(qk, free, strict=True)],
            }
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


DRIFT = Measure('drift', read_drift, record_drift)


def drift_config(scale: str) -> Config:
    """A decoder of single heads and its training."""
    d_model = pick(scale, smoke=16, cpu=48, gpu=48)
    scale = 'smoke' if scale == 'smoke' else 'cpu'
    return language_model(scale, num_heads=1, seeds=1, d_model=d_model)


def merged(factors: Factors, dtype: str) -> Factors:
    """Single heads of `qk` as those of `query_free`: W_K' = W_K W_Q^T, computed in `dtype`."""
    w_q_LDNH, w_k_LDKH = (jnp.asarray(factors[n], dtype) for n in ('w_q_DNH', 'w_k_DKH'))
    return {'w_k_DKH': jnp.einsum('LDNH,LENH->LDNE', w_k_LDKH, w_q_LDNH)}


def _trained(config: Config, rows: Rows, score: str, dtype: Any) -> list[Factors]:
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
        trial = init_trial(config, jnp.uint32(0)) | {'params': params}
        rate = jnp.float32(config.trials.learning_rates[0])
        hyper = {'seed': jnp.uint32(0), 'learning_rate': rate, 'weight_decay': jnp.float32(0)}
        step = jax.jit(lambda k, trial, batch: train_trial(config, k, trial, hyper, batch)[0])
        for number in range(config.train.num_steps):
            batch = train_batch(rows, seed=0, step=number, batch_size=config.train.batch_size)
            trial = step(jnp.int32(number), trial, jax.tree.map(lambda a: a[None], batch))
        if not trial['alive']:
            raise ConfigError(f'{score} in {dtype} diverged; lower the learning rate of the drift')
        factors = [p['blocks']['attention']['score'] for p in (params, trial['params'])]
        return [{n: np.asarray(w, np.float64) for n, w in one.items()} for one in factors]


def _sample(config: Config, rows: Rows) -> np.ndarray:
    """x_LBTD: what the attention of each layer reads at initialization on 8 validation rows."""
    batch = next(eval_batches(rows, 'validation', batch_size=8, max_rows=8))
    model = with_params(config.model, init_trial(config, jnp.uint32(0))['params'])
    seen: list[jax.Array] = []
    inputs = {'tokens_BT': batch['tokens_BT']}
    walk(model, inputs, lambda site, layer, attention, x_BTD, *_: seen.append(x_BTD))
    return np.stack(seen).astype(np.float64)


def _difference(
    x_LBTD: np.ndarray, reference: Factors, other: Factors, dtype: str = 'float64'
) -> float:
    """That of `record_drift` between logits computed in `dtype`."""
    pairs = zip(*(logits(x_LBTD, one, dtype) for one in (reference, other)), strict=True)
    return float(np.mean([drift(a, b) for a, b in pairs]))


def logits(x_LBTD: np.ndarray, factors: Factors, dtype: str) -> list[np.ndarray]:
    """Causal logits x W_Q (x W_K)^T of each layer in `dtype`, or x (x W_K)^T, as float64."""
    q_LBTH = y_LBSD = jnp.asarray(x_LBTD, dtype)
    w_LDH = {name: jnp.asarray(w[:, :, 0], dtype) for name, w in factors.items()}
    k_LBSH = jnp.einsum('LBSD,LDH->LBSH', y_LBSD, w_LDH['w_k_DKH'])
    if 'w_q_DNH' in w_LDH:
        q_LBTH = jnp.einsum('LBTD,LDH->LBTH', y_LBSD, w_LDH['w_q_DNH'])
    s_LBTS = np.asarray(jnp.einsum('LBTH,LBSH->LBTS', q_LBTH, k_LBSH), np.float64)
    return list(s_LBTS[..., np.tri(s_LBTS.shape[-1], dtype=bool)])

"""Small attention layers in float64, and what the checks measure on them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from experiments.claims.claim import Row, exact
from qkattn.analysis.patterns import pattern_of
from qkattn.attention import Attention, AttentionSpec, Mask, Score
from qkattn.attention.parameters import shapes_only
from qkattn.config.variant import Variant
from qkattn.convert.factors import relative_error

Options = dict[str, Any]  # of a layer, or the context of a row

D, N, T = 32, 4, 12  # and H = D / N
SAME = 1e-12  # the relative difference of what is the same function in float64


def shapes(variant: str, **sizes: Any) -> Attention:
    """A layer of shapes in place of parameters; `sizes` are those of its spec."""
    score, value = Variant.parse(variant)
    spec = AttentionSpec(score=score, value=value, **{'d_model': D, 'num_heads': N} | sizes)
    with shapes_only():
        return jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))


def count(variant: str, *circuits: str, **sizes: Any) -> int:
    """Parameters of a layer in its circuits, 'score' and 'value'; of both if none is named."""
    layer = shapes(variant, **sizes)
    parts = [getattr(layer, circuit) for circuit in circuits or ('score', 'value')]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parts))


def layer(variant: str = 'qk/vo', *, seed: int = 0, **sizes: Any) -> Attention:
    """A layer in float64; parameters are normal, variance 1/D."""
    empty = shapes(variant, **sizes)
    rng = np.random.default_rng(seed)
    std = empty.spec.d_model**-0.5
    return jax.tree.map(lambda leaf: jnp.asarray(std * rng.standard_normal(leaf.shape)), empty)


@jax.jit
def output(layer: Attention, x_BTD: jax.Array, mask_BTS: jax.Array | None = None) -> jax.Array:
    """out_BTD of a layer, compiled; causal without a mask."""
    return layer(x_BTD, mask_BTS)


def descended(
    loss: Callable[[Any], Any], params: Any, optimizer: optax.GradientTransformation, steps: int
) -> Any:
    """The parameters after steps of an optimizer on a loss."""

    def step(_: int, carried: tuple) -> tuple:
        params, state = carried
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, steps, step, (params, optimizer.init(params)))[0]


def stream(length: int = T, *, d_model: int = D, seed: int = 5) -> jax.Array:
    """x_BTD of two unit-normal sequences."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, length, d_model)))


def with_matrices(layer: Attention, given: Mapping[str, np.ndarray]) -> Attention:
    """The layer with these of its matrices, by the beginning of their names: w_q, w_k, w_v, w_o."""
    for circuit in (layer.score, layer.value):
        for name, w in vars(circuit).items():
            if name[:3] in given:
                w[...] = given[name[:3]].reshape(w.shape)
    return layer


def softmax_input(layer: Attention, x_BTD: jax.Array) -> np.ndarray:
    """s_BNTS of a layer with all positions visible, by its own code."""
    return np.asarray(pattern_of(layer, x_BTD, Mask()).logits_BNTS)


def same(quantity: str, got: Any, want: Any, *, tolerance: float = SAME, **about: Any) -> Row:
    """The check that two arrays are equal, relative to the largest element."""
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    apart = float(np.abs(got - want).max() / np.abs(want).max())
    return exact(quantity, apart, 0, tolerance, **about)


def same_output(change: str, one: Attention, other: Attention, **context: Any) -> Row:
    """The check that two layers compute the same output."""
    x_BTD = stream(d_model=one.spec.d_model)
    outputs = (output(layer, x_BTD) for layer in (one, other))
    return same(f'change of the output{change}', *outputs, **context)


def rank(matrix: Any) -> int:
    """Singular values above 1e-10 of the largest; of a stack, the largest rank."""
    return int(np.linalg.matrix_rank(np.asarray(matrix, np.float64), rtol=1e-10).max())


def fit_error(features: Any, target: Any) -> float:
    """min over w of |features w - target| / |target|; target has the first axes of features."""
    target_S = np.asarray(target, np.float64).ravel()
    features_SR = np.asarray(features, np.float64).reshape(target_S.size, -1)
    w_R = np.linalg.lstsq(features_SR, target_S, rcond=None)[0]
    return relative_error(features_SR @ w_R, target_S)


def freedom(function: Callable[[Score], jax.Array], score: Score) -> int:
    """Independent directions in which the output of `function` moves with a Score."""
    flat_P, unflatten = ravel_pytree(score)
    return rank(jax.jit(jax.jacfwd(lambda p: function(unflatten(p)).ravel()))(flat_P))

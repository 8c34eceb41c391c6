"""Small attention layers in float64, and what the checks measure on them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from experiments.claims.claim import Row, exact_row
from qkattn.analysis.patterns import pattern_of
from qkattn.attention import Attention, AttentionSpec, Mask, Score
from qkattn.attention.parameters import shapes_only
from qkattn.config.variant import Variant
from qkattn.convert.factors import relative_error

Options = dict[str, Any]  # of a layer, or the context of a row

# The sizes of layers and streams unless others are given; the head size H is D / N.
D = 32
N = 4
T = 12
# Two layers are the same function if their outputs in float64 differ by at most this fraction.
SAME = 1e-12


def layer_of_shapes(variant: str, **sizes: Any) -> Attention:
    """Returns a layer with shapes instead of parameters; `sizes` are fields of `AttentionSpec`."""
    score, value = Variant.parse(variant)
    sizes = {'d_model': D, 'num_heads': N} | sizes
    spec = AttentionSpec(score=score, value=value, **sizes)
    with shapes_only():
        return jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))


def count_parameters(variant: str, *circuits: str, **sizes: Any) -> int:
    """Counts the parameters in the circuits 'score' and 'value' of a layer; by default in both."""
    layer = layer_of_shapes(variant, **sizes)
    if not circuits:
        circuits = ('score', 'value')
    parts = [getattr(layer, circuit) for circuit in circuits]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parts))


def random_layer(variant: str = 'qk/vo', *, seed: int = 0, **sizes: Any) -> Attention:
    """Returns a layer in float64 with random normal parameters of variance 1/D.

    The arguments are those of `layer_of_shapes`, and a seed.
    """
    empty = layer_of_shapes(variant, **sizes)
    rng = np.random.default_rng(seed)
    std = empty.spec.d_model**-0.5

    def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(std * rng.standard_normal(shape.shape))

    return jax.tree.map(drawn, empty)


@jax.jit
def output(layer: Attention, x_BTD: jax.Array, mask_BTS: jax.Array | None = None) -> jax.Array:
    """Returns the output of a layer. Without a mask, attention is causal."""
    return layer(x_BTD, mask_BTS)


def minimize(
    loss: Callable[[Any], Any], params: Any, optimizer: optax.GradientTransformation, steps: int
) -> Any:
    """Minimizes `loss(params)` for `steps` steps of an optimizer; returns the parameters."""

    def step(_: int, carried: tuple) -> tuple:
        params, state = carried
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    start = (params, optimizer.init(params))
    trained, _ = jax.lax.fori_loop(0, steps, step, start)
    return trained


def random_stream(length: int = T, *, d_model: int = D, seed: int = 5) -> jax.Array:
    """Returns x_BTD: two sequences of unit-normal vectors."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((2, length, d_model)))


def with_matrices(layer: Attention, matrices: Mapping[str, np.ndarray]) -> Attention:
    """Overwrites matrices of a layer, and returns the layer.

    The keys of `matrices` are the first letters of parameter names: 'w_q' overwrites w_q_DNH. Each
    matrix is reshaped to the shape of the parameter.
    """
    for circuit in (layer.score, layer.value):
        for name, parameter in vars(circuit).items():
            stem = name[:3]
            if stem in matrices:
                parameter[...] = matrices[stem].reshape(parameter.shape)
    return layer


def softmax_input(layer: Attention, x_BTD: jax.Array) -> np.ndarray:
    """Returns s_BNTS, what a layer gives to the softmax, with all positions visible."""
    return np.asarray(pattern_of(layer, x_BTD, Mask()).logits_BNTS)


def equality_row(
    quantity: str, actual: Any, expected: Any, *, tolerance: float = SAME, **context: Any
) -> Row:
    """Checks that two arrays are equal, up to `tolerance` times the largest |expected|.

    Returns the row of the check, with this `quantity` and `context`.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    difference = np.abs(actual - expected).max() / np.abs(expected).max()
    return exact_row(quantity, float(difference), 0, tolerance, **context)


def same_output_row(change: str, changed: Attention, original: Attention, **context: Any) -> Row:
    """Checks that two layers compute the same output on the same input.

    Returns the row of the check. `change` says in its quantity how the layers differ.
    """
    x_BTD = random_stream(d_model=changed.spec.d_model)
    outputs = [output(changed, x_BTD), output(original, x_BTD)]
    return equality_row(f'change of the output{change}', *outputs, **context)


def rank(matrix: Any) -> int:
    """Returns the rank of a matrix, or the largest rank in a stack of matrices.

    Singular values count if they are above 1e-10 times the largest one.
    """
    ranks = np.linalg.matrix_rank(np.asarray(matrix, np.float64), rtol=1e-10)
    return int(ranks.max())


def fit_error(features: Any, target: Any) -> float:
    """Returns min over w of |features w - target| / |target|.

    `target` has the shape of the first axes of `features`; w has the remaining axes.
    """
    # S: all entries of the target. R: all entries of w.
    target_S = np.asarray(target, np.float64).ravel()
    features_SR = np.asarray(features, np.float64).reshape(target_S.size, -1)
    best_w_R, *_ = np.linalg.lstsq(features_SR, target_S, rcond=None)
    return relative_error(features_SR @ best_w_R, target_S)


def num_free_directions(function: Callable[[Score], jax.Array], score: Score) -> int:
    """Counts the independent directions in which the parameters of a Score move a function of it.

    This is the rank of the function's Jacobian with respect to all parameters of the Score. For
    example, W_Q W_K^T of a head with D = H = 2 has 8 parameters, but only 4 free directions.
    """
    flat_P, unflatten = ravel_pytree(score)

    def flat_output(flat_P: jax.Array) -> jax.Array:
        return function(unflatten(flat_P)).ravel()

    jacobian = jax.jit(jax.jacfwd(flat_output))
    return rank(jacobian(flat_P))

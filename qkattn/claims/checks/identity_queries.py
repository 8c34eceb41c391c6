"""Q = X: a single head with W_K' = W_K W_Q^T, and why N heads need N matrices of D x D for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention import Attention
from qkattn.attention.parameters import slices_DNH
from qkattn.attention.rope import rotate
from qkattn.claims.checks.parameter_counts import count
from qkattn.claims.checks.small_layers import (
    D,
    N,
    difference,
    fit_error,
    float64,
    layer,
    output,
    softmax_input,
    stream,
)
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row
from qkattn.convert.factors import (
    empty_layer,
    extract_factors,
    fill,
    logit_scale,
    relative_error,
)

SINGLE: dict[str, Any] = {'layer': 'single head'}
BEST = "error of the best W_K', relative to the softmax input"


def without_w_q(attention: Attention) -> Attention:
    """The layer with queries X and keys of D x D matrices W_K'[n] = W_K[n] W_Q[n]^T."""
    factors = extract_factors(attention)
    target = empty_layer(attention, score='query_free_full')
    scale = factors.scale / logit_scale(target)
    w_k_DNE = scale * np.einsum('DNH,ENH->DNE', factors.w_k_DKH, factors.w_q_DNH)
    return fill(
        target, attention, score={'w_k_DNE': w_k_DNE, 'b_k_NE': np.zeros(w_k_DNE.shape[1:])}
    )


@float64
def single_head() -> list[Row]:
    """Q = X in place of X W_Q, and back, and the parameters."""
    attention, x_BTD = layer(num_heads=1), stream()
    without = without_w_q(attention)
    change = difference(softmax_input(without, x_BTD), softmax_input(attention, x_BTD))
    rows = [exact('change of the softmax input, W_Q removed', change, 0, 1e-12, **SINGLE)]
    change = difference(output(without, x_BTD), output(attention, x_BTD))
    rows.append(exact('change of the output, W_Q removed', change, 0, 1e-12, **SINGLE))
    free = layer('query_free/vo', num_heads=1)
    back = fill(
        empty_layer(free, score='qk'),
        free,
        score={'w_q_DNH': np.eye(D)[:, None], 'w_k_DKH': np.asarray(free.score.w_k_DKH[...])},
    )
    change = difference(output(back, x_BTD), output(free, x_BTD))
    rows.append(exact('change of the output, W_Q = I put back', change, 0, 1e-12, **SINGLE))
    ratio = parameters('query_free/vo', 1) / parameters('qk/vo', 1)
    return [*rows, exact('share of the attention parameters that is left', ratio, 3 / 4, **SINGLE)]


@float64
def single_head_with_more() -> list[Row]:
    """The best W_K' where queries have a bias, or positions rotate queries and keys."""
    biased = layer(d_model=8, num_heads=1, biases=True)
    rotary = layer(d_model=8, num_heads=1, positions='rope')
    x_BTD = stream(24, d_model=8)
    pairs = jnp.einsum('BTD,BSE->BTSDE', x_BTD, x_BTD)
    error = up_to_constants(pairs, softmax_input(biased, x_BTD)[:, 0])
    rows = [exact(BEST, error, 0, 1e-12, layer='single head, biases')]
    turned_BTSD = jnp.stack(  # x_t R(t - s), so that x_t R(t - s) W_K'^T y_s is the logit
        [rotate(x_BTD[:, :, None], jnp.arange(24) - s)[:, :, 0] for s in range(24)], axis=2
    )
    pairs = jnp.einsum('BTSD,BSE->BTSDE', turned_BTSD, x_BTD)
    s_BNTS = softmax_input(rotary, x_BTD)
    error = up_to_constants(pairs, s_BNTS[:, 0])
    return [*rows, exact(BEST, error, 0, 1e-12, layer='single head, RoPE')]


def up_to_constants(pairs_BTSDE: jax.Array, s_BTS: np.ndarray) -> float:
    """`fit_error` of logits, to all of which a query may add a constant: softmax ignores it."""
    pairs_BTSDE = pairs_BTSDE - pairs_BTSDE.mean(2, keepdims=True)
    return fit_error(pairs_BTSDE, s_BTS - s_BTS.mean(2, keepdims=True))


@float64
def many_heads() -> list[Row]:
    """N heads need N matrices of D x D; slices of X leave most of A[n] out of reach."""
    rows, x_BTD, attention = [], stream(), layer()
    context: dict[str, Any] = {'layer': 'many heads, all read X'}
    change = difference(output(without_w_q(attention), x_BTD), output(attention, x_BTD))
    rows.append(exact('change of the output, W_Q removed', change, 0, 1e-12, **context))
    for heads in (2, 4, 8):
        ratio = parameters('query_free_full/vo', heads) / parameters('qk/vo', heads)
        what = f'share of the attention parameters that is left, N = {heads}'
        rows.append(exact(what, ratio, 3 / 4, **context))
    A_NDE = np.asarray(attention.score.matrix())
    P_DNH = np.asarray(slices_DNH(attention.spec))
    reached_NDE = np.einsum('DNH,ENH,NEF->NDF', P_DNH, P_DNH, A_NDE)
    context = {'layer': 'many heads, head n reads slice n of X'}
    error = relative_error(reached_NDE, A_NDE)
    rows.append(exact("error of A[n] with the best W_K'", error, 0, 1e-12, **context))
    ratio = parameters('query_free/vo', N) / parameters('qk/vo', N)
    what = 'share of the attention parameters that is left'
    return [*rows, exact(what, ratio, 3 / 4, **context)]


def parameters(variant: str, num_heads: int) -> int:
    """Of both circuits of a layer."""
    circuits = ('score', 'value')
    return sum(count(variant, circuit=c, d_model=D, num_heads=num_heads) for c in circuits)

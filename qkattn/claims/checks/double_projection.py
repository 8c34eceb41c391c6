"""A W_Q that all heads share and then W_Q[n] per head, against one matrix per head."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention import Score
from qkattn.claims.checks.small_layers import D, difference, float64, freedom, layer, output, stream
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row
from qkattn.convert.factors import empty_layer, fill
from qkattn.convert.whole_layer import fold_double

WIDE: dict[str, Any] = {'width of the shared projection': 'R >= D'}
NARROW: dict[str, Any] = {'width of the shared projection': 'R < D'}
LAYERS: dict[str, dict[str, Any]] = {
    'as defined': {},
    'RoPE': {'positions': 'rope'},
    'QK-norm': {'qk_norm': True},
    'biases': {'biases': True},
    'shared key heads': {'num_kv_heads': 2},
}


@float64
def folded() -> list[Row]:
    """Output of a double layer after `fold_double`, whatever else the layer has."""
    rows, x_BTD = [], stream()
    for name, options in LAYERS.items():
        attention = layer('double/double', **options)
        change = difference(output(fold_double(attention), x_BTD), output(attention, x_BTD))
        rows.append(exact(f'change of the output by folding, {name}', change, 0, 1e-12, **WIDE))
    return rows


@float64
def unfolded() -> list[Row]:
    """One matrix per head as a double one, with the identity as what is shared."""
    attention, x_BTD = layer(), stream()
    w_q_DNH, w_k_DNH = (
        np.asarray(w[...]) for w in (attention.score.w_q_DNH, attention.score.w_k_DKH)
    )
    eye = np.eye(D)
    score = {'w_q_outer_DR': eye, 'w_q_RNH': w_q_DNH, 'w_k_outer_DR': eye, 'w_k_RKH': w_k_DNH}
    double = fill(empty_layer(attention, score='double'), attention, score=score)
    change = difference(output(double, x_BTD), output(attention, x_BTD))
    return [exact('change of the output, shared W_Q = I', change, 0, 1e-12, **WIDE)]


@float64
def reach() -> list[Row]:
    """The numbers that all W_Q[n] together are free in, by the width R of the shared projection."""
    rows = []
    for R, context in ((8, WIDE), (12, WIDE), (5, NARROW), (3, NARROW)):
        attention = layer(f"double(size={R},which='q')/vo", d_model=8, num_heads=2)
        free = freedom(queries_of, attention.score)
        rows.append(exact(f'numbers that W_Q is free in, D = 8, R = {R}', free, 8 * 8, **context))
    return rows


def queries_of(score: Score) -> jax.Array:
    """O_Q W_Q[n], as queries of the unit vectors."""
    return score.queries(jnp.eye(8)[None])

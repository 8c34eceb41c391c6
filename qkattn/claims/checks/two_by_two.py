"""2 x 2 matrices: what W_Q, W_K, W_V and W_O each do, and how many numbers each variant is free in.

With D = 2, one head of H = 2 has 16 parameters: W_Q and W_K act through the 4 numbers of
A = W_Q W_K^T and choose where to attend, W_V and W_O through the 4 of B = W_V W_O and choose what
is moved. Any invertible M leaves W_Q M, W_K M^-T and W_V M, M^-1 W_O the same function: H^2
redundant numbers in each circuit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from qkattn.attention import Attention
from qkattn.claims.checks.parameter_counts import count
from qkattn.claims.checks.small_layers import (
    curve,
    difference,
    float64,
    freedom,
    layer,
    output,
    softmax_input,
    stream,
)
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row

# Free numbers of A[n] over all heads, and of B[n], with one head of H = 2 and with two of H = 1.
FREE_A = {
    'qk': (4, 6),
    'merged': (4, 8),
    'full_size': (4, 8),
    'query_free_full': (4, 8),
    'gauge_fixed': (4, 6),
    'double': (4, 6),
    'pairwise': (4, 4),
    'symmetric_skew': (4, 4),
    'query_free': (4, 4),
    'key_free': (4, 4),
    'symmetric': (3, 4),
    'shared_qk': (3, 4),
    'neither': (0, 0),
}
FREE_B = {'vo': (4, 6), 'merged_vo': (4, 8), 'no_v': (4, 4), 'no_o': (4, 4), 'no_vo': (0, 0)}


def small(variant: str = 'qk/vo', **options: Any) -> Attention:
    return layer(variant, **{'d_model': 2, 'num_heads': 1} | options)


def free_numbers(variant: str, num_heads: int, circuit: str) -> int:
    """In which A[n] or B[n] of all heads move when the parameters do."""
    attention = small(variant, num_heads=num_heads)
    if not jax.tree.leaves(getattr(attention, circuit)):
        return 0
    if circuit == 'score':
        return freedom(lambda score: score.matrix(), attention.score)
    return freedom(lambda value: value.matrix(attention.score), attention.value)


@float64
def free_in_each_variant() -> list[Row]:
    """The free numbers of A or B by variant; the parameters beyond them are redundant."""
    rows = []
    for circuit, letter, table in (('score', 'A', FREE_A), ('value', 'B', FREE_B)):
        for name, numbers in table.items():
            variant = f'{name}/vo' if circuit == 'score' else f'qk/{name}'
            for heads, expected in zip((1, 2), numbers, strict=True):
                stored = count(variant, circuit=circuit, d_model=2, num_heads=heads)
                what = f'free numbers of {letter}, {name}, N = {heads}, {stored} parameters'
                rows.append(exact(what, free_numbers(variant, heads, circuit), expected))
    return rows


@float64
def worked_by_hand() -> list[Row]:
    """A and B of layers with these integer matrices, entry by entry."""
    given = {
        'w_q': np.array([[1, 2], [0, 1]]),
        'w_k': np.array([[1, 0], [1, 1]]),
        'w_v': np.array([[2, 0], [1, 1]]),
        'w_o': np.array([[1, 1], [0, 2]]),
    }
    by_hand = {
        'A, W_Q W_K^T': ('qk/vo', 0, [[1, 3], [0, 1]]),
        'A, W_Q W_Q^T': ('shared_qk/vo', 0, [[5, 2], [2, 1]]),
        'A, W_Q = I': ('query_free/vo', 0, [[1, 1], [0, 1]]),
        'A, W_K = I': ('key_free/vo', 0, [[1, 2], [0, 1]]),
        'A, both I': ('neither/vo', 0, [[1, 0], [0, 1]]),
        'B, W_V W_O': ('qk/vo', 1, [[2, 2], [1, 3]]),
        'B, W_V = I': ('qk/no_v', 1, [[1, 1], [0, 2]]),
        'B, W_O = I': ('qk/no_o', 1, [[2, 0], [1, 1]]),
    }
    rows = []
    for what, (variant, circuit, expected) in by_hand.items():
        matrix_DE = np.asarray(with_matrices(small(variant), given).matrix()[circuit][0])
        rows.append(exact(f'entries of {what} that differ', (matrix_DE != expected).sum(), 0))
    return rows


@float64
def gauge() -> list[Row]:
    """W_Q M and W_K M^-T, or W_V M and M^-1 W_O, are the same function."""
    attention, x_BTD, rows = small(), stream(2, d_model=2), []
    M_HH = np.array([[2.0, 1.0], [-1.0, 1.0]])
    inverse_HH, w = np.linalg.inv(M_HH), matrices(attention)
    for what, moved in {
        'W_Q M and W_K M^-T': {'w_q': w['w_q'] @ M_HH, 'w_k': w['w_k'] @ inverse_HH.T},
        'W_V M and M^-1 W_O': {'w_v': w['w_v'] @ M_HH, 'w_o': inverse_HH @ w['w_o']},
    }.items():
        change = difference(
            output(with_matrices(small(), w | moved), x_BTD), output(attention, x_BTD)
        )
        rows.append(exact(f'change of the output, {what}', change, 0, 1e-12))
    return rows


@float64
def where_and_what() -> list[Row]:
    """The pattern, solved from the output of T = D tokens: W_V and W_O have no part in it."""
    rows = []
    for D in (2, 3, 4):
        attention, x_TD = small(d_model=D), stream(D, d_model=D)[0]
        w = matrices(small(d_model=D, seed=1))
        other = with_matrices(small(d_model=D), {name: w[name] for name in ('w_v', 'w_o')})
        P_TS = pattern(attention, x_TD)
        change = difference(pattern(other, x_TD), P_TS)
        row = exact('change of the pattern by another W_V and W_O', change, 0, 1e-10)
        rows.append(curve(row, D, 'tokens and dimensions'))
        row = exact('largest sum of a row of the pattern', P_TS.sum(-1).max(), 1, 1e-10)
        rows.append(curve(row, D, 'tokens and dimensions'))
        tied = softmax_input(small('shared_qk/vo', d_model=D), x_TD[None])[0, 0]
        pairs = np.isclose(tied, tied.T, rtol=1e-12)[np.triu_indices(D, 1)].sum()
        row = exact('tied pairs of scores, W_Q W_Q^T', pairs, D * (D - 1) / 2)
        rows.append(curve(row, D, 'tokens and dimensions'))
    return rows


def pattern(attention: Attention, x_TD: jax.Array) -> np.ndarray:
    """P_TS of a layer with one head, from out = P (x B), all positions visible."""
    out_TD = output(attention, x_TD[None], jnp.ones((1, len(x_TD), len(x_TD)), bool))[0]
    return np.linalg.solve((x_TD @ attention.matrix()[1][0]).T, out_TD.T).T


@float64
def one_way() -> list[Row]:
    """[[0, 1], [0, 0]], by which token 1 attends to token 2 and not the reverse, as W W^T."""
    attention, A_DE = small('shared_qk/vo'), np.array([[0.0, 1.0], [0.0, 0.0]])

    def squared_error(w_P: np.ndarray) -> float:
        fitted_DE = np.asarray(with_matrices(attention, {'w_q': w_P}).score.matrix()[0])
        return float(((fitted_DE - A_DE) ** 2).sum())

    least = optimize.minimize(squared_error, np.array([0.5, 0.1, 0.4, -0.2])).fun
    what = 'error of the best W W^T for A = [[0, 1], [0, 0]]'
    return [exact(what, least**0.5, 0.75**0.5, 1e-6)]


def matrices(attention: Attention) -> dict[str, np.ndarray]:
    """The D x D matrices of a layer with one head, 'w_q' to 'w_o'."""
    named = {**vars(attention.score), **vars(attention.value)}
    shape = 2 * (attention.spec.d_model,)
    return {
        name[:3]: np.asarray(w[...]).reshape(shape) for name, w in named.items() if 'w_' in name
    }


def with_matrices(attention: Attention, given: dict[str, np.ndarray]) -> Attention:
    """The layer with one head and these of its matrices."""
    for circuit in (attention.score, attention.value):
        for name, w in vars(circuit).items():
            if name[:3] in given:
                w[...] = given[name[:3]].reshape(w.shape)
    return attention

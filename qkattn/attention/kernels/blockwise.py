"""Attention in blocks of queries and keys, whose memory is linear in the context.

Online softmax (Rabe & Staats 2021, arXiv 2112.05682) with the backward pass of Dao et al. 2022 and
2023 (arXiv 2205.14135, 2307.08691), which computes the probabilities of a block again from the
log-sum-exp of every query. Blocks that the mask rules out are not computed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qkattn.attention.kernels.einsum import Call, Target
from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import SoftmaxOffByOne

# Queries, and keys, of a block: measured on CPUs, whose caches hold its logits; elsewhere a guess.
BLOCK = {'cpu': 128}
BLOCK_ELSEWHERE = 512

# Subtracted where a query hides itself: far below all logits, far above those of masked keys.
HIDDEN = 1e30


class _Options(NamedTuple):
    """What is known when the program is traced."""

    scale: float
    logit_cap: float | None
    off_by_one: bool  # as if every query had one more key, of logit 0 and value 0
    dropout: float
    pairs: tuple[tuple[int, int], ...]  # (i, j) of the blocks of queries and keys that are computed


def blockwise(call: Call, target: Target, block: int | None = None) -> jax.Array:
    """o_BTNH as in `attend`, of softmax or softmax_off_by_one; 0 without visible keys.

    Dropout draws other numbers than in `einsum`. `block` is the most queries, and keys, per block.
    """
    B, T, N, H = call.q_BTNH.shape
    S, mask, (q_BTNH, scale) = call.k_BSKH.shape[1], call.mask, call.with_static_scale()
    block = block or BLOCK.get(target.platform, BLOCK_ELSEWHERE)
    i, j = -(-T // block), -(-S // block)
    t, s = -(-T // i), -(-S // j)
    b_NR = None
    if call.bias is not None:
        b_NR = call.bias((mask.queries(1) + jnp.arange(1 - j * s, i * t))[None])[:, 0]
    options = _Options(
        scale=scale,
        logit_cap=call.logit_cap,
        off_by_one=isinstance(call.normalizer, SoftmaxOffByOne),
        dropout=call.dropout,
        pairs=_pairs(mask, i, t, j, s),
    )
    arrays = (_blocks(q_BTNH, i, t), _blocks(call.k_BSKH, j, s), _blocks(call.v_BSKH, j, s), b_NR)
    mask = mask.padded(T, i * t, S, j * s)
    o_IBNTH = _attention(options, *arrays, mask, call.dropout_key if call.dropout else None)
    o_BTNH = jnp.transpose(o_IBNTH, (1, 0, 3, 2, 4)).reshape(B, i * t, N, -1)
    return o_BTNH[:, :T]


def _blocks(x_BTNH: jax.Array, count: int, size: int) -> jax.Array:
    """x_IBNTH with `count` blocks of `size` positions, padded with zeros."""
    B, T, N, H = x_BTNH.shape
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, count * size - T), (0, 0), (0, 0)))
    return jnp.transpose(x_BTNH.reshape(B, count, size, N, H), (1, 0, 3, 2, 4))


def _pairs(mask: Mask, i: int, t: int, j: int, s: int) -> tuple[tuple[int, int], ...]:
    """The pairs of blocks in which the causal mask and the window leave anything."""
    pairs = np.ones((i, j), bool)
    first = 0 if mask.first_query is None else mask.first_query
    if isinstance(first, int):
        # From the last key of a block to the first query of another, and from first to last.
        least_IJ = first + np.arange(i)[:, None] * t - (np.arange(1, j + 1) * s - 1)
        most_IJ = least_IJ + t + s - 2
        if mask.causal:
            pairs &= most_IJ >= 0
        if mask.window is not None:
            pairs &= (least_IJ < mask.window) & (most_IJ > -mask.window)
    return tuple((int(a), int(b)) for a, b in np.argwhere(pairs))


def _each_pair(options: _Options, step: Callable, carry: tuple) -> tuple:
    """The carry after `carry = step(carry, i, j, number)` for all pairs in turn."""
    i_P, j_P = np.array(options.pairs, np.int32).reshape(-1, 2).T
    pairs = (i_P, j_P, np.arange(len(i_P), dtype=np.int32))
    return lax.scan(lambda carry, pair: (step(carry, *pair), None), carry, pairs)[0]


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _put(array: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(array, block.astype(array.dtype), index, 0)


def _by_heads(x_BNTS: jax.Array, heads: int) -> jax.Array:
    """x_BKQS: the query heads of a key or value head are further rows, Q = N / K T."""
    return x_BNTS.reshape(len(x_BNTS), heads, -1, x_BNTS.shape[-1])


def _logits(
    options: _Options,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    b_NR: jax.Array | None,
    mask: Mask,
    i: jax.Array,
    j: jax.Array,
    j_blocks: int,
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Logits s_BNTS of a pair of blocks, low where masked; the mask; the slope of the logit cap."""
    (B, N, t, _), (_, K, s, _) = q_BNTH.shape, k_BKSH.shape
    dtype = jnp.promote_types(q_BNTH.dtype, jnp.float32)
    s_BNTS = jnp.einsum(
        'BKQH,BKSH->BKQS', _by_heads(q_BNTH, K), k_BKSH, preferred_element_type=dtype
    ).reshape(B, N, t, s)
    slope_BNTS: jax.Array | float = 1.0
    s_BNTS = s_BNTS * options.scale
    if options.logit_cap is not None:
        tanh_BNTS = jnp.tanh(s_BNTS / options.logit_cap)
        s_BNTS, slope_BNTS = options.logit_cap * tanh_BNTS, 1 - jnp.square(tanh_BNTS)
    if b_NR is not None:
        start, size = _distances(i, t, j, s, j_blocks)
        s_BNTS = s_BNTS + _toeplitz(lax.dynamic_slice_in_dim(b_NR, start, size, 1), t, s)
    if mask.hides_self:
        itself_TS = i * t + mask.queries(t)[:, None] == j * s + jnp.arange(s)
        s_BNTS = jnp.where(itself_TS, s_BNTS - HIDDEN, s_BNTS)
    mask_B1TS = mask.block(i * t, t, j * s, s)[:, None]
    return jnp.where(mask_B1TS, s_BNTS, jnp.finfo(dtype).min / 2), mask_B1TS, slope_BNTS


def _distances(i: jax.Array, t: int, j: jax.Array, s: int, j_blocks: int) -> tuple[jax.Array, int]:
    """Where the distances of a pair of blocks begin in those of all, and how many there are."""
    return i * t + (j_blocks - 1 - j) * s, t + s - 1


def _toeplitz(b_NR: jax.Array, t: int, s: int) -> jax.Array:
    """b_NTS whose element (t, s) is b[t - s + S - 1], R = T + S - 1, without a gather."""
    N = len(b_NR)
    # In rows of R + 2 elements, each repetition of R + 1 begins one element earlier.
    row_NR = jnp.pad(b_NR, ((0, 0), (0, 1)))
    rows_NX = jnp.tile(row_NR, (1, t + 1))[:, : t * (t + s + 1)]
    return rows_NX.reshape(N, t, t + s + 1)[:, :, s - 1 :: -1]


def _kept(options: _Options, key: jax.Array, number: jax.Array, shape: tuple) -> jax.Array:
    """0 where a probability is dropped, else 1 / (1 - rate)."""
    keep = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - options.dropout, shape)
    return keep / (1 - options.dropout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, *operands: Any) -> jax.Array:
    """o_IBNTH of queries in I blocks and keys in J blocks."""
    return _forward(options, *operands)[0]


def _forward(
    options: _Options,
    q_IBNTH: jax.Array,
    k_JBKSH: jax.Array,
    v_JBKSH: jax.Array,
    b_NR: jax.Array | None,
    mask: Mask,
    key: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    dtype = jnp.promote_types(q_IBNTH.dtype, jnp.float32)
    rows = q_IBNTH.shape[:-1]
    J, _, K, _, H = v_JBKSH.shape

    def step(carry: tuple, i: jax.Array, j: jax.Array, number: jax.Array) -> tuple:
        o_IBNTH, top_IBNT, sum_IBNT = carry
        s_BNTS, mask_B1TS, _ = _logits(
            options, _at(q_IBNTH, i), _at(k_JBKSH, j), b_NR, mask, i, j, J
        )
        old_BNT = _at(top_IBNT, i)
        top_BNT = jnp.maximum(old_BNT, s_BNTS.max(-1))
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - top_BNT[..., None]), 0)
        shrink_BNT = jnp.exp(old_BNT - top_BNT)
        sum_BNT = _at(sum_IBNT, i) * shrink_BNT + p_BNTS.sum(-1)
        if options.dropout:
            p_BNTS = p_BNTS * _kept(options, key, number, p_BNTS.shape)
        mixed_BKQH = jnp.einsum(
            'BKQS,BKSH->BKQH',
            _by_heads(p_BNTS.astype(v_JBKSH.dtype), K),
            _at(v_JBKSH, j),
            preferred_element_type=dtype,
        )
        o_BNTH = _at(o_IBNTH, i) * shrink_BNT[..., None] + mixed_BKQH.reshape(*rows[1:], H)
        return _put(o_IBNTH, o_BNTH, i), _put(top_IBNT, top_BNT, i), _put(sum_IBNT, sum_BNT, i)

    first = (0.0, 1.0) if options.off_by_one else (jnp.finfo(dtype).min / 2, 0.0)
    start = (jnp.zeros((*rows, H), dtype), *(jnp.full(rows, number, dtype) for number in first))
    o_IBNTH, top_IBNT, sum_IBNT = _each_pair(options, step, start)
    sum_IBNT = jnp.where(sum_IBNT == 0, 1, sum_IBNT)
    o_IBNTH = (o_IBNTH / sum_IBNT[..., None]).astype(v_JBKSH.dtype)
    saved = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, top_IBNT + jnp.log(sum_IBNT))
    return o_IBNTH, saved


def _backward(options: _Options, saved: tuple, do_IBNTH: jax.Array) -> tuple:
    """ds = p (dp - do . o), where p = exp(s - log-sum-exp) and dp = do v^T."""
    q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, lse_IBNT = saved
    dtype = lse_IBNT.dtype
    J, _, K, _, _ = k_JBKSH.shape
    V = v_JBKSH.shape[2]
    mean_IBNT = (do_IBNTH.astype(dtype) * o_IBNTH).sum(-1)

    def product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(letters, a, b, preferred_element_type=dtype)

    def step(carry: tuple, i: jax.Array, j: jax.Array, number: jax.Array) -> tuple:
        dq_IBNTH, dk_JBKSH, dv_JBKSH, db_NR = carry
        q_BNTH, k_BKSH, do_BNTH = _at(q_IBNTH, i), _at(k_JBKSH, j), _at(do_IBNTH, i)
        s_BNTS, mask_B1TS, slope_BNTS = _logits(options, q_BNTH, k_BKSH, b_NR, mask, i, j, J)
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - _at(lse_IBNT, i)[..., None]), 0)
        do_BKQH = _by_heads(do_BNTH, V)
        dp_BNTS = product('BKQH,BKSH->BKQS', do_BKQH, _at(v_JBKSH, j)).reshape(p_BNTS.shape)
        mixing_BNTS = p_BNTS
        if options.dropout:
            kept_BNTS = _kept(options, key, number, p_BNTS.shape)
            dp_BNTS, mixing_BNTS = dp_BNTS * kept_BNTS, p_BNTS * kept_BNTS
        mixing_BKQS = _by_heads(mixing_BNTS.astype(do_BNTH.dtype), V)
        dv_BKSH = product('BKQS,BKQH->BKSH', mixing_BKQS, do_BKQH)
        ds_BNTS = p_BNTS * (dp_BNTS - _at(mean_IBNT, i)[..., None])
        if b_NR is not None:
            t, s = ds_BNTS.shape[2:]
            begin, size = _distances(i, t, j, s, J)
            part_NR = lax.dynamic_slice_in_dim(db_NR, begin, size, 1)
            transposed = jax.linear_transpose(lambda b_NR: _toeplitz(b_NR, t, s), part_NR)
            part_NR = part_NR + transposed(ds_BNTS.sum(0))[0]
            db_NR = lax.dynamic_update_slice_in_dim(db_NR, part_NR, begin, 1)
        ds_BNTS = (ds_BNTS * slope_BNTS * options.scale).astype(q_BNTH.dtype)
        ds_BKQS = _by_heads(ds_BNTS, K)
        dq_BNTH = product('BKQS,BKSH->BKQH', ds_BKQS, k_BKSH).reshape(q_BNTH.shape)
        dk_BKSH = product('BKQS,BKQH->BKSH', ds_BKQS, _by_heads(q_BNTH, K))
        return (
            _put(dq_IBNTH, _at(dq_IBNTH, i) + dq_BNTH, i),
            _put(dk_JBKSH, _at(dk_JBKSH, j) + dk_BKSH, j),
            _put(dv_JBKSH, _at(dv_JBKSH, j) + dv_BKSH, j),
            db_NR,
        )

    sums = tuple(jnp.zeros(array.shape, dtype) for array in (q_IBNTH, k_JBKSH, v_JBKSH))
    db_NR = None if b_NR is None else jnp.zeros(b_NR.shape, dtype)
    gradients = _each_pair(options, step, (*sums, db_NR))
    inputs = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR)
    return (*jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None, None)


_attention.defvjp(_forward, _backward)

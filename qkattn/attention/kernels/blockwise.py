"""Attention in blocks of queries and keys, whose memory is linear in the context.

Online softmax (Rabe & Staats 2021, arXiv 2112.05682) with the backward pass of Dao et al. 2022 and
2023 (arXiv 2205.14135, 2307.08691), which computes the probabilities of a block again from the
log-sum-exp of every query. Blocks that the mask rules out are not computed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qkattn.attention.kernels.einsum import Call, Target
from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import SoftmaxOffByOne

# Queries, and keys, of a block. On CPUs it is measured: caches hold the logits of such a block.
BLOCK = {'cpu': 128}
BLOCK_ELSEWHERE = 512  # not measured

# Subtracted where a query hides itself: far below all logits, far above those of masked keys.
HIDDEN = 1e30


class _Options(NamedTuple):
    """The arguments that are not arrays, constants of the compiled program."""

    scale: float
    logit_cap: float | None
    off_by_one: bool  # as if every query had one more key, of logit 0 and value 0
    dropout: float
    pairs: tuple[tuple[int, int], ...]  # (i, j) of the blocks of queries and keys that are computed


def blockwise(call: Call, target: Target, block: int | None = None) -> jax.Array:
    """o_BTNH as in `attend`, of softmax or softmax_off_by_one; 0 without visible keys.

    Dropout draws other numbers than in `einsum`. `block` is the most queries, and keys, per block.
    """
    B, T, N, _ = call.q_BTNH.shape
    S = call.k_BSKH.shape[1]
    if block is None:
        block = BLOCK.get(target.platform, BLOCK_ELSEWHERE)
    # q_blocks (I) of t queries and k_blocks (J) of s keys, with as little padding as possible.
    q_blocks = math.ceil(T / block)
    k_blocks = math.ceil(S / block)
    t = math.ceil(T / q_blocks)
    s = math.ceil(S / k_blocks)

    mask = call.mask
    q_BTNH, scale = call.with_static_scale()
    options = _Options(
        scale=scale,
        logit_cap=call.logit_cap,
        off_by_one=isinstance(call.normalizer, SoftmaxOffByOne),
        dropout=call.dropout,
        pairs=_pairs(mask, q_blocks, t, k_blocks, s),
    )
    b_NR = None
    if call.bias is not None:
        # The biases of all R distances, from the first query to the last key up to the reverse.
        distances_R = mask.queries(1) + jnp.arange(1 - k_blocks * s, q_blocks * t)
        b_NR = call.bias(distances_R[None])[:, 0]
    o_IBNTH = _attention(
        options,
        _blocks(q_BTNH, q_blocks, t),
        _blocks(call.k_BSKH, k_blocks, s),
        _blocks(call.v_BSKH, k_blocks, s),
        b_NR,
        mask.padded(S, more_queries=q_blocks * t - T, more_keys=k_blocks * s - S),
        call.dropout_key if call.dropout else None,
    )
    o_BTNH = jnp.transpose(o_IBNTH, (1, 0, 3, 2, 4)).reshape(B, q_blocks * t, N, -1)
    return o_BTNH[:, :T]


def _blocks(x_BTNH: jax.Array, count: int, size: int) -> jax.Array:
    """x_IBNTH with `count` blocks of `size` positions, padded with zeros."""
    B, T, N, H = x_BTNH.shape
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, count * size - T), (0, 0), (0, 0)))
    return jnp.transpose(x_BTNH.reshape(B, count, size, N, H), (1, 0, 3, 2, 4))


def _pairs(mask: Mask, q_blocks: int, t: int, k_blocks: int, s: int) -> tuple[tuple[int, int], ...]:
    """The pairs (i, j) of blocks in which the causal mask and the window leave anything."""
    pairs_IJ = np.ones((q_blocks, k_blocks), bool)
    if isinstance(mask.start, int):
        first_t_I1 = mask.start + np.arange(q_blocks)[:, None] * t  # of every block
        last_s_J = np.arange(1, k_blocks + 1) * s - 1
        # The least distance t - s in a pair of blocks, and the greatest.
        least_IJ = first_t_I1 - last_s_J
        most_IJ = least_IJ + t + s - 2
        if mask.causal:
            pairs_IJ &= most_IJ >= 0
        if mask.window is not None:
            pairs_IJ &= (least_IJ < mask.window) & (most_IJ > -mask.window)
    return tuple((int(i), int(j)) for i, j in np.argwhere(pairs_IJ))


def _each_pair(options: _Options, step: Callable, carry: tuple) -> tuple:
    """The carry after `carry = step(carry, i, j, number)` for all pairs of blocks in turn."""
    i_P, j_P = np.array(options.pairs, np.int32).reshape(-1, 2).T
    number_P = np.arange(len(i_P), dtype=np.int32)

    def body(carry: tuple, pair: tuple) -> tuple[tuple, None]:
        i, j, number = pair
        return step(carry, i, j, number), None

    carry, _ = lax.scan(body, carry, (i_P, j_P, number_P))
    return carry


def _block(array: jax.Array, index: jax.Array) -> jax.Array:
    """Block number `index` of an array of blocks."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _with_block(array: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    """The array of blocks with another block number `index`."""
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
    num_blocks: int,
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Logits s_BNTS of blocks i and j, low where masked; the mask; the slope of the logit cap.

    The slope is the derivative of a logit by the logit before the cap. `num_blocks` is J.
    """
    B, N, t, _ = q_BNTH.shape
    _, K, s, _ = k_BKSH.shape
    dtype = jnp.promote_types(q_BNTH.dtype, jnp.float32)
    s_BNTS = jnp.einsum(
        'BKQH,BKSH->BKQS', _by_heads(q_BNTH, K), k_BKSH, preferred_element_type=dtype
    ).reshape(B, N, t, s)
    slope_BNTS: jax.Array | float = 1.0
    s_BNTS = s_BNTS * options.scale
    if options.logit_cap is not None:
        tanh_BNTS = jnp.tanh(s_BNTS / options.logit_cap)
        s_BNTS = options.logit_cap * tanh_BNTS
        slope_BNTS = 1 - jnp.square(tanh_BNTS)
    if b_NR is not None:
        start, size = _distances(i, t, j, s, num_blocks)
        b_NR = lax.dynamic_slice_in_dim(b_NR, start, size, 1)  # of this pair of blocks
        s_BNTS = s_BNTS + _toeplitz(b_NR, t, s)
    if mask.hides_self:
        itself_TS = i * t + mask.queries(t)[:, None] == j * s + jnp.arange(s)
        s_BNTS = jnp.where(itself_TS, s_BNTS - HIDDEN, s_BNTS)
    mask_B1TS = mask.block(i * t, t, j * s, s)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(dtype).min / 2)
    return s_BNTS, mask_B1TS, slope_BNTS


def _distances(
    i: jax.Array, t: int, j: jax.Array, s: int, num_blocks: int
) -> tuple[jax.Array, int]:
    """Where the distances of blocks i and j begin among all R distances, and how many they are."""
    begin = i * t + (num_blocks - 1 - j) * s
    return begin, t + s - 1


def _toeplitz(b_NR: jax.Array, t: int, s: int) -> jax.Array:
    """b_NTS whose element (t, s) is b[t - s + S - 1], R = T + S - 1, without a gather."""
    N = len(b_NR)
    # Repeat a row of R + 1 elements, and cut the result into rows of R + 2: each begins one element
    # later in b than the row before it, as the distances of a query do.
    row_NR = jnp.pad(b_NR, ((0, 0), (0, 1)))
    repeated_NX = jnp.tile(row_NR, (1, t + 1))[:, : t * (t + s + 1)]
    rows_NTR = repeated_NX.reshape(N, t, t + s + 1)
    return rows_NTR[:, :, s - 1 :: -1]  # the distances of a query fall from key to key


def _kept(options: _Options, key: jax.Array, number: jax.Array, shape: tuple) -> jax.Array:
    """0 where a probability is dropped, else 1 / (1 - rate)."""
    keep = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - options.dropout, shape)
    return keep / (1 - options.dropout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, *operands: Any) -> jax.Array:
    """o_IBNTH of queries in I blocks and keys in J blocks; the operands are those of `_forward`."""
    o_IBNTH, _ = _forward(options, *operands)
    return o_IBNTH


def _forward(
    options: _Options,
    q_IBNTH: jax.Array,
    k_JBKSH: jax.Array,
    v_JBKSH: jax.Array,
    b_NR: jax.Array | None,
    mask: Mask,
    key: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    """o_IBNTH, and what `_backward` needs.

    The online softmax carries, for every query, the greatest logit so far (top), the sum of
    exp(s - top), and the sum of exp(s - top) v.
    """
    dtype = jnp.promote_types(q_IBNTH.dtype, jnp.float32)
    rows = q_IBNTH.shape[:-1]
    J, _, K, _, H = v_JBKSH.shape

    def step(carry: tuple, i: jax.Array, j: jax.Array, number: jax.Array) -> tuple:
        """Adds key block j to the sums of query block i."""
        o_IBNTH, top_IBNT, sum_IBNT = carry
        s_BNTS, mask_B1TS, _ = _logits(
            options, _block(q_IBNTH, i), _block(k_JBKSH, j), b_NR, mask, i, j, J
        )
        old_BNT = _block(top_IBNT, i)
        top_BNT = jnp.maximum(old_BNT, s_BNTS.max(-1))
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - top_BNT[..., None]), 0)
        shrink_BNT = jnp.exp(old_BNT - top_BNT)
        sum_BNT = _block(sum_IBNT, i) * shrink_BNT + p_BNTS.sum(-1)
        if options.dropout:
            p_BNTS = p_BNTS * _kept(options, key, number, p_BNTS.shape)
        mixed_BKQH = jnp.einsum(
            'BKQS,BKSH->BKQH',
            _by_heads(p_BNTS.astype(v_JBKSH.dtype), K),
            _block(v_JBKSH, j),
            preferred_element_type=dtype,
        )
        o_BNTH = _block(o_IBNTH, i) * shrink_BNT[..., None] + mixed_BKQH.reshape(*rows[1:], H)
        return (
            _with_block(o_IBNTH, o_BNTH, i),
            _with_block(top_IBNT, top_BNT, i),
            _with_block(sum_IBNT, sum_BNT, i),
        )

    if options.off_by_one:
        # One key of logit 0 and value 0 comes before all others.
        first_top = 0.0
        first_sum = 1.0
    else:
        first_top = float(jnp.finfo(dtype).min / 2)
        first_sum = 0.0
    start = (
        jnp.zeros((*rows, H), dtype),
        jnp.full(rows, first_top, dtype),
        jnp.full(rows, first_sum, dtype),
    )
    o_IBNTH, top_IBNT, sum_IBNT = _each_pair(options, step, start)
    sum_IBNT = jnp.where(sum_IBNT == 0, 1, sum_IBNT)  # a query without visible keys
    o_IBNTH = (o_IBNTH / sum_IBNT[..., None]).astype(v_JBKSH.dtype)
    log_sum_exp_IBNT = top_IBNT + jnp.log(sum_IBNT)
    saved = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, log_sum_exp_IBNT)
    return o_IBNTH, saved


def _backward(options: _Options, saved: tuple, do_IBNTH: jax.Array) -> tuple:
    """The gradients of all operands; None for the mask and the key.

    ds = p (dp - do . o), where p = exp(s - log-sum-exp) and dp = do v^T; dv = p^T do.
    """
    q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, log_sum_exp_IBNT = saved
    dtype = log_sum_exp_IBNT.dtype
    J, _, K, _, _ = k_JBKSH.shape
    V = v_JBKSH.shape[2]  # value heads
    mean_IBNT = (do_IBNTH.astype(dtype) * o_IBNTH).sum(-1)  # do . o, the mean of dp under p

    def product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(letters, a, b, preferred_element_type=dtype)

    def step(carry: tuple, i: jax.Array, j: jax.Array, number: jax.Array) -> tuple:
        dq_IBNTH, dk_JBKSH, dv_JBKSH, db_NR = carry
        q_BNTH = _block(q_IBNTH, i)
        k_BKSH = _block(k_JBKSH, j)
        do_BNTH = _block(do_IBNTH, i)
        s_BNTS, mask_B1TS, slope_BNTS = _logits(options, q_BNTH, k_BKSH, b_NR, mask, i, j, J)
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - _block(log_sum_exp_IBNT, i)[..., None]), 0)
        do_BKQH = _by_heads(do_BNTH, V)
        dp_BNTS = product('BKQH,BKSH->BKQS', do_BKQH, _block(v_JBKSH, j)).reshape(p_BNTS.shape)
        mixing_BNTS = p_BNTS  # what the values were averaged with
        if options.dropout:
            kept_BNTS = _kept(options, key, number, p_BNTS.shape)
            dp_BNTS = dp_BNTS * kept_BNTS
            mixing_BNTS = p_BNTS * kept_BNTS
        mixing_BKQS = _by_heads(mixing_BNTS.astype(do_BNTH.dtype), V)
        dv_BKSH = product('BKQS,BKQH->BKSH', mixing_BKQS, do_BKQH)
        ds_BNTS = p_BNTS * (dp_BNTS - _block(mean_IBNT, i)[..., None])
        if b_NR is not None:
            t, s = ds_BNTS.shape[2:]
            begin, size = _distances(i, t, j, s, J)
            part_NR = lax.dynamic_slice_in_dim(db_NR, begin, size, 1)
            transposed = jax.linear_transpose(lambda b_NR: _toeplitz(b_NR, t, s), part_NR)
            (change_NR,) = transposed(ds_BNTS.sum(0))
            part_NR = part_NR + change_NR
            db_NR = lax.dynamic_update_slice_in_dim(db_NR, part_NR, begin, 1)
        ds_BNTS = (ds_BNTS * slope_BNTS * options.scale).astype(q_BNTH.dtype)
        ds_BKQS = _by_heads(ds_BNTS, K)
        dq_BNTH = product('BKQS,BKSH->BKQH', ds_BKQS, k_BKSH).reshape(q_BNTH.shape)
        dk_BKSH = product('BKQS,BKQH->BKSH', ds_BKQS, _by_heads(q_BNTH, K))
        return (
            _with_block(dq_IBNTH, _block(dq_IBNTH, i) + dq_BNTH, i),
            _with_block(dk_JBKSH, _block(dk_JBKSH, j) + dk_BKSH, j),
            _with_block(dv_JBKSH, _block(dv_JBKSH, j) + dv_BKSH, j),
            db_NR,
        )

    inputs = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR)
    start = jax.tree.map(lambda array: jnp.zeros(array.shape, dtype), inputs)
    sums = _each_pair(options, step, start)
    gradients = jax.tree.map(lambda total, array: total.astype(array.dtype), sums, inputs)
    return (*gradients, None, None)


_attention.defvjp(_forward, _backward)

"""Attention in blocks of queries and keys, whose memory is linear in the context.

The forward pass is the online softmax (Rabe & Staats 2021, arXiv 2112.05682). The backward pass is
that of Dao et al. 2022 and 2023 (arXiv 2205.14135, 2307.08691): it computes the probabilities of a
block again, from the log-sum-exp of every query. Blocks that the mask hides are not computed.
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

# The most queries, and the most keys, in a block. On CPUs this size is measured: the logits of such
# a block fit into the processor's caches.
BLOCK = {'cpu': 128}
BLOCK_ELSEWHERE = 512  # not measured

# Subtracted from a query's logit with itself if the mask hides it. The result is far below every
# other logit, but far above those of masked keys, so a query that sees only itself attends to it.
HIDDEN = 1e30


class _Options(NamedTuple):
    """The arguments that are not arrays. They are constants of the compiled program."""

    scale: float
    logit_cap: float | None
    off_by_one: bool  # as if every query had one more key, of logit 0 and value 0
    dropout: float
    pairs: tuple[tuple[int, int], ...]  # (i, j) of the blocks of queries and keys that are computed


def blockwise(call: Call, target: Target, block: int | None = None) -> jax.Array:
    """Computes o_BTNH of `attend` block by block; the normalizer is softmax or softmax_off_by_one.

    A query without visible keys gets 0. Dropout draws different numbers than `einsum` does. `block`
    is the most queries, and the most keys, in a block.
    """
    B, T, N, _ = call.q_BTNH.shape
    S = call.k_BSKH.shape[1]
    if block is None:
        block = BLOCK.get(target.platform, BLOCK_ELSEWHERE)

    # There are I = q_blocks blocks of t queries and J = k_blocks blocks of s keys. t and s are the
    # smallest sizes for these numbers of blocks, so there is little padding.
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
        # A bias depends only on the distance t - s, which takes R values: the least is that of the
        # first query and the last key, the greatest that of the last query and the first key.
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
    """Pads x with zeros and cuts it into I = `count` blocks of `size` positions: x_IBNTH."""
    B, T, N, H = x_BTNH.shape
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, count * size - T), (0, 0), (0, 0)))
    return jnp.transpose(x_BTNH.reshape(B, count, size, N, H), (1, 0, 3, 2, 4))


def _pairs(mask: Mask, q_blocks: int, t: int, k_blocks: int, s: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (i, j) of blocks that the causal mask and the window do not hide entirely.

    If the position of the first query is an array, its value is not known here, and all pairs are
    returned.
    """
    pairs_IJ = np.ones((q_blocks, k_blocks), bool)
    if isinstance(mask.start, int):
        # The first query position and the last key position of every block.
        first_t_I1 = mask.start + np.arange(q_blocks)[:, None] * t
        last_s_J = np.arange(1, k_blocks + 1) * s - 1
        # The least and the greatest distance t - s in every pair of blocks.
        least_IJ = first_t_I1 - last_s_J
        most_IJ = least_IJ + t + s - 2
        if mask.causal:
            pairs_IJ &= most_IJ >= 0
        if mask.window is not None:
            pairs_IJ &= (least_IJ < mask.window) & (most_IJ > -mask.window)
    return tuple((int(i), int(j)) for i, j in np.argwhere(pairs_IJ))


def _each_pair(options: _Options, step: Callable, carry: tuple) -> tuple:
    """Runs `carry = step(carry, i, j, number)` for every pair of blocks, and returns the carry.

    `number` counts the pairs from 0.
    """
    i_P, j_P = np.array(options.pairs, np.int32).reshape(-1, 2).T
    number_P = np.arange(len(i_P), dtype=np.int32)

    def body(carry: tuple, pair: tuple) -> tuple[tuple, None]:
        i, j, number = pair
        return step(carry, i, j, number), None

    carry, _ = lax.scan(body, carry, (i_P, j_P, number_P))
    return carry


def _block(array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns block number `index` of an array of blocks."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _with_block(array: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    """Returns an array of blocks in which `block` replaces block number `index`."""
    return lax.dynamic_update_index_in_dim(array, block.astype(array.dtype), index, 0)


def _by_heads(x_BNTS: jax.Array, heads: int) -> jax.Array:
    """Reshapes [B, N, T, S] to [B, K, Q, S], where K = `heads`.

    The N / K query heads that share a key or value head become further rows: Q = N / K * T.
    """
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
    """Computes the logits of query block i and key block j; `num_blocks` is J.

    Returns:
      s_BNTS: the logits, very low where masked.
      mask_B1TS: False where masked.
      slope_BNTS: the derivative of each logit with respect to the logit before the cap.
    """
    B, N, t, _ = q_BNTH.shape
    _, K, s, _ = k_BKSH.shape
    dtype = jnp.promote_types(q_BNTH.dtype, jnp.float32)
    s_BKQS = jnp.einsum(
        'BKQH,BKSH->BKQS', _by_heads(q_BNTH, K), k_BKSH, preferred_element_type=dtype
    )
    s_BNTS = s_BKQS.reshape(B, N, t, s) * options.scale

    slope_BNTS: jax.Array | float = 1.0
    if options.logit_cap is not None:
        tanh_BNTS = jnp.tanh(s_BNTS / options.logit_cap)
        s_BNTS = options.logit_cap * tanh_BNTS
        slope_BNTS = 1 - jnp.square(tanh_BNTS)

    if b_NR is not None:
        start, size = _distances(i, t, j, s, num_blocks)
        b_of_blocks_NR = lax.dynamic_slice_in_dim(b_NR, start, size, 1)
        s_BNTS = s_BNTS + _toeplitz(b_of_blocks_NR, t, s)

    if mask.hides_self:
        q_position_T1 = i * t + mask.queries(t)[:, None]
        k_position_S = j * s + jnp.arange(s)
        is_itself_TS = q_position_T1 == k_position_S
        s_BNTS = jnp.where(is_itself_TS, s_BNTS - HIDDEN, s_BNTS)

    mask_B1TS = mask.block(i * t, t, j * s, s)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(dtype).min / 2)
    return s_BNTS, mask_B1TS, slope_BNTS


def _distances(
    i: jax.Array, t: int, j: jax.Array, s: int, num_blocks: int
) -> tuple[jax.Array, int]:
    """Returns which of the R distances belong to blocks i and j: the first one, and how many."""
    begin = i * t + (num_blocks - 1 - j) * s
    return begin, t + s - 1


def _toeplitz(b_NR: jax.Array, t: int, s: int) -> jax.Array:
    """Returns b_NTS of t queries and s keys, with the element b_NR[n, i - j + s - 1] at [n, i, j].

    R is t + s - 1. Reshapes do this faster than a gather would.
    """
    N = len(b_NR)
    # A row of R + 1 elements is repeated, and the result is cut into rows of R + 2. Each of these
    # begins one element later in b than the one before it, as the distances of a query do.
    row_NR = jnp.pad(b_NR, ((0, 0), (0, 1)))
    repeated_NX = jnp.tile(row_NR, (1, t + 1))[:, : t * (t + s + 1)]
    rows_NTR = repeated_NX.reshape(N, t, t + s + 1)
    # The distance decreases from key to key, so each row is read backwards from element s - 1.
    return rows_NTR[:, :, s - 1 :: -1]


def _kept(options: _Options, key: jax.Array, number: jax.Array, shape: tuple) -> jax.Array:
    """Returns the factors of dropout for one pair of blocks: 0 or 1 / (1 - rate)."""
    keep = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - options.dropout, shape)
    return keep / (1 - options.dropout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, *operands: Any) -> jax.Array:
    """Returns o_IBNTH; the operands are those of `_forward`, whose gradient is `_backward`."""
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
    """Returns o_IBNTH, and the arrays that `_backward` needs.

    The online softmax visits one key block after another. For every query it carries the greatest
    logit so far (top), the sum of exp(s - top), and the sum of exp(s - top) v.
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
        old_top_BNT = _block(top_IBNT, i)
        top_BNT = jnp.maximum(old_top_BNT, s_BNTS.max(-1))
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - top_BNT[..., None]), 0)

        # The earlier sums refer to the old top; this factor makes them refer to the new one.
        shrink_BNT = jnp.exp(old_top_BNT - top_BNT)
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
        # The sums begin as if a key with logit 0 and value 0 came before all others.
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

    # The sum is 0 for a query without visible keys, whose output is then 0 / 1.
    sum_IBNT = jnp.where(sum_IBNT == 0, 1, sum_IBNT)
    o_IBNTH = (o_IBNTH / sum_IBNT[..., None]).astype(v_JBKSH.dtype)
    log_sum_exp_IBNT = top_IBNT + jnp.log(sum_IBNT)
    saved = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, log_sum_exp_IBNT)
    return o_IBNTH, saved


def _backward(options: _Options, saved: tuple, do_IBNTH: jax.Array) -> tuple:
    """Returns the gradients of all operands, with None for the mask and the key.

    With p = exp(s - log-sum-exp) and dp = do v^T, they are ds = p (dp - do . o) and dv = p^T do,
    from which dq = ds k and dk = ds^T q follow.
    """
    q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, log_sum_exp_IBNT = saved
    dtype = log_sum_exp_IBNT.dtype
    J, _, K, _, _ = k_JBKSH.shape
    num_value_heads = v_JBKSH.shape[2]
    mean_dp_IBNT = (do_IBNTH.astype(dtype) * o_IBNTH).sum(-1)  # do . o, the mean of dp under p

    def product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(letters, a, b, preferred_element_type=dtype)

    def step(carry: tuple, i: jax.Array, j: jax.Array, number: jax.Array) -> tuple:
        """Adds what query block i and key block j contribute to the gradients."""
        dq_IBNTH, dk_JBKSH, dv_JBKSH, db_NR = carry
        q_BNTH = _block(q_IBNTH, i)
        k_BKSH = _block(k_JBKSH, j)
        do_BNTH = _block(do_IBNTH, i)
        s_BNTS, mask_B1TS, slope_BNTS = _logits(options, q_BNTH, k_BKSH, b_NR, mask, i, j, J)
        log_sum_exp_BNT1 = _block(log_sum_exp_IBNT, i)[..., None]
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - log_sum_exp_BNT1), 0)

        # The gradients of the probabilities and of the values.
        do_BKQH = _by_heads(do_BNTH, num_value_heads)
        dp_BNTS = product('BKQH,BKSH->BKQS', do_BKQH, _block(v_JBKSH, j)).reshape(p_BNTS.shape)
        mixing_BNTS = p_BNTS  # the probabilities after dropout
        if options.dropout:
            kept_BNTS = _kept(options, key, number, p_BNTS.shape)
            dp_BNTS = dp_BNTS * kept_BNTS
            mixing_BNTS = p_BNTS * kept_BNTS
        mixing_BKQS = _by_heads(mixing_BNTS.astype(do_BNTH.dtype), num_value_heads)
        dv_BKSH = product('BKQS,BKQH->BKSH', mixing_BKQS, do_BKQH)

        # The gradients of the logits and of the biases.
        ds_BNTS = p_BNTS * (dp_BNTS - _block(mean_dp_IBNT, i)[..., None])
        if b_NR is not None:
            t, s = ds_BNTS.shape[2:]
            begin, size = _distances(i, t, j, s, J)
            part_NR = lax.dynamic_slice_in_dim(db_NR, begin, size, 1)
            sum_over_diagonals = jax.linear_transpose(lambda b_NR: _toeplitz(b_NR, t, s), part_NR)
            (change_NR,) = sum_over_diagonals(ds_BNTS.sum(0))
            part_NR = part_NR + change_NR
            db_NR = lax.dynamic_update_slice_in_dim(db_NR, part_NR, begin, 1)

        # The gradients of the queries and keys, behind the logit cap and the scale.
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

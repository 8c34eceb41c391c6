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


class _Grid(NamedTuple):
    """How T queries and S keys are cut into blocks of equal size; the last ones are padded.

    The letters of array names are I for blocks of queries and J for blocks of keys. Within a block,
    T and S stand for `q_size` and `k_size`.
    """

    num_q_blocks: int  # I
    q_size: int  # queries in a block
    num_k_blocks: int  # J
    k_size: int  # keys in a block

    @classmethod
    def of_lengths(cls, num_queries: int, num_keys: int, block: int) -> '_Grid':
        """Returns a grid of as few blocks as possible, of at most `block` queries and `block` keys.

        Their sizes are as equal as possible: with block=128, 300 queries are 3 blocks of 100. So
        there is little padding.
        """
        num_q_blocks = math.ceil(num_queries / block)
        num_k_blocks = math.ceil(num_keys / block)
        return cls(
            num_q_blocks=num_q_blocks,
            q_size=math.ceil(num_queries / num_q_blocks),
            num_k_blocks=num_k_blocks,
            k_size=math.ceil(num_keys / num_k_blocks),
        )

    @property
    def padded_lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys in all blocks together."""
        return self.num_q_blocks * self.q_size, self.num_k_blocks * self.k_size


class _Options(NamedTuple):
    """The arguments that are not arrays. They are constants of the compiled program."""

    scale: float
    logit_cap: float | None
    off_by_one: bool  # as if every query had one more key, of logit 0 and value 0
    dropout: float
    grid: _Grid
    pairs: tuple[tuple[int, int], ...]  # (i, j) of the blocks of queries and keys that are computed


def blockwise(call: Call, target: Target, block: int | None = None) -> jax.Array:
    """Computes o_BTNH of `attend` block by block; the normalizer is softmax or softmax_off_by_one.

    A block has at most `block` queries and `block` keys. The output of a query without visible keys
    is 0. Dropout draws other numbers than `einsum` does.
    """
    B, _, N, _ = call.q_BTNH.shape
    T, S = call.lengths
    if block is None:
        block = BLOCK.get(target.platform, BLOCK_ELSEWHERE)
    grid = _Grid.of_lengths(T, S, block)
    padded_T, padded_S = grid.padded_lengths

    mask = call.mask
    q_BTNH, scale = call.with_static_scale()
    options = _Options(
        scale=scale,
        logit_cap=call.logit_cap,
        off_by_one=isinstance(call.normalizer, SoftmaxOffByOne),
        dropout=call.dropout,
        grid=grid,
        pairs=_visible_pairs(mask, grid),
    )

    b_NR = None
    if call.bias is not None:
        # A bias depends only on the distance t - s, so it is computed once for each of the R
        # distances. They ascend from 1 - S, of the first query and the last key, to T - 1, of the
        # last query and the first key. In decoding, the first query is at position `mask.start`.
        distances_R = mask.start + jnp.arange(1 - padded_S, padded_T)
        b_NR = call.bias(distances_R[None])[:, 0]

    o_IBNTH = _attention(
        options,
        _blocks(q_BTNH, grid.num_q_blocks, grid.q_size),
        _blocks(call.k_BSKH, grid.num_k_blocks, grid.k_size),
        _blocks(call.v_BSKH, grid.num_k_blocks, grid.k_size),
        b_NR,
        mask.padded(S, more_queries=padded_T - T, more_keys=padded_S - S),
        call.dropout_key if call.dropout else None,
    )
    # Joins the blocks of queries again, and cuts off the padding.
    o_BITNH = jnp.transpose(o_IBNTH, (1, 0, 3, 2, 4))
    o_BTNH = o_BITNH.reshape(B, padded_T, N, -1)
    return o_BTNH[:, :T]


def _blocks(x_BTNH: jax.Array, count: int, size: int) -> jax.Array:
    """Pads x with zeros and cuts it into I = `count` blocks of `size` positions: x_IBNTH."""
    B, T, N, H = x_BTNH.shape
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, count * size - T), (0, 0), (0, 0)))
    return jnp.transpose(x_BTNH.reshape(B, count, size, N, H), (1, 0, 3, 2, 4))


def _visible_pairs(mask: Mask, grid: _Grid) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (i, j) of a query block and a key block that have to be computed.

    Pairs that the causal mask or the window hides entirely are left out. With blocks of 4, queries
    0 to 3 see no key of 4 to 7 under a causal mask, so (0, 1) is left out. In decoding, the
    position of the first query is an array without a known value, so all pairs are returned.
    """
    visible_IJ = np.ones((grid.num_q_blocks, grid.num_k_blocks), bool)
    if isinstance(mask.start, int):
        first_query_I1 = mask.start + np.arange(grid.num_q_blocks)[:, None] * grid.q_size
        last_query_I1 = first_query_I1 + grid.q_size - 1
        first_key_J = np.arange(grid.num_k_blocks) * grid.k_size
        last_key_J = first_key_J + grid.k_size - 1
        # The least and the greatest distance t - s in each pair of blocks.
        least_IJ = first_query_I1 - last_key_J
        greatest_IJ = last_query_I1 - first_key_J
        if mask.causal:
            visible_IJ &= greatest_IJ >= 0
        if mask.window is not None:
            visible_IJ &= least_IJ < mask.window
            visible_IJ &= greatest_IJ > -mask.window
    return tuple((int(i), int(j)) for i, j in np.argwhere(visible_IJ))


def _scan_pairs(options: _Options, step: Callable, carry: tuple) -> tuple:
    """Runs `carry = step(carry, i, j, number)` for all pairs of blocks; returns the last carry.

    Args:
      options: options.pairs are the pairs (i, j) of a query block and a key block.
      step: the function to call; `number` counts the pairs from 0.
      carry: the first carry.
    """
    pairs_P2 = np.array(options.pairs, np.int32).reshape(-1, 2)  # P may be 0.
    i_P = pairs_P2[:, 0]
    j_P = pairs_P2[:, 1]
    number_P = np.arange(len(pairs_P2), dtype=np.int32)

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


def _add_to_block(array: jax.Array, addend: jax.Array, index: jax.Array) -> jax.Array:
    """Returns an array of blocks in which `addend` is added to block number `index`."""
    return _with_block(array, _block(array, index) + addend, index)


def _by_heads(x_BNTS: jax.Array, heads: int) -> jax.Array:
    """Reshapes [B, N, T, S] to [B, K, Q, S], where K = `heads`.

    M = N / K query heads share a key or value head. Their queries become the Q = M T rows of that
    head.
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
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Computes the logits of one pair of blocks.

    Args:
      options: the scale, the logit cap and the grid.
      q_BNTH: query block number i.
      k_BKSH: key block number j.
      b_NR: the biases by distance, for the distances of all blocks.
      mask: the mask of all blocks.
      i: the number of the query block, from 0.
      j: the number of the key block, from 0.

    Returns:
      s_BNTS: the logits, very low where masked.
      mask_B1TS: False where masked.
      slope_BNTS: the derivative of each logit with respect to the logit before the cap.
    """
    grid = options.grid
    B, N, T, _ = q_BNTH.shape
    _, K, S, _ = k_BKSH.shape
    dtype = jnp.promote_types(q_BNTH.dtype, jnp.float32)
    s_BKQS = jnp.einsum(
        'BKQH,BKSH->BKQS', _by_heads(q_BNTH, K), k_BKSH, preferred_element_type=dtype
    )
    s_BNTS = s_BKQS.reshape(B, N, T, S) * options.scale

    slope_BNTS: jax.Array | float = 1.0
    if options.logit_cap is not None:
        tanh_BNTS = jnp.tanh(s_BNTS / options.logit_cap)
        s_BNTS = options.logit_cap * tanh_BNTS
        slope_BNTS = 1 - jnp.square(tanh_BNTS)

    if b_NR is not None:
        first, count = _distances(grid, i, j)
        b_of_blocks_NR = lax.dynamic_slice_in_dim(b_NR, first, count, 1)
        s_BNTS = s_BNTS + _toeplitz(b_of_blocks_NR, T, S)

    # The indices of the first query and the first key of the blocks.
    first_query = i * grid.q_size
    first_key = j * grid.k_size
    if mask.hides_self:
        # In decoding, the positions of queries begin behind the cached keys, at mask.start.
        q_position_T1 = first_query + mask.queries(T)[:, None]
        k_position_S = first_key + jnp.arange(S)
        is_itself_TS = q_position_T1 == k_position_S
        s_BNTS = jnp.where(is_itself_TS, s_BNTS - HIDDEN, s_BNTS)

    mask_B1TS = mask.block(first_query, T, first_key, S)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(dtype).min / 2)
    return s_BNTS, mask_B1TS, slope_BNTS


def _distances(grid: _Grid, i: jax.Array, j: jax.Array) -> tuple[jax.Array, int]:
    """Returns which of the R distances occur in blocks i and j: the first one, and how many."""
    first = i * grid.q_size + (grid.num_k_blocks - 1 - j) * grid.k_size
    return first, grid.q_size + grid.k_size - 1


def _toeplitz(b_NR: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """Returns the biases b_NTS of T queries and S keys, from one bias for each distance.

    The R = T + S - 1 distances t - s ascend, from 1 - S to T - 1. For 2 queries and 3 keys, they
    are -2, -1, 0 and 1. Their biases a, b, c, d give [[c b a], [d c b]].
    """
    N = len(b_NR)
    T = num_queries
    S = num_keys
    # A gather would be slower than these reshapes. In the example, _ is the padding:
    #
    # 1. Pad by one element, and repeat:    [a b c d _ a b c d _ a b]
    # 2. Cut into rows of 6. They are one   [a b c d _ a]
    #    longer than a b c d _, so each     [b c d _ a b]
    #    row begins one element later:
    # 3. Take the first 3 elements of       [c b a]
    #    each row, backwards:               [d c b]
    padded_NX = jnp.pad(b_NR, ((0, 0), (0, 1)))
    row_length = T + S + 1
    repeated_NX = jnp.tile(padded_NX, (1, T + 1))[:, : T * row_length]
    rows_NTX = repeated_NX.reshape(N, T, row_length)
    return rows_NTX[:, :, S - 1 :: -1]


def _dropout_factors(
    options: _Options, key: jax.Array, number: jax.Array, shape: tuple
) -> jax.Array:
    """Returns the factors of dropout for pair number `number` of blocks: 0 or 1 / (1 - rate)."""
    keep = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - options.dropout, shape)
    return keep / (1 - options.dropout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, *operands: Any) -> jax.Array:
    """Returns o_IBNTH. It takes the operands of `_forward`, and its gradient is `_backward`."""
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
    """Returns o_IBNTH, and the arrays that `_backward` needs. `key` is the random key of dropout.

    The online softmax visits one key block after another. For each query it keeps the greatest
    logit so far (top), the sum of exp(s - top) (sum), and the sum of exp(s - top) v (o). A key
    block with logits s and values v changes these to

        new top = max(old top, s)
        shrink  = exp(old top - new top)
        p       = exp(s - new top)
        new sum = shrink * old sum + sum of p
        new o   = shrink * old o + p v

    After the last block, o / sum is the output.
    """
    dtype = jnp.promote_types(q_IBNTH.dtype, jnp.float32)
    num_blocks, B, N, T, _ = q_IBNTH.shape
    K, _, H = v_JBKSH.shape[2:]

    def step(carry: tuple, i: jax.Array, j: jax.Array, number: jax.Array) -> tuple:
        """Updates o, top and sum of query block i with key block j, by the equations above."""
        o_IBNTH, top_IBNT, sum_IBNT = carry
        q_BNTH = _block(q_IBNTH, i)
        k_BKSH = _block(k_JBKSH, j)
        v_BKSH = _block(v_JBKSH, j)
        s_BNTS, mask_B1TS, _ = _logits(options, q_BNTH, k_BKSH, b_NR, mask, i, j)

        old_top_BNT = _block(top_IBNT, i)
        top_BNT = jnp.maximum(old_top_BNT, s_BNTS.max(-1))
        shrink_BNT = jnp.exp(old_top_BNT - top_BNT)
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - top_BNT[..., None]), 0)
        sum_BNT = _block(sum_IBNT, i) * shrink_BNT + p_BNTS.sum(-1)

        # Dropout acts on the weights of the values, but not on the sum that normalizes them.
        if options.dropout:
            p_BNTS = p_BNTS * _dropout_factors(options, key, number, p_BNTS.shape)
        p_BKQS = _by_heads(p_BNTS.astype(v_BKSH.dtype), K)
        pv_BKQH = jnp.einsum('BKQS,BKSH->BKQH', p_BKQS, v_BKSH, preferred_element_type=dtype)
        pv_BNTH = pv_BKQH.reshape(B, N, T, H)
        o_BNTH = _block(o_IBNTH, i) * shrink_BNT[..., None] + pv_BNTH
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
        jnp.zeros((num_blocks, B, N, T, H), dtype),
        jnp.full((num_blocks, B, N, T), first_top, dtype),
        jnp.full((num_blocks, B, N, T), first_sum, dtype),
    )
    o_IBNTH, top_IBNT, sum_IBNT = _scan_pairs(options, step, start)

    # The sum is 0 for a query without visible keys, whose output is then 0 / 1.
    sum_IBNT = jnp.where(sum_IBNT == 0, 1, sum_IBNT)
    o_IBNTH = (o_IBNTH / sum_IBNT[..., None]).astype(v_JBKSH.dtype)
    log_sum_exp_IBNT = top_IBNT + jnp.log(sum_IBNT)
    saved = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, log_sum_exp_IBNT)
    return o_IBNTH, saved


def _backward(options: _Options, saved: tuple, do_IBNTH: jax.Array) -> tuple:
    """Returns the gradients of all operands, with None for the mask and the key."""
    q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, key, o_IBNTH, log_sum_exp_IBNT = saved
    dtype = log_sum_exp_IBNT.dtype
    num_key_heads = k_JBKSH.shape[2]
    num_value_heads = v_JBKSH.shape[2]
    mean_dp_IBNT = (do_IBNTH.astype(dtype) * o_IBNTH).sum(-1)  # do . o

    def einsum(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(letters, a, b, preferred_element_type=dtype)

    def step(carry: tuple, i: jax.Array, j: jax.Array, pair_index: jax.Array) -> tuple:
        """Adds the gradients from query block i and key block j to the sums in the carry.

        dx is the gradient of x. Without dropout, logit cap and scale:

            p  = exp(s - log-sum-exp)
            dp = do v^T
            dv = p^T do
            ds = p (dp - mean_dp), where mean_dp = do . o is the mean of dp under p
            dq = ds k
            dk = ds^T q

        Axis Q holds the queries of all heads that share a key or value head.
        """
        dq_IBNTH, dk_JBKSH, dv_JBKSH, db_NR = carry
        q_BNTH = _block(q_IBNTH, i)
        k_BKSH = _block(k_JBKSH, j)
        v_BKSH = _block(v_JBKSH, j)
        do_BNTH = _block(do_IBNTH, i)
        mean_dp_BNT1 = _block(mean_dp_IBNT, i)[..., None]
        log_sum_exp_BNT1 = _block(log_sum_exp_IBNT, i)[..., None]

        # Recompute the probabilities of the forward pass.
        s_BNTS, mask_B1TS, cap_slope_BNTS = _logits(options, q_BNTH, k_BKSH, b_NR, mask, i, j)
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - log_sum_exp_BNT1), 0)

        # Gradients of probabilities and values.
        do_BKQH = _by_heads(do_BNTH, num_value_heads)
        dp_BKQS = einsum('BKQH,BKSH->BKQS', do_BKQH, v_BKSH)
        dp_BNTS = dp_BKQS.reshape(p_BNTS.shape)
        p_after_dropout_BNTS = p_BNTS
        if options.dropout:
            dropout_BNTS = _dropout_factors(options, key, pair_index, p_BNTS.shape)
            dp_BNTS = dp_BNTS * dropout_BNTS
            p_after_dropout_BNTS = p_BNTS * dropout_BNTS
        p_after_dropout_BNTS = p_after_dropout_BNTS.astype(do_BNTH.dtype)
        p_after_dropout_BKQS = _by_heads(p_after_dropout_BNTS, num_value_heads)
        dv_BKSH = einsum('BKQS,BKQH->BKSH', p_after_dropout_BKQS, do_BKQH)

        # Gradients of logits and biases.
        ds_BNTS = p_BNTS * (dp_BNTS - mean_dp_BNT1)
        if b_NR is not None:
            db_NR = _add_bias_gradients(db_NR, ds_BNTS.sum(0), options.grid, i, j)

        # Gradients of q k^T (before scale and cap), queries and keys.
        dqk_BNTS = (ds_BNTS * cap_slope_BNTS * options.scale).astype(q_BNTH.dtype)
        dqk_BKQS = _by_heads(dqk_BNTS, num_key_heads)
        dq_BKQH = einsum('BKQS,BKSH->BKQH', dqk_BKQS, k_BKSH)
        dq_BNTH = dq_BKQH.reshape(q_BNTH.shape)
        q_BKQH = _by_heads(q_BNTH, num_key_heads)
        dk_BKSH = einsum('BKQS,BKQH->BKSH', dqk_BKQS, q_BKQH)
        return (
            _add_to_block(dq_IBNTH, dq_BNTH, i),
            _add_to_block(dk_JBKSH, dk_BKSH, j),
            _add_to_block(dv_JBKSH, dv_BKSH, j),
            db_NR,
        )

    inputs = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR)
    start = jax.tree.map(lambda array: jnp.zeros(array.shape, dtype), inputs)
    sums = _scan_pairs(options, step, start)
    gradients = jax.tree.map(lambda total, array: total.astype(array.dtype), sums, inputs)
    return (*gradients, None, None)


def _add_bias_gradients(
    db_NR: jax.Array, ds_NTS: jax.Array, grid: _Grid, i: jax.Array, j: jax.Array
) -> jax.Array:
    """Returns db_NR plus what query block i and key block j contribute to it.

    db_NR is the gradient of the biases, one for each distance t - s of a query and a key. For 2
    queries and 3 keys, the biases a, b, c, d are added to the logits as [[c b a], [d c b]]. So the
    gradient of c is ds[0, 0] + ds[1, 1], a sum of the gradients ds_NTS of logits.
    """
    N, T, S = ds_NTS.shape
    first, count = _distances(grid, i, j)  # which of the R distances occur in these blocks

    # `_toeplitz` is linear: it copies biases to logits. Its transpose sums over the copies. JAX
    # derives the transpose from the shape and dtype of the biases.
    def copy_to_logits(b_of_blocks_NR: jax.Array) -> jax.Array:
        return _toeplitz(b_of_blocks_NR, T, S)

    shape_of_biases = jax.ShapeDtypeStruct((N, count), db_NR.dtype)
    sum_over_logits = jax.linear_transpose(copy_to_logits, shape_of_biases)
    (added_NR,) = sum_over_logits(ds_NTS)

    db_of_blocks_NR = lax.dynamic_slice_in_dim(db_NR, first, count, 1)
    return lax.dynamic_update_slice_in_dim(db_NR, db_of_blocks_NR + added_NR, first, 1)


_attention.defvjp(_forward, _backward)

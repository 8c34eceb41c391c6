"""Attention in blocks of queries and keys, with memory linear in the context length.

The forward pass is the online softmax (Rabe & Staats 2021, arXiv 2112.05682). The backward pass
recomputes probabilities from the log-sum-exp of each query (Dao et al. 2022 and 2023, arXiv
2205.14135 and 2307.08691). Blocks that the mask hides are skipped.
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

# The maximum number of queries, and of keys, in a block, by platform.
BLOCK = {'cpu': 128}  # measured: the logits fit into the CPU caches
BLOCK_ELSEWHERE = 512  # not measured

# Subtracted from the logit of a token with itself if the mask hides it. Masked keys are far lower,
# so a query that sees only itself still attends to itself.
HIDDEN = 1e30


class _Grid(NamedTuple):
    """Blocks of equal size into which queries and keys are cut, with padding at the end.

    Axis I is query blocks, and axis J is key blocks. In arrays of one block, axes T and S are the
    queries and keys of that block.
    """

    num_q_blocks: int  # I
    q_size: int  # queries in a block
    num_k_blocks: int  # J
    k_size: int  # keys in a block

    @classmethod
    def of_lengths(cls, num_queries: int, num_keys: int, block: int) -> '_Grid':
        """Returns the fewest blocks of at most `block` queries and `block` keys.

        Sizes are chosen for little padding. With block=128, 300 queries are 3 blocks of 100.
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
        """The total numbers of queries and keys, padding included."""
        return self.num_q_blocks * self.q_size, self.num_k_blocks * self.k_size


class _Options(NamedTuple):
    """Static arguments, which are constants of the compiled program."""

    scale: float
    logit_cap: float | None
    off_by_one: bool  # adds a key of logit 0 and value 0 to every query
    dropout: float
    grid: _Grid
    pairs: tuple[tuple[int, int], ...]  # (i, j) of the query and key blocks to compute


def blockwise(call: Call, target: Target, block: int | None = None) -> jax.Array:
    """Computes o_BTNH of `attend` block by block.

    The normalizer must be softmax or softmax_off_by_one. A query without visible keys gets 0.
    Dropout draws other random numbers than `einsum`.

    Args:
        call: The arguments of `attend`.
        target: The devices.
        block: The maximum number of queries, and of keys, in a block; None for the default.
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
        # One bias for each distance t - s, in ascending order.
        distances_R = mask.start + jnp.arange(1 - padded_S, padded_T)
        b_N1R = call.bias(distances_R[None])
        b_NR = b_N1R[:, 0]

    o_IBNTH = _attention(
        options,
        _cut_into_blocks(q_BTNH, grid.num_q_blocks, grid.q_size),
        _cut_into_blocks(call.k_BSKH, grid.num_k_blocks, grid.k_size),
        _cut_into_blocks(call.v_BSKH, grid.num_k_blocks, grid.k_size),
        b_NR,
        mask.padded(S, more_queries=padded_T - T, more_keys=padded_S - S),
        call.dropout_key if call.dropout else None,
    )
    # Join the query blocks, and cut off the padding.
    o_BITNH = jnp.transpose(o_IBNTH, (1, 0, 3, 2, 4))
    o_BTNH = o_BITNH.reshape(B, padded_T, N, -1)
    return o_BTNH[:, :T]


def _cut_into_blocks(x_BTNH: jax.Array, num_blocks: int, size: int) -> jax.Array:
    """Pads x_BTNH with zeros and cuts it into blocks of `size` positions, x_IBNTH."""
    B, T, N, H = x_BTNH.shape
    padded_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, num_blocks * size - T), (0, 0), (0, 0)))
    x_BITNH = padded_BTNH.reshape(B, num_blocks, size, N, H)
    return jnp.transpose(x_BITNH, (1, 0, 3, 2, 4))


def _visible_pairs(mask: Mask, grid: _Grid) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (i, j) of query and key blocks to compute.

    Leaves out pairs that the causal mask or the window hides entirely. In decoding, all pairs are
    returned, because the position of the first query is not known at compile time.
    """
    visible_IJ = np.ones((grid.num_q_blocks, grid.num_k_blocks), bool)
    if isinstance(mask.start, int):  # the position of the first query, an array in decoding
        first_query_I1 = mask.start + np.arange(grid.num_q_blocks)[:, None] * grid.q_size
        last_query_I1 = first_query_I1 + grid.q_size - 1
        first_key_J = np.arange(grid.num_k_blocks) * grid.k_size
        last_key_J = first_key_J + grid.k_size - 1
        # The range of distances t - s in each pair of blocks.
        min_distance_IJ = first_query_I1 - last_key_J
        max_distance_IJ = last_query_I1 - first_key_J
        if mask.causal:
            visible_IJ &= max_distance_IJ >= 0
        if mask.window is not None:
            visible_IJ &= min_distance_IJ < mask.window
            visible_IJ &= max_distance_IJ > -mask.window
    return tuple((int(i), int(j)) for i, j in np.argwhere(visible_IJ))


def _scan_pairs(options: _Options, step: Callable, carry: tuple) -> tuple:
    """Runs `carry = step(carry, i, j, pair_index)` for all pairs of blocks; returns the last carry.

    Args:
        options: The P pairs (i, j) of query and key blocks are `options.pairs`.
        step: The function to call.
        carry: The first carry.
    """
    pairs_P2 = np.array(options.pairs, np.int32).reshape(-1, 2)  # [0, 2] without pairs
    i_P = pairs_P2[:, 0]
    j_P = pairs_P2[:, 1]
    pair_index_P = np.arange(len(pairs_P2), dtype=np.int32)

    def body(carry: tuple, pair: tuple) -> tuple[tuple, None]:
        i, j, pair_index = pair
        return step(carry, i, j, pair_index), None  # no output of each step

    carry, _ = lax.scan(body, carry, (i_P, j_P, pair_index_P))
    return carry


def _block(array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the block `index` of an array of blocks."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _with_block(array: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
    """Returns a copy of an array of blocks with block `index` replaced by `block`."""
    return lax.dynamic_update_index_in_dim(array, block.astype(array.dtype), index, 0)


def _add_to_block(array: jax.Array, addend: jax.Array, index: jax.Array) -> jax.Array:
    """Returns a copy of an array of blocks with `addend` added to block `index`."""
    return _with_block(array, _block(array, index) + addend, index)


def _by_heads(x_BNTS: jax.Array, num_heads: int) -> jax.Array:
    """Reshapes [B, N, T, S] to [B, K, Q, S], where K = `num_heads` key or value heads.

    Axis Q is the T queries of all N / K query heads that share a head.
    """
    return x_BNTS.reshape(len(x_BNTS), num_heads, -1, x_BNTS.shape[-1])


def _logits(
    options: _Options,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    b_NR: jax.Array | None,
    mask: Mask,
    i: jax.Array,
    j: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Computes the logits of query block i and key block j.

    Args:
        options: The scale, the logit cap and the grid.
        q_BNTH: Query block i.
        k_BKSH: Key block j.
        b_NR: The biases by distance t - s, of all blocks.
        mask: The mask of all blocks.
        i: The index of the query block.
        j: The index of the key block.

    Returns:
        s_BNTS: The logits, very low where masked.
        mask_B1TS: False where masked.
        cap_slope_BNTS: The derivative of the logit cap.
    """
    grid = options.grid
    B, N, T, _ = q_BNTH.shape
    _, K, S, _ = k_BKSH.shape
    dtype = jnp.promote_types(q_BNTH.dtype, jnp.float32)
    s_BKQS = jnp.einsum(
        'BKQH,BKSH->BKQS', _by_heads(q_BNTH, K), k_BKSH, preferred_element_type=dtype
    )
    s_BNTS = s_BKQS.reshape(B, N, T, S) * options.scale

    cap_slope_BNTS: jax.Array | float = 1.0
    if options.logit_cap is not None:
        tanh_BNTS = jnp.tanh(s_BNTS / options.logit_cap)
        s_BNTS = options.logit_cap * tanh_BNTS
        cap_slope_BNTS = 1 - jnp.square(tanh_BNTS)

    if b_NR is not None:
        first_distance, num_distances = _distances(grid, i, j)
        b_of_blocks_NR = lax.dynamic_slice_in_dim(b_NR, first_distance, num_distances, axis=1)
        s_BNTS = s_BNTS + _toeplitz(b_of_blocks_NR, T, S)

    first_query = i * grid.q_size
    first_key = j * grid.k_size
    if mask.hides_self:
        q_position_T1 = first_query + mask.queries(T)[:, None]
        k_position_S = first_key + jnp.arange(S)
        is_self_TS = q_position_T1 == k_position_S
        s_BNTS = jnp.where(is_self_TS, s_BNTS - HIDDEN, s_BNTS)

    mask_B1TS = mask.block(first_query, T, first_key, S)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(dtype).min / 2)
    return s_BNTS, mask_B1TS, cap_slope_BNTS


def _distances(grid: _Grid, i: jax.Array, j: jax.Array) -> tuple[jax.Array, int]:
    """Returns the index of the first distance in blocks i and j, and the number of distances."""
    # t - s is at least i * q_size - (j + 1) * k_size + 1 here, and at least 1 - J * k_size overall.
    first = i * grid.q_size + (grid.num_k_blocks - 1 - j) * grid.k_size
    return first, grid.q_size + grid.k_size - 1


def _toeplitz(b_NR: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """Returns biases b_NTS of T queries and S keys from biases b_NR by distance t - s.

    The R = T + S - 1 distances are in ascending order. For 2 queries and 3 keys, the biases
    [a b c d] give [[c b a], [d c b]].
    """
    N = len(b_NR)
    T = num_queries
    S = num_keys
    # Reshapes are faster than a gather. In the example, with _ for the padding:
    #   repeat          [a b c d _ a b c d _ a b]
    #   cut into rows   [a b c d _ a], [b c d _ a b]
    #   take 3 of each  [a b c],       [b c d]
    #   reverse         [c b a],       [d c b]
    padded_NX = jnp.pad(b_NR, ((0, 0), (0, 1)))
    row_length = T + S + 1
    repeated_NX = jnp.tile(padded_NX, (1, T + 1))[:, : T * row_length]
    rows_NTX = repeated_NX.reshape(N, T, row_length)
    return rows_NTX[:, :, S - 1 :: -1]


def _dropout_factors(
    options: _Options, dropout_key: jax.Array, pair_index: jax.Array, shape: tuple
) -> jax.Array:
    """Returns the dropout factors of a pair of blocks, each 0 or 1 / (1 - rate)."""
    pair_key = jax.random.fold_in(dropout_key, pair_index)
    keep = jax.random.bernoulli(pair_key, 1 - options.dropout, shape)
    return keep / (1 - options.dropout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, *operands: Any) -> jax.Array:
    """Returns o_IBNTH; the operands are those of `_forward`."""
    o_IBNTH, _ = _forward(options, *operands)
    return o_IBNTH


def _forward(
    options: _Options,
    q_IBNTH: jax.Array,
    k_JBKSH: jax.Array,
    v_JBKSH: jax.Array,
    b_NR: jax.Array | None,
    mask: Mask,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    """Returns o_IBNTH, and the arrays for the backward pass.

    Each query has a running maximum of logits (max), a running sum of exp(s - max) (sum), and a
    running sum of exp(s - max) v (o). At the end, the output is o / sum.
    """
    dtype = jnp.promote_types(q_IBNTH.dtype, jnp.float32)
    num_blocks, B, N, T, _ = q_IBNTH.shape
    K, _, H = v_JBKSH.shape[2:]

    def step(carry: tuple, i: jax.Array, j: jax.Array, pair_index: jax.Array) -> tuple:
        """Updates o, max and sum of query block i with key block j."""
        o_IBNTH, max_IBNT, sum_IBNT = carry
        q_BNTH = _block(q_IBNTH, i)
        k_BKSH = _block(k_JBKSH, j)
        v_BKSH = _block(v_JBKSH, j)
        s_BNTS, mask_B1TS, _ = _logits(options, q_BNTH, k_BKSH, b_NR, mask, i, j)

        old_max_BNT = _block(max_IBNT, i)
        max_BNT = jnp.maximum(old_max_BNT, s_BNTS.max(-1))
        # Changes the running sums from the old maximum to the new one.
        rescale_BNT = jnp.exp(old_max_BNT - max_BNT)
        p_BNTS = jnp.where(mask_B1TS, jnp.exp(s_BNTS - max_BNT[..., None]), 0)
        sum_BNT = _block(sum_IBNT, i) * rescale_BNT + p_BNTS.sum(-1)

        # Dropout acts on the weights of the values, but not on their sum.
        if options.dropout:
            p_BNTS = p_BNTS * _dropout_factors(options, dropout_key, pair_index, p_BNTS.shape)
        p_BKQS = _by_heads(p_BNTS.astype(v_BKSH.dtype), K)
        pv_BKQH = jnp.einsum('BKQS,BKSH->BKQH', p_BKQS, v_BKSH, preferred_element_type=dtype)
        pv_BNTH = pv_BKQH.reshape(B, N, T, H)
        o_BNTH = _block(o_IBNTH, i) * rescale_BNT[..., None] + pv_BNTH
        return (
            _with_block(o_IBNTH, o_BNTH, i),
            _with_block(max_IBNT, max_BNT, i),
            _with_block(sum_IBNT, sum_BNT, i),
        )

    if options.off_by_one:
        # Start with a key of logit 0 and value 0.
        first_max = 0.0
        first_sum = 1.0
    else:
        first_max = float(jnp.finfo(dtype).min / 2)
        first_sum = 0.0
    start = (
        jnp.zeros((num_blocks, B, N, T, H), dtype),
        jnp.full((num_blocks, B, N, T), first_max, dtype),
        jnp.full((num_blocks, B, N, T), first_sum, dtype),
    )
    o_IBNTH, max_IBNT, sum_IBNT = _scan_pairs(options, step, start)

    # A query without visible keys has sum 0. Avoid 0 / 0, so that its output is 0.
    sum_IBNT = jnp.where(sum_IBNT == 0, 1, sum_IBNT)
    o_IBNTH = (o_IBNTH / sum_IBNT[..., None]).astype(v_JBKSH.dtype)
    log_sum_exp_IBNT = max_IBNT + jnp.log(sum_IBNT)
    saved = (q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, dropout_key, o_IBNTH, log_sum_exp_IBNT)
    return o_IBNTH, saved


def _backward(options: _Options, saved: tuple, do_IBNTH: jax.Array) -> tuple:
    """Returns the gradients of all operands, with None for the mask and the dropout key."""
    q_IBNTH, k_JBKSH, v_JBKSH, b_NR, mask, dropout_key, o_IBNTH, log_sum_exp_IBNT = saved
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
            dropout_BNTS = _dropout_factors(options, dropout_key, pair_index, p_BNTS.shape)
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
    """Adds the bias gradients from query block i and key block j to db_NR.

    Args:
        db_NR: The gradients of the biases so far, by distance t - s of all blocks.
        ds_NTS: The gradients of the logits of this pair of blocks.
        grid: The grid of blocks.
        i: The index of the query block.
        j: The index of the key block.
    """
    N, T, S = ds_NTS.shape
    first_distance, num_distances = _distances(grid, i, j)

    # The forward pass copies a bias to several logits. The transpose of this linear function sums
    # the gradients of these logits.
    def copy_to_logits(b_of_blocks_NR: jax.Array) -> jax.Array:
        return _toeplitz(b_of_blocks_NR, T, S)

    abstract_biases = jax.ShapeDtypeStruct((N, num_distances), db_NR.dtype)
    sum_over_logits = jax.linear_transpose(copy_to_logits, abstract_biases)
    (added_NR,) = sum_over_logits(ds_NTS)

    old_NR = lax.dynamic_slice_in_dim(db_NR, first_distance, num_distances, axis=1)
    return lax.dynamic_update_slice_in_dim(db_NR, old_NR + added_NR, first_distance, axis=1)


_attention.defvjp(_forward, _backward)

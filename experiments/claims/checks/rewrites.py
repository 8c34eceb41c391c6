"""Exact rewrites: one W_QK (A1), square matrices (A4, D3), Q = X (B1, B3), A, B (C7), double (D1).

W_Q and W_K choose where to attend, W_V and W_O what is moved. Any invertible M leaves W_Q M,
W_K M^-T and W_V M, M^-1 W_O the same function: H^2 redundant numbers in each circuit. Weight decay
tells factors from a single matrix (E5).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.claims.checks.small_layers import (
    SAME,
    D,
    N,
    Options,
    T,
    count_parameters,
    equality_row,
    fit_error,
    minimize,
    num_free_directions,
    output,
    random_layer,
    random_stream,
    rank,
    same_output_row,
    softmax_input,
    with_matrices,
)
from experiments.claims.claim import Row, exact_row
from qkattn.attention import Attention, Score, oracle
from qkattn.attention.parameters import slices_DNH
from qkattn.attention.rope import rotate
from qkattn.config import ModelConfig
from qkattn.convert import published
from qkattn.convert.circuits import merge
from qkattn.convert.factors import balanced_factors, relative_error
from qkattn.convert.whole_layer import fold_double

# Factors of contexts.
BETWEEN = 'between W_Q and W_K'
LAYER = 'layer'
WIDTH = 'width of the shared projection'
# Contexts of rows.
NOTHING_BETWEEN: Options = {BETWEEN: 'nothing'}
SINGLE_HEAD: Options = {LAYER: 'single head'}
WIDE_PROJECTION: Options = {WIDTH: 'R >= D'}
ADAM_CONTEXT: Options = {'optimizer': 'Adam, entry by entry'}
MUON_CONTEXT: Options = {'optimizer': 'Muon, matrix by matrix'}
L2_CONTEXT: Options = {'decay': 'in the loss'}
ADAMW_CONTEXT: Options = {'decay': 'AdamW without gradient noise'}
# The option of a layer that rotates queries and keys.
ROPE: Options = {'positions': 'rope'}
# The singular values of the matrix that descent with weight decay approaches.
SPECTRUM = np.array([1.0, 0.8, 0.6, 0.4, 0.2])
# A quantity of rows.
SHARE_LEFT = 'share of the attention parameters that is left'
# Tensors of a published GPT-2: W_Q, W_K and W_V side by side, and W_O.
C_ATTN = 'h.0.attn.c_attn.weight'
C_PROJ = 'h.0.attn.c_proj.weight'
# The four matrices, by the first letters of the names of parameters.
MATRICES = ('w_q', 'w_k', 'w_v', 'w_o')
# The matrices of all heads by MATRICES, each D x D.
Square = dict[str, np.ndarray]


def one_matrix() -> Iterator[Row]:
    """Checks that one matrix W_Q[n] W_K[n]^T of rank H replaces W_Q[n] and W_K[n]."""
    attention = random_layer()
    merged = merge(attention)
    x_BTD = random_stream()
    inputs = [softmax_input(merged, x_BTD), softmax_input(attention, x_BTD)]
    yield equality_row('change of the softmax input', *inputs, **NOTHING_BETWEEN)
    yield same_output_row(change='', changed=merged, original=attention, **NOTHING_BETWEEN)
    for H in (8, 32):
        A_NDE = random_layer(num_heads=1, head_size=H).score.matrix()
        yield exact_row('rank of W_Q W_K^T', rank(A_NDE), H, **NOTHING_BETWEEN, head_size=H)


def what_stands_between() -> Iterator[Row]:
    """Checks whether a single W_QK can replace W_Q and W_K if queries and keys are transformed.

    The error is the minimum over A of |x A x^T - s| / |s|, by least squares over all pairs of 24
    tokens, with a single head. s is the input of the softmax.
    """
    x_BTD = random_stream(24, d_model=8)
    pairs = np.einsum('BTD,BSE->BTSDE', x_BTD, x_BTD)
    layers: dict[str, Options] = {'nothing': {}, 'RoPE': ROPE, 'QK-norm': {'qk_norm': True}}
    for name, options in layers.items():
        s_BNTS = softmax_input(random_layer(d_model=8, num_heads=1, **options), x_BTD)
        quantity = 'error of the best W_QK, relative to the softmax input'
        context: Options = {BETWEEN: name}
        yield exact_row(quantity, fit_error(pairs, s_BNTS), expected=0, tolerance=SAME, **context)


def square_attention(x_BTD: np.ndarray, square: Square, num_heads: int) -> np.ndarray:
    """Computes causal attention with D x D matrices, as other implementations do.

    Head n uses the columns n H to (n + 1) H of W_Q, W_K and W_V, and the same rows of W_O.
    """

    def projected(name: str) -> np.ndarray:
        """Multiplies x by a matrix, and splits the columns into heads."""
        heads = np.split(x_BTD @ square[name], num_heads, axis=2)
        return np.stack(heads, axis=1)

    q_BNTH = projected('w_q')
    k_BNSH = projected('w_k')
    v_BNSH = projected('w_v')
    T = x_BTD.shape[1]
    H = k_BNSH.shape[3]
    s_BNTS = q_BNTH @ k_BNSH.swapaxes(2, 3) / np.sqrt(H)
    causal_TS = np.tri(T, dtype=bool)
    p_BNTS = oracle.probabilities(s_BNTS, causal_TS)
    o_BNTH = p_BNTS @ v_BNSH
    heads = [o_BNTH[:, head] for head in range(num_heads)]
    o_BTD = np.concatenate(heads, axis=2)
    return o_BTD @ square['w_o']


def gpt2() -> dict[str, np.ndarray]:
    """Returns random tensors of a GPT-2 with one layer, by their published names."""
    config = ModelConfig(d_model=D, num_layers=1, num_heads=N, context=T, vocab_size=16)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in published.shapes(config).items():
        normal = rng.normal(size=shape).astype(np.float32)
        num_inputs = shape[0]
        tensors[name] = normal / num_inputs**0.5
    return tensors


def side_by_side() -> Iterator[Row]:
    """Checks that GPT-2's D x D matrices are the same as N matrices of D x H side by side.

    Both compute the same output, and have the same number of parameters.
    """
    # Attention with the four D x D matrices of GPT-2.
    tensors = gpt2()
    x_BTD = np.asarray(random_stream())
    w_q_DD, w_k_DD, w_v_DD = np.split(tensors[C_ATTN], 3, axis=1)
    w_o_DD = tensors[C_PROJ]
    square = dict(zip(MATRICES, [w_q_DD, w_k_DD, w_v_DD, w_o_DD], strict=True))
    square_output_BTD = square_attention(x_BTD, square, N)

    # The same by A[n] and B[n] of N heads, whose matrices are slices of these.
    attention = with_matrices(random_layer(), square)
    A_NDE, B_NDE = [np.asarray(matrix) for matrix in attention.matrix()]
    mask_BTS = np.tri(T, dtype=bool)[None]
    scale = attention.score.scale
    output_of_heads_BTD = oracle.attention(A_NDE, B_NDE, x_BTD, x_BTD, mask_BTS, scale=scale)
    quantity = 'change of the output, D x D against N of D x H, by A[n] and B[n]'
    yield equality_row(quantity, output_of_heads_BTD, square_output_BTD)
    num_rectangular = count_parameters('qk/vo')
    yield exact_row('parameters of the rectangular matrices', num_rectangular, 4 * D * D)


def without_w_q(attention: Attention) -> Attention:
    """Returns a layer that computes the same function without W_Q.

    Its queries are X and its keys X W_K'[n] with W_K'[n] = W_K[n] W_Q[n]^T, a D x D matrix. It
    shares the Value of `attention`.
    """
    rewritten = random_layer('query_free_full/vo', num_heads=attention.spec.num_heads)
    score = attention.score
    w_k_DNE = np.einsum('DNH,ENH->DNE', score.w_k_DKH[...], score.w_q_DNH[...])
    # Each layer multiplies its scores by its own scale.
    rewritten.score.w_k_DNE[...] = score.scale / rewritten.score.scale * w_k_DNE
    rewritten.value = attention.value
    return rewritten


def share_left(variant: str, num_heads: int) -> float:
    """Returns the attention parameters of a variant, as a fraction of those of qk/vo."""
    parameters = count_parameters(variant, num_heads=num_heads)
    return parameters / count_parameters('qk/vo', num_heads=num_heads)


def queries_of_one_head() -> Iterator[Row]:
    """Checks that a single head can do without W_Q, unless it has biases or rotary positions.

    Without biases and rotation, W_K' = W_K W_Q^T is exact.
    """
    attention = random_layer(num_heads=1)
    without = without_w_q(attention)
    x_BTD = random_stream()
    inputs = [softmax_input(without, x_BTD), softmax_input(attention, x_BTD)]
    yield equality_row('change of the softmax input, W_Q removed', *inputs, **SINGLE_HEAD)
    yield same_output_row(', W_Q removed', without, attention, **SINGLE_HEAD)
    share = share_left('query_free/vo', num_heads=1)
    yield exact_row(SHARE_LEFT, share, expected=3 / 4, **SINGLE_HEAD)

    # With biases, the score of tokens t and s is x_t W_K'^T y_s. With rotation, it is
    # x_t R(t - s) W_K'^T y_s: the query x_t R(t - s) depends on s, too.
    T = 24
    x_BTD = random_stream(T, d_model=8)
    plain_BTSD = jnp.stack([x_BTD] * T, axis=2)
    positions_T = jnp.arange(T)
    rotated = [rotate(x_BTD[:, :, None], positions_T - s)[:, :, 0] for s in range(T)]
    rotated_BTSD = jnp.stack(rotated, axis=2)
    yield _row_of_best_keys('biases', {'biases': True}, plain_BTSD, x_BTD)
    yield _row_of_best_keys('RoPE', ROPE, rotated_BTSD, x_BTD)


def _row_of_best_keys(
    name: str, options: Options, queries_BTSD: jax.Array, x_BSD: jax.Array
) -> Row:
    """Checks whether keys X W_K' can give the scores of a single head with W_Q and `options`.

    The error is that of the best W_K', fitted by least squares to the softmax input. Both sides are
    centred over keys, because the softmax ignores a constant that is added to all scores of a
    query.

    Args:
        name: What the options add to the head, for the row.
        options: The options of the head with W_Q, such as `biases`.
        queries_BTSD: The query of token t for the key of token s, without W_Q.
        x_BSD: The stream.
    """
    s_BTS = softmax_input(random_layer(d_model=8, num_heads=1, **options), x_BSD)[:, 0]
    pairs_BTSDE = jnp.einsum('BTSD,BSE->BTSDE', queries_BTSD, x_BSD)
    centred_pairs_BTSDE = pairs_BTSDE - pairs_BTSDE.mean(2, keepdims=True)
    centred_s_BTS = s_BTS - s_BTS.mean(2, keepdims=True)
    error = fit_error(centred_pairs_BTSDE, centred_s_BTS)
    quantity = "error of the best W_K', relative to the softmax input"
    return exact_row(quantity, error, expected=0, tolerance=SAME, layer=f'single head, {name}')


def queries_of_many_heads() -> Iterator[Row]:
    """Checks what N heads need without W_Q.

    There are two ways. If the queries of every head are all of X, the function stays the same, but
    each head needs a D x D matrix W_K'[n], which is more than W_Q[n] and W_K[n] have. If the
    queries of head n are only a slice X P[n] of H columns, the parameters are saved, but A[n] has
    the form P[n] W_K'[n]^T. The best one is P[n] P[n]^T A[n], which misses most of A[n].
    """
    attention = random_layer()
    all_of_X: Options = {LAYER: 'many heads, all read X'}
    yield same_output_row(', W_Q removed', without_w_q(attention), attention, **all_of_X)
    share = share_left('query_free_full/vo', num_heads=N)
    yield exact_row(f'{SHARE_LEFT}, N = {N}', share, expected=3 / 4, **all_of_X)

    slice_of_X: Options = {LAYER: 'many heads, head n reads slice n of X'}
    A_NDE = np.asarray(attention.score.matrix())
    P_DNH = np.asarray(slices_DNH(attention.spec))
    best_A_NDE = np.einsum('DNH,ENH,NEF->NDF', P_DNH, P_DNH, A_NDE)
    error = relative_error(best_A_NDE, A_NDE)
    quantity = "error of A[n] with the best W_K'"
    yield exact_row(quantity, error, expected=0, tolerance=SAME, **slice_of_X)
    share = share_left('query_free/vo', num_heads=N)
    yield exact_row(SHARE_LEFT, share, expected=3 / 4, **slice_of_X)


def small_layer(variant: str = 'qk/vo', **options: Any) -> Attention:
    """Returns a layer with 2 x 2 matrices."""
    return random_layer(variant, **{'d_model': 2, 'num_heads': 1} | options)


def worked_by_hand() -> Iterator[Row]:
    """Checks A and B of a layer with integer matrices against a calculation by hand."""
    matrices = {
        'w_q': np.array([[1, 2], [0, 1]]),
        'w_k': np.array([[1, 0], [1, 1]]),
        'w_v': np.array([[2, 0], [1, 1]]),
        'w_o': np.array([[1, 1], [0, 2]]),
    }
    A_by_hand = [[1, 3], [0, 1]]  # W_Q W_K^T
    B_by_hand = [[2, 2], [1, 3]]  # W_V W_O
    A_1DE, B_1DE = with_matrices(small_layer(), matrices).matrix()
    num_in_A = (np.asarray(A_1DE[0]) != A_by_hand).sum()
    num_in_B = (np.asarray(B_1DE[0]) != B_by_hand).sum()
    yield exact_row('entries of A, W_Q W_K^T that differ', num_in_A, expected=0)
    yield exact_row('entries of B, W_V W_O that differ', num_in_B, expected=0)


def where_and_what() -> Iterator[Row]:
    """Checks that W_V and W_O have no part in the pattern, and that W_Q = W_K ties its scores.

    The pattern is solved from the output of T = D tokens.
    """
    for size in (2, 4):
        context: Options = {'tokens and dimensions': size}
        attention = small_layer(d_model=size)
        x_TD = random_stream(size, d_model=size)[0]
        # The same W_Q and W_K, with another W_V and W_O.
        other_value = small_layer(d_model=size, seed=1)
        other_value.score = attention.score
        patterns = [pattern(other_value, x_TD), pattern(attention, x_TD)]
        quantity = 'change of the pattern by another W_V and W_O'
        yield equality_row(quantity, *patterns, tolerance=1e-10, **context)

        # With W_Q = W_K, s[t, s] = s[s, t].
        shared_qk = small_layer('shared_qk/vo', d_model=size)
        s_TS = softmax_input(shared_qk, x_TD[None])[0, 0]
        is_equal_TS = np.isclose(s_TS, s_TS.T, rtol=1e-12)
        above_diagonal = np.triu_indices(size, k=1)
        num_tied = is_equal_TS[above_diagonal].sum()
        num_pairs = size * (size - 1) / 2
        yield exact_row('tied pairs of scores, W_Q W_Q^T', num_tied, num_pairs, **context)


def pattern(attention: Attention, x_TD: jax.Array) -> np.ndarray:
    """Solves out = P (x B) for the pattern P_TS of a layer with one head and T = D tokens.

    All positions are visible.
    """
    T = len(x_TD)
    out_TD = output(attention, x_TD[None], jnp.ones((1, T, T), bool))[0]
    _, B_1DE = attention.matrix()
    moved_SD = x_TD @ B_1DE[0]
    # out = P moved, so moved^T P^T = out^T.
    return np.linalg.solve(moved_SD.T, out_TD.T).T


def gauge() -> Iterator[Row]:
    """Checks that W_Q M and W_K M^-T, or W_V M and M^-1 W_O, give the same function."""
    attention = small_layer()
    matrices = {}
    for circuit in (attention.score, attention.value):
        for name, parameter in vars(circuit).items():
            stem = name[:3]  # 'w_q' of 'w_q_DNH'
            if stem in MATRICES:
                matrices[stem] = np.asarray(parameter[...]).reshape(2, 2)
    M_HH = np.array([[2.0, 1.0], [-1.0, 1.0]])
    inverse_HH = np.linalg.inv(M_HH)
    of_score = {'w_q': matrices['w_q'] @ M_HH, 'w_k': matrices['w_k'] @ inverse_HH.T}
    of_value = {'w_v': matrices['w_v'] @ M_HH, 'w_o': inverse_HH @ matrices['w_o']}
    changed = with_matrices(small_layer(), of_score)
    yield same_output_row(', W_Q M and W_K M^-T', changed, attention)
    changed = with_matrices(small_layer(), of_value)
    yield same_output_row(', W_V M and M^-1 W_O', changed, attention)


def two_in_a_row() -> Iterator[Row]:
    """Compares a shared projection O_Q followed by W_Q[n] with one matrix O_Q W_Q[n] per head.

    There are three checks: that the two matrices can be multiplied without a change of the output,
    that any single matrix is such a product (with O_Q = I), and how many free parameters the
    products O_Q W_Q[n] of all heads have, if O_Q has R columns.
    """
    double = random_layer('double/double')
    yield same_output_row(' by folding', fold_double(double), double, **WIDE_PROJECTION)

    # The other way: a layer with O_Q = O_K = I.
    attention = random_layer()
    unfolded = random_layer('double/vo')
    unfolded.value = attention.value
    unfolded.score.w_q_outer_DR[...] = np.eye(D)
    unfolded.score.w_q_RNH[...] = attention.score.w_q_DNH[...]
    unfolded.score.w_k_outer_DR[...] = np.eye(D)
    unfolded.score.w_k_RKH[...] = attention.score.w_k_DKH[...]
    yield same_output_row(', shared W_Q = I', unfolded, attention, **WIDE_PROJECTION)

    def products(score: Score) -> jax.Array:
        """Returns O_Q W_Q[n] of all heads: the queries of the unit vectors."""
        return score.queries(jnp.eye(8)[None])

    # With R = D = 8, the products are free in all of their 8 x 8 entries. With R = 5 they are not.
    for R, context in ((8, WIDE_PROJECTION), (5, {WIDTH: 'R < D'})):
        score = random_layer(f"double(size={R},which='q')/vo", d_model=8, num_heads=2).score
        num_free = num_free_directions(products, score)
        yield exact_row(f'free parameters of W_Q, D = 8, R = {R}', num_free, 8 * 8, **context)


def one_matrix_per_head() -> Iterator[Row]:
    """Checks that two published implementations have no projection that heads share.

    In GPT-2, each entry of c_attn belongs to exactly one head. The attention layer of flax.nnx
    computes the same as separate heads with the columns of its matrices.
    """
    yield _entries_of_gpt2()
    yield _heads_of_flax()


def _entries_of_gpt2() -> Row:
    """Counts the entries of GPT-2's c_attn, [W_Q W_K W_V], that are not in exactly one head."""
    # Load c_attn with the entries 0, 1, 2, ..., so that each entry says where it comes from.
    numbers = np.arange(3 * D * D, dtype=np.float32)
    tensors = gpt2() | {C_ATTN: numbers.reshape(D, -1)}
    _, params = published.load_gpt2(tensors, num_heads=N)
    heads = params['blocks']['attention']
    projections = [heads['score']['w_q_DNH'], heads['score']['w_k_DKH'], heads['value']['w_v_DKH']]
    entries = np.concatenate([np.ravel(w) for w in projections])
    num_unequal = int((np.sort(entries) != numbers).sum())
    quantity = 'entries of c_attn that are not in exactly one head, GPT-2'
    return exact_row(quantity, num_unequal, expected=0, **ADAM_CONTEXT)


def _heads_of_flax() -> Row:
    """Compares the attention layer of flax.nnx with N separate heads that have its matrices."""
    flax = nnx.MultiHeadAttention(N, D, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    projections_of_flax = (flax.query, flax.key, flax.value, flax.out)
    square = {}  # the matrices as D x D, in float64
    for name, projection in zip(MATRICES, projections_of_flax, strict=True):
        square[name] = np.asarray(projection.kernel[...], np.float64).reshape(D, D)
    flax = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.ndim > 1 else leaf, flax)
    x_BTD = random_stream()
    expected_BTD = output(with_matrices(random_layer(), square), x_BTD)
    actual_BTD = flax(x_BTD, mask=np.tri(T, dtype=bool))
    quantity = 'change of the output, heads of flax.nnx'
    return equality_row(quantity, actual_BTD, expected_BTD, tolerance=1e-6, **ADAM_CONTEXT)


def steps_of_training() -> Iterator[Row]:
    """Checks whether training W_Q as one D x D matrix equals training N matrices of D x H.

    Each is trained for three steps with the same random gradients. Adam updates every entry by
    itself, so the result is the same. Muon updates a matrix as a whole.
    """
    # The first D x D matrix is W_Q, the other three are the gradients of the steps.
    w_SDD = np.random.default_rng(1).normal(size=(4, D, D))
    w_SDH_by_head = np.split(w_SDD, N, axis=2)
    adam = optax.adam(0.1)
    muon = optax.contrib.muon(0.1)
    for optimizer, context in ((adam, ADAM_CONTEXT), (muon, MUON_CONTEXT)):
        trained_heads = [train_first(optimizer, w_SDH) for w_SDH in w_SDH_by_head]
        trained_apart_DD = np.concatenate(trained_heads, axis=1)
        trained_together_DD = train_first(optimizer, w_SDD)
        yield equality_row(
            'change of W_Q by training heads in one matrix',
            trained_apart_DD,
            trained_together_DD,
            **context,
        )


def train_first(optimizer: optax.GradientTransformation, w_SDE: np.ndarray) -> np.ndarray:
    """Trains the first matrix of a stack; the other matrices are the gradients of the steps."""
    w_DE = w_SDE[0]
    state = optimizer.init(w_DE)
    update = jax.jit(optimizer.update)
    for gradient_DE in w_SDE[1:]:
        updates, state = update(gradient_DE, state, w_DE)
        w_DE = optax.apply_updates(w_DE, updates)
    return w_DE


def trained_apart() -> Iterator[Row]:
    """Checks whether a head with W_Q and the same function without W_Q stay equal under training.

    Both learn the output of another head, for 200 steps on the same 32 sequences. The rows are
    differences in the softmax input. Before training, the two differ only by rounding, which SAME
    bounds. The trained head and its own rewrite without W_Q also differ only by rounding. The
    question is whether the two differ by more if each is trained by itself.
    """
    x_BTD = jnp.asarray(np.random.default_rng(7).standard_normal((32, T, D)))
    target_BTD = output(random_layer(num_heads=1, seed=1), x_BTD)

    def loss(head: Attention) -> jax.Array:
        return ((output(head, x_BTD) - target_BTD) ** 2).mean()

    for name, optimizer in (('SGD', optax.sgd(1.0)), ('Adam', optax.adam(0.01))):
        train = jax.jit(partial(minimize, loss, optimizer=optimizer, steps=200))
        head = random_layer(num_heads=1)
        head_without = without_w_q(random_layer(num_heads=1))
        trained = train(head)
        trained_without = train(head_without)
        # By time, a head without W_Q and a head with W_Q.
        pairs = {
            'before training': (head_without, head),
            'trained, one product in place of two': (without_w_q(trained), trained),
            'trained apart': (trained_without, trained),
        }
        for when, (without, with_w_q) in pairs.items():
            inputs = [softmax_input(without, x_BTD), softmax_input(with_w_q, x_BTD)]
            yield equality_row(f'difference of the softmax input, {when}', *inputs, optimizer=name)


def penalty(matrices: Any) -> Any:
    """Returns half the sum of the squares of all entries, such as (|W_Q|^2 + |W_K|^2) / 2."""
    return sum((w**2).sum() for w in matrices) / 2


def least_penalty() -> Iterator[Row]:
    """Checks the least penalty (|W_Q|^2 + |W_K|^2) / 2 that factors W_Q W_K^T = A can have.

    It is |A|_*, the sum of the singular values of A (Srebro et al. 2005, lemma 1), and balanced
    factors reach it.
    """
    q_DR, k_DR = np.random.default_rng(0).normal(size=(2, 8, 3))
    A_DE = q_DR @ k_DR.T
    sum_of_singular_values = np.linalg.svd(A_DE, compute_uv=False).sum()
    left_factors, right_factors, *_ = balanced_factors(A_DE[None], 3)
    ratio = penalty([left_factors, right_factors]) / sum_of_singular_values
    quantity = 'penalty of balanced factors over |A|_*'
    yield exact_row(quantity, ratio, expected=1, tolerance=SAME, **L2_CONTEXT)


def shrunk_spectra() -> Iterator[Row]:
    """Checks how weight decay shrinks the singular values of A under descent on |A - target|^2 / 2.

    With an L2 penalty lambda / 2, two factors shrink every singular value d to max(0, d - lambda),
    which lowers the rank. A single matrix shrinks it to d / (1 + lambda). See Kobayashi et al.,
    arXiv 2410.23819.
    """
    strength = 0.4  # of weight decay, lambda
    # What is trained, whether it has two factors, and its expected singular values.
    forms = (
        ('W_Q W_K^T from max(0, d - lambda)', True, np.maximum(0, SPECTRUM - strength)),
        ('W_QK from d / (1 + lambda)', False, SPECTRUM / (1 + strength)),
    )
    for adam, decay in ((False, L2_CONTEXT), (True, ADAMW_CONTEXT)):
        context = decay | {'lambda': strength}
        for form, factored, expected in forms:
            A_DD = fit_with_decay(strength, factored=factored, adam=adam)
            spectrum = np.linalg.svd(A_DD, compute_uv=False)
            largest_error = np.abs(spectrum - expected).max()
            quantity = f'distance of the singular values of {form}'
            yield exact_row(quantity, largest_error, expected=0, tolerance=2e-3, **context)


@partial(jax.jit, static_argnames=('factored', 'adam'))
def fit_with_decay(strength: float, *, factored: bool, adam: bool) -> jax.Array:
    """Returns A after 5,000 steps of descent on |A - target|^2 / 2 with weight decay.

    Args:
        strength: The strength of the decay, lambda.
        factored: Whether A is a product W_Q W_K^T, with both factors decayed, or a single matrix.
        adam: Whether AdamW decays the weights outside the gradient. Otherwise the penalty is part
            of the loss, and the optimizer is SGD.

    The singular values of the 5 x 5 target are SPECTRUM.
    """
    rng = np.random.default_rng(0)
    left_DD, right_DD = np.linalg.qr(rng.normal(size=(2, 5, 5)))[0]  # both orthogonal
    target_DD = left_DD * SPECTRUM @ right_DD
    optimizer = optax.adamw(0.01, weight_decay=strength) if adam else optax.sgd(0.1)

    def product(matrices: tuple[jax.Array, ...]) -> jax.Array:
        return matrices[0] @ matrices[1].T if factored else matrices[0]

    def loss(matrices: tuple[jax.Array, ...]) -> jax.Array:
        misfit = ((product(matrices) - target_DD) ** 2).sum() / 2
        return misfit if adam else misfit + strength * penalty(matrices)

    num_matrices = 2 if factored else 1
    start = tuple(jnp.asarray(w) for w in rng.normal(size=(num_matrices, 5, 5)))
    return product(minimize(loss, start, optimizer, 5000))

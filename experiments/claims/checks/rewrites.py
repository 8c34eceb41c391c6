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
    count,
    descended,
    fit_error,
    freedom,
    layer,
    output,
    rank,
    same,
    same_output,
    softmax_input,
    stream,
    with_matrices,
)
from experiments.claims.claim import Row, exact
from qkattn.attention import Attention, oracle
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
NOTHING: Options = {BETWEEN: 'nothing'}
SINGLE: Options = {LAYER: 'single head'}
WIDE: Options = {WIDTH: 'R >= D'}
ENTRIES: Options = {'optimizer': 'Adam, entry by entry'}
WHOLE: Options = {'optimizer': 'Muon, matrix by matrix'}
L2: Options = {'decay': 'in the loss'}
DECOUPLED: Options = {'decay': 'AdamW without gradient noise'}
# The option of a layer that rotates queries and keys.
ROPE: Options = {'positions': 'rope'}
# The singular values of the matrix that descent with weight decay approaches.
SPECTRUM = np.array([1.0, 0.8, 0.6, 0.4, 0.2])
# A quantity of rows.
LEFT = 'share of the attention parameters that is left'
# Tensors of a published GPT-2: W_Q, W_K and W_V side by side, and W_O.
C_ATTN = 'h.0.attn.c_attn.weight'
C_PROJ = 'h.0.attn.c_proj.weight'
# The four matrices, by the first letters of the names of parameters.
MATRICES = ('w_q', 'w_k', 'w_v', 'w_o')
# The matrices of all heads by MATRICES, each D x D.
Square = dict[str, np.ndarray]


def one_matrix() -> Iterator[Row]:
    """Checks that one matrix W_Q[n] W_K[n]^T of rank H replaces W_Q[n] and W_K[n]."""
    attention = layer()
    merged = merge(attention)
    x_BTD = stream()
    inputs = [softmax_input(merged, x_BTD), softmax_input(attention, x_BTD)]
    yield same('change of the softmax input', *inputs, **NOTHING)
    yield same_output(', as defined', merged, attention, **NOTHING)
    for H in (8, 32):
        A_NDE = layer(num_heads=1, head_size=H).score.matrix()
        yield exact('rank of W_Q W_K^T', rank(A_NDE), H, **NOTHING, head_size=H)


def what_stands_between() -> Iterator[Row]:
    """Checks whether a single W_QK can replace W_Q and W_K if queries and keys are transformed.

    The error is the minimum over A of |x A x^T - s| / |s|, by least squares over all pairs of 24
    tokens, with a single head. s is the input of the softmax.
    """
    x_BTD = stream(24, d_model=8)
    pairs = np.einsum('BTD,BSE->BTSDE', x_BTD, x_BTD)
    layers: dict[str, Options] = {'nothing': {}, 'RoPE': ROPE, 'QK-norm': {'qk_norm': True}}
    for name, options in layers.items():
        s_BNTS = softmax_input(layer(d_model=8, num_heads=1, **options), x_BTD)
        quantity = 'error of the best W_QK, relative to the softmax input'
        context = {BETWEEN: name}
        yield exact(quantity, fit_error(pairs, s_BNTS), 0, SAME, **context)


def square_attention(x_BTD: np.ndarray, square: Square, num_heads: int) -> np.ndarray:
    """Computes causal attention with D x D matrices, as other implementations do.

    Head n uses the columns n H to (n + 1) H of W_Q, W_K and W_V, and the same rows of W_O.
    """

    def projected(name: str) -> np.ndarray:
        heads = np.split(x_BTD @ square[name], num_heads, axis=2)
        return np.stack(heads, axis=1)

    q_BNTH = projected('w_q')
    k_BNSH = projected('w_k')
    v_BNSH = projected('w_v')
    s_BNTS = q_BNTH @ k_BNSH.swapaxes(2, 3) / np.sqrt(k_BNSH.shape[3])
    p_BNTS = oracle.probabilities(s_BNTS, np.tri(x_BTD.shape[1], dtype=bool))
    o_NBTH = np.moveaxis(p_BNTS @ v_BNSH, 1, 0)
    o_BTD = np.concatenate(list(o_NBTH), axis=2)
    return o_BTD @ square['w_o']


def gpt2() -> dict[str, np.ndarray]:
    """Returns random tensors of a GPT-2 with one layer, by their published names."""
    config = ModelConfig(d_model=D, num_layers=1, num_heads=N, context=T, vocab_size=16)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in published.shapes(config).items():
        tensors[name] = rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5
    return tensors


def side_by_side() -> Iterator[Row]:
    """Checks that GPT-2's square matrices are the same function and count as N rectangular ones."""
    tensors = gpt2()
    x_BTD = np.asarray(stream())
    matrices = [*np.split(tensors[C_ATTN], 3, axis=1), tensors[C_PROJ]]
    square = dict(zip(MATRICES, matrices, strict=True))
    squared_BTD = square_attention(x_BTD, square, N)
    attention = with_matrices(layer(), square)
    A_NDE, B_NDE = [np.asarray(matrix) for matrix in attention.matrix()]
    mask_BTS = np.tri(T, dtype=bool)[None]
    scale = attention.score.scale
    oracle_BTD = oracle.attention(A_NDE, B_NDE, x_BTD, x_BTD, mask_BTS, scale=scale)
    quantity = 'change of the output, D x D against N of D x H, by A[n] and B[n]'
    yield same(quantity, oracle_BTD, squared_BTD)
    yield exact('parameters of the rectangular matrices', count('qk/vo'), 4 * D * D)


def without_w_q(attention: Attention) -> Attention:
    """Returns a layer that computes the same function without W_Q.

    Its queries are X and its keys X W_K'[n] with W_K'[n] = W_K[n] W_Q[n]^T, a D x D matrix. It
    shares the Value of `attention`.
    """
    free = layer('query_free_full/vo', num_heads=attention.spec.num_heads)
    score = attention.score
    w_k_DNE = np.einsum('DNH,ENH->DNE', score.w_k_DKH[...], score.w_q_DNH[...])
    free.score.w_k_DNE[...] = score.scale / free.score.scale * w_k_DNE
    free.value = attention.value
    return free


def share_left(variant: str, num_heads: int) -> float:
    """Returns the attention parameters of a variant, as a fraction of those of qk/vo."""
    return count(variant, num_heads=num_heads) / count('qk/vo', num_heads=num_heads)


def queries_of_one_head() -> Iterator[Row]:
    """Checks that a single head can do without W_Q, unless it has biases or rotary positions.

    With biases or rotation, the error is that of the best W_K', fitted by least squares to the
    softmax input of 24 tokens. Both sides are centred over keys, because the softmax ignores a
    constant that is added to all scores of a query.
    """
    attention = layer(num_heads=1)
    without = without_w_q(attention)
    x_BTD = stream()
    inputs = [softmax_input(without, x_BTD), softmax_input(attention, x_BTD)]
    yield same('change of the softmax input, W_Q removed', *inputs, **SINGLE)
    yield same_output(', W_Q removed', without, attention, **SINGLE)
    yield exact(LEFT, share_left('query_free/vo', 1), 3 / 4, **SINGLE)
    x_BTD = stream(24, d_model=8)
    # The score of tokens t and s is x_t W_K'^T y_s; with rotation, x_t R(t - s) W_K'^T y_s.
    plain_BTSD = jnp.stack([x_BTD] * 24, axis=2)
    positions_T = jnp.arange(24)
    rotated = [rotate(x_BTD[:, :, None], positions_T - s)[:, :, 0] for s in range(24)]
    rotated_BTSD = jnp.stack(rotated, axis=2)
    for name, options, queries_BTSD in (
        ('biases', {'biases': True}, plain_BTSD),
        ('RoPE', ROPE, rotated_BTSD),
    ):
        s_BTS = softmax_input(layer(d_model=8, num_heads=1, **options), x_BTD)[:, 0]
        pairs_BTSDE = jnp.einsum('BTSD,BSE->BTSDE', queries_BTSD, x_BTD)
        centred_pairs_BTSDE = pairs_BTSDE - pairs_BTSDE.mean(2, keepdims=True)
        error = fit_error(centred_pairs_BTSDE, s_BTS - s_BTS.mean(2, keepdims=True))
        quantity = "error of the best W_K', relative to the softmax input"
        yield exact(quantity, error, 0, SAME, layer=f'single head, {name}')


def queries_of_many_heads() -> Iterator[Row]:
    """Checks what N heads need without W_Q.

    If every head reads all of X, each needs a D x D matrix. If head n reads only slice P[n] of X,
    A[n] is limited to the form P[n] W_K'[n]^T. The best one is P[n] P[n]^T A[n], which misses most
    of A[n].
    """
    attention = layer()
    whole: Options = {LAYER: 'many heads, all read X'}
    yield same_output(', W_Q removed', without_w_q(attention), attention, **whole)
    yield exact(f'{LEFT}, N = {N}', share_left('query_free_full/vo', N), 3 / 4, **whole)
    A_NDE = np.asarray(attention.score.matrix())
    P_DNH = np.asarray(slices_DNH(attention.spec))
    reached_NDE = np.einsum('DNH,ENH,NEF->NDF', P_DNH, P_DNH, A_NDE)
    slices: Options = {LAYER: 'many heads, head n reads slice n of X'}
    error = relative_error(reached_NDE, A_NDE)
    yield exact("error of A[n] with the best W_K'", error, 0, SAME, **slices)
    yield exact(LEFT, share_left('query_free/vo', N), 3 / 4, **slices)


def small(variant: str = 'qk/vo', **options: Any) -> Attention:
    """Returns a layer with 2 x 2 matrices."""
    return layer(variant, **{'d_model': 2, 'num_heads': 1} | options)


def worked_by_hand() -> Iterator[Row]:
    """Checks A and B of a layer with integer matrices against a calculation by hand."""
    matrices = {
        'w_q': np.array([[1, 2], [0, 1]]),
        'w_k': np.array([[1, 0], [1, 1]]),
        'w_v': np.array([[2, 0], [1, 1]]),
        'w_o': np.array([[1, 1], [0, 2]]),
    }
    A_1DE, B_1DE = with_matrices(small(), matrices).matrix()
    num_in_A = (np.asarray(A_1DE[0]) != [[1, 3], [0, 1]]).sum()
    num_in_B = (np.asarray(B_1DE[0]) != [[2, 2], [1, 3]]).sum()
    yield exact('entries of A, W_Q W_K^T that differ', num_in_A, 0)
    yield exact('entries of B, W_V W_O that differ', num_in_B, 0)


def where_and_what() -> Iterator[Row]:
    """Checks that W_V and W_O have no part in the pattern, and that W_Q = W_K ties its scores.

    The pattern is solved from the output of T = D tokens.
    """
    for size in (2, 4):
        context: Options = {'tokens and dimensions': size}
        attention = small(d_model=size)
        x_TD = stream(size, d_model=size)[0]
        other_value = small(d_model=size, seed=1)
        other_value.score = attention.score
        patterns = [pattern(other_value, x_TD), pattern(attention, x_TD)]
        quantity = 'change of the pattern by another W_V and W_O'
        yield same(quantity, *patterns, tolerance=1e-10, **context)
        tied = small('shared_qk/vo', d_model=size)
        s_TS = softmax_input(tied, x_TD[None])[0, 0]
        is_equal_TS = np.isclose(s_TS, s_TS.T, rtol=1e-12)
        num_tied = is_equal_TS[np.triu_indices(size, 1)].sum()
        num_pairs = size * (size - 1) / 2
        yield exact('tied pairs of scores, W_Q W_Q^T', num_tied, num_pairs, **context)


def pattern(attention: Attention, x_TD: jax.Array) -> np.ndarray:
    """Solves out = P (x B) for the pattern P_TS of a layer with one head and T = D tokens.

    All positions are visible.
    """
    T = len(x_TD)
    out_TD = output(attention, x_TD[None], jnp.ones((1, T, T), bool))[0]
    _, B_1DE = attention.matrix()
    moved_SD = x_TD @ B_1DE[0]
    return np.linalg.solve(moved_SD.T, out_TD.T).T


def gauge() -> Iterator[Row]:
    """Checks that W_Q M and W_K M^-T, or W_V M and M^-1 W_O, give the same function."""
    attention = small()
    matrices = {}
    for circuit in (attention.score, attention.value):
        for name, parameter in vars(circuit).items():
            if name[:3] in MATRICES:
                matrices[name[:3]] = np.asarray(parameter[...]).reshape(2, 2)
    M_HH = np.array([[2.0, 1.0], [-1.0, 1.0]])
    inverse_HH = np.linalg.inv(M_HH)
    of_score = {'w_q': matrices['w_q'] @ M_HH, 'w_k': matrices['w_k'] @ inverse_HH.T}
    of_value = {'w_v': matrices['w_v'] @ M_HH, 'w_o': inverse_HH @ matrices['w_o']}
    changed = with_matrices(small(), of_score)
    yield same_output(', W_Q M and W_K M^-T', changed, attention)
    changed = with_matrices(small(), of_value)
    yield same_output(', W_V M and M^-1 W_O', changed, attention)


def two_in_a_row() -> Iterator[Row]:
    """Compares a shared projection O_Q followed by W_Q[n] with one matrix O_Q W_Q[n] per head.

    Checks that `fold_double` keeps the function, that any single matrix is such a product (with
    O_Q = I), and how many free parameters the matrices O_Q W_Q[n] have together, for a shared
    projection of width R.
    """
    double = layer('double/double')
    yield same_output(' by folding, as defined', fold_double(double), double, **WIDE)
    attention = layer()
    unfolded = layer('double/vo')
    unfolded.value = attention.value
    unfolded.score.w_q_outer_DR[...] = np.eye(D)
    unfolded.score.w_q_RNH[...] = attention.score.w_q_DNH[...]
    unfolded.score.w_k_outer_DR[...] = np.eye(D)
    unfolded.score.w_k_RKH[...] = attention.score.w_k_DKH[...]
    yield same_output(', shared W_Q = I', unfolded, attention, **WIDE)
    # O_Q W_Q[n] are the queries of the unit vectors.
    for R, context in ((8, WIDE), (5, {WIDTH: 'R < D'})):
        score = layer(f"double(size={R},which='q')/vo", d_model=8, num_heads=2).score
        free = freedom(lambda score: score.queries(jnp.eye(8)[None]), score)
        yield exact(f'free parameters of W_Q, D = 8, R = {R}', free, 8 * 8, **context)


def one_matrix_per_head() -> Iterator[Row]:
    """Checks that published layouts have no projection that heads share.

    In GPT-2, each entry of c_attn belongs to exactly one head. The attention layer of flax.nnx
    computes the same as separate heads that have its columns.
    """
    # All entries of c_attn are different, so the heads show which entries they have.
    numbers = np.arange(3 * D * D, dtype=np.float32)
    tensors = gpt2() | {C_ATTN: numbers.reshape(D, -1)}
    _, params = published.load_gpt2(tensors, num_heads=N)
    heads = params['blocks']['attention']
    projections = [heads['score']['w_q_DNH'], heads['score']['w_k_DKH'], heads['value']['w_v_DKH']]
    entries = np.concatenate([np.ravel(w) for w in projections])
    num_unequal = int((np.sort(entries) != numbers).sum())
    quantity = 'entries of c_attn that are not in exactly one head, GPT-2'
    yield exact(quantity, num_unequal, 0, **ENTRIES)

    flax = nnx.MultiHeadAttention(N, D, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    projections_of_flax = (flax.query, flax.key, flax.value, flax.out)
    square = {}
    for name, projection in zip(MATRICES, projections_of_flax, strict=True):
        square[name] = np.asarray(projection.kernel[...], np.float64).reshape(D, D)
    flax = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.ndim > 1 else leaf, flax)
    x_BTD = stream()
    expected_BTD = output(with_matrices(layer(), square), x_BTD)
    actual_BTD = flax(x_BTD, mask=np.tri(T, dtype=bool))
    quantity = 'change of the output, heads of flax.nnx'
    yield same(quantity, actual_BTD, expected_BTD, tolerance=1e-6, **ENTRIES)


def steps_of_training() -> Iterator[Row]:
    """Checks whether training W_Q as one D x D matrix equals training N matrices of D x H.

    Each is trained for three steps, with Adam and with Muon.
    """
    w_SDD = np.random.default_rng(1).normal(size=(4, D, D))
    for optimizer, context in ((optax.adam(0.1), ENTRIES), (optax.contrib.muon(0.1), WHOLE)):
        heads = [after_steps(optimizer, w_SDH) for w_SDH in np.split(w_SDD, N, axis=2)]
        joined = np.concatenate(heads, axis=1)
        square = after_steps(optimizer, w_SDD)
        yield same('change of W_Q by training heads in one matrix', joined, square, **context)


def after_steps(optimizer: optax.GradientTransformation, w_SDE: np.ndarray) -> np.ndarray:
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
    target_BTD = output(layer(num_heads=1, seed=1), x_BTD)

    def loss(head: Attention) -> jax.Array:
        return ((output(head, x_BTD) - target_BTD) ** 2).mean()

    for name, optimizer in (('SGD', optax.sgd(1.0)), ('Adam', optax.adam(0.01))):
        train = jax.jit(partial(descended, loss, optimizer=optimizer, steps=200))
        head = layer(num_heads=1)
        head_without = without_w_q(layer(num_heads=1))
        trained = train(head)
        trained_without = train(head_without)
        for when, without, with_w_q in (
            ('before training', head_without, head),
            ('trained, one product in place of two', without_w_q(trained), trained),
            ('trained apart', trained_without, trained),
        ):
            inputs = [softmax_input(without, x_BTD), softmax_input(with_w_q, x_BTD)]
            yield same(f'difference of the softmax input, {when}', *inputs, optimizer=name)


def penalty(matrices: Any) -> Any:
    """Returns half the sum of the squares of all entries, such as (|W_Q|^2 + |W_K|^2) / 2."""
    return sum((w**2).sum() for w in matrices) / 2


def least_penalty() -> Iterator[Row]:
    """Checks that balanced factors W_Q W_K^T = A have the penalty |A|_*, the least of all factors.

    |A|_* is the sum of the singular values of A (Srebro et al. 2005, lemma 1).
    """
    q_DR, k_DR = np.random.default_rng(0).normal(size=(2, 8, 3))
    A_DE = q_DR @ k_DR.T
    nuclear = np.linalg.svd(A_DE, compute_uv=False).sum()
    factors = balanced_factors(A_DE[None], 3)[:2]
    balanced = penalty(factors)
    yield exact('penalty of balanced factors over |A|_*', balanced / nuclear, 1, SAME, **L2)


def shrunk_spectra() -> Iterator[Row]:
    """Checks how weight decay shrinks the singular values of A under descent on |A - target|^2 / 2.

    With an L2 penalty lambda / 2, two factors shrink every singular value d to max(0, d - lambda),
    which lowers the rank. A single matrix shrinks it to d / (1 + lambda). See Kobayashi et al.,
    arXiv 2410.23819.
    """
    strength = 0.4  # lambda
    for adam, decay in ((False, L2), (True, DECOUPLED)):
        context = decay | {'lambda': strength}
        for form, factored, expected in (
            ('W_Q W_K^T from max(0, d - lambda)', True, np.maximum(0, SPECTRUM - strength)),
            ('W_QK from d / (1 + lambda)', False, SPECTRUM / (1 + strength)),
        ):
            A_DD = fitted(strength, factored=factored, adam=adam)
            spectrum = np.linalg.svd(A_DD, compute_uv=False)
            largest_error = np.abs(spectrum - expected).max()
            yield exact(f'singular values of {form}', largest_error, 0, 2e-3, **context)


@partial(jax.jit, static_argnames=('factored', 'adam'))
def fitted(strength: float, *, factored: bool, adam: bool) -> jax.Array:
    """Returns A after 5,000 steps of descent on |A - target|^2 / 2 with weight decay.

    Args:
        strength: The strength of the decay, lambda.
        factored: Whether A is a product W_Q W_K^T, with both factors decayed, or a single matrix.
        adam: Whether AdamW decays the weights outside the gradient. Otherwise the penalty is part
            of the loss, and the optimizer is SGD.

    The singular values of the 5 x 5 target are SPECTRUM.
    """
    rng = np.random.default_rng(0)
    left_DD, right_DD = np.linalg.qr(rng.normal(size=(2, 5, 5)))[0]
    target_DD = left_DD * SPECTRUM @ right_DD
    optimizer = optax.adamw(0.01, weight_decay=strength) if adam else optax.sgd(0.1)

    def product(matrices: tuple[jax.Array, ...]) -> jax.Array:
        return matrices[0] @ matrices[1].T if factored else matrices[0]

    def loss(matrices: tuple[jax.Array, ...]) -> jax.Array:
        misfit = ((product(matrices) - target_DD) ** 2).sum() / 2
        return misfit if adam else misfit + strength * penalty(matrices)

    num_matrices = 2 if factored else 1
    start = tuple(jnp.asarray(w) for w in rng.normal(size=(num_matrices, 5, 5)))
    return product(descended(loss, start, optimizer, 5000))

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

BETWEEN = 'between W_Q and W_K'
LAYER = 'layer'
WIDTH = 'width of the shared projection'
NOTHING: Options = {BETWEEN: 'nothing'}
SINGLE: Options = {LAYER: 'single head'}
WIDE: Options = {WIDTH: 'R >= D'}
ENTRIES: Options = {'optimizer': 'Adam, entry by entry'}
WHOLE: Options = {'optimizer': 'Muon, matrix by matrix'}
ROPE: Options = {'positions': 'rope'}
L2: Options = {'decay': 'in the loss'}
DECOUPLED: Options = {'decay': 'AdamW without gradient noise'}
SPECTRUM = np.array([1.0, 0.8, 0.6, 0.4, 0.2])
LEFT = 'share of the attention parameters that is left'
C_ATTN = 'h.0.attn.c_attn.weight'
C_PROJ = 'h.0.attn.c_proj.weight'
MATRICES = 'w_q', 'w_k', 'w_v', 'w_o'
Square = dict[str, np.ndarray]  # these, each D x D


def one_matrix() -> Iterator[Row]:
    """Softmax input and output after `merge`, and the rank of W_Q[n] W_K[n]^T."""
    attention = layer()
    inputs = [softmax_input(one, stream()) for one in (merge(attention), attention)]
    yield same('change of the softmax input', *inputs, **NOTHING)
    yield same_output(', as defined', merge(attention), attention, **NOTHING)
    for size in (8, 32):
        measured = rank(layer(num_heads=1, head_size=size).score.matrix())
        yield exact('rank of W_Q W_K^T', measured, size, **NOTHING, head_size=size)


def what_stands_between() -> Iterator[Row]:
    """Error of the best single W_QK, fitted to the softmax input, where q or k are transformed.

    min over A of |x A x^T - s| / |s|, by least squares over all pairs of 24 tokens, N = 1.
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
    """Causal attention as implementations with D x D matrices write it: heads are columns."""
    projected = (x_BTD @ square[name] for name in MATRICES[:3])
    q, k, v = (np.stack(np.split(a_BTD, num_heads, axis=2), axis=1) for a_BTD in projected)
    s = q @ k.swapaxes(2, 3) / np.sqrt(k.shape[3])
    o = oracle.probabilities(s, np.tri(x_BTD.shape[1], dtype=bool)) @ v
    return np.concatenate([*np.moveaxis(o, 1, 0)], axis=2) @ square['w_o']


def gpt2() -> dict[str, np.ndarray]:
    """Random tensors of a GPT-2 of one layer."""
    config = ModelConfig(d_model=D, num_layers=1, num_heads=N, context=T, vocab_size=16)
    rng = np.random.default_rng(0)
    named = published.shapes(config).items()
    return {n: rng.normal(size=s).astype(np.float32) / s[0] ** 0.5 for n, s in named}


def side_by_side() -> Iterator[Row]:
    """The square matrices of GPT-2 against N rectangular ones: the function and the count."""
    tensors = gpt2()
    x_BTD = np.asarray(stream())
    matrices = [*np.split(tensors[C_ATTN], 3, axis=1), tensors[C_PROJ]]
    square = dict(zip(MATRICES, matrices, strict=True))
    squared_BTD = square_attention(x_BTD, square, N)
    attention = with_matrices(layer(), square)
    mask_BTS = np.tri(T, dtype=bool)[None]
    A_NDE, B_NDE = map(np.asarray, attention.matrix())
    oracle_BTD = oracle.attention(A_NDE, B_NDE, x_BTD, x_BTD, mask_BTS, scale=attention.score.scale)
    quantity = 'change of the output, D x D against N of D x H, by A[n] and B[n]'
    yield same(quantity, oracle_BTD, squared_BTD)
    yield exact('parameters of the rectangular matrices', count('qk/vo'), 4 * D * D)


def without_w_q(attention: Attention) -> Attention:
    """The layer with queries X and keys of D x D matrices W_K'[n] = W_K[n] W_Q[n]^T."""
    free = layer('query_free_full/vo', num_heads=attention.spec.num_heads)
    score = attention.score
    w_k_DNE = np.einsum('DNH,ENH->DNE', score.w_k_DKH[...], score.w_q_DNH[...])
    free.score.w_k_DNE[...] = score.scale / free.score.scale * w_k_DNE
    free.value = attention.value
    return free


def share_left(variant: str, num_heads: int) -> float:
    """Attention's parameters over those of qk/vo."""
    return count(variant, num_heads=num_heads) / count('qk/vo', num_heads=num_heads)


def queries_of_one_head() -> Iterator[Row]:
    """Q = X in place of X W_Q, and the parameters; a bias and rotation forbid it."""
    attention = layer(num_heads=1)
    without = without_w_q(attention)
    inputs = [softmax_input(one, stream()) for one in (without, attention)]
    yield same('change of the softmax input, W_Q removed', *inputs, **SINGLE)
    yield same_output(', W_Q removed', without, attention, **SINGLE)
    yield exact(LEFT, share_left('query_free/vo', 1), 3 / 4, **SINGLE)
    x_BTD = stream(24, d_model=8)
    # x_t R(t - s), so that x_t R(t - s) W_K'^T y_s is the logit; without rotation, x_t.
    turned = [rotate(x_BTD[:, :, None], jnp.arange(24) - s)[:, :, 0] for s in range(24)]
    for name, options, queries in (
        ('biases', {'biases': True}, [x_BTD] * 24),
        ('RoPE', ROPE, turned),
    ):
        s_BTS = softmax_input(layer(d_model=8, num_heads=1, **options), x_BTD)[:, 0]
        pairs = jnp.einsum('BTSD,BSE->BTSDE', jnp.stack(queries, axis=2), x_BTD)
        # A query may add a constant to all of its logits: softmax ignores it.
        error = fit_error(*(a - a.mean(2, keepdims=True) for a in (pairs, s_BTS)))
        quantity = "error of the best W_K', relative to the softmax input"
        yield exact(quantity, error, 0, SAME, layer=f'single head, {name}')


def queries_of_many_heads() -> Iterator[Row]:
    """N heads need N matrices of D x D; slices of X leave most of A[n] out of reach."""
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
    """A layer of 2 x 2 matrices."""
    return layer(variant, **{'d_model': 2, 'num_heads': 1} | options)


def worked_by_hand() -> Iterator[Row]:
    """A and B of a layer with integer matrices, entry by entry."""
    given = {
        'w_q': np.array([[1, 2], [0, 1]]),
        'w_k': np.array([[1, 0], [1, 1]]),
        'w_v': np.array([[2, 0], [1, 1]]),
        'w_o': np.array([[1, 1], [0, 2]]),
    }
    (A_DE,), (B_DE,) = map(np.asarray, with_matrices(small(), given).matrix())
    yield exact('entries of A, W_Q W_K^T that differ', (A_DE != [[1, 3], [0, 1]]).sum(), 0)
    yield exact('entries of B, W_V W_O that differ', (B_DE != [[2, 2], [1, 3]]).sum(), 0)


def where_and_what() -> Iterator[Row]:
    """The pattern, solved from the output of T = D tokens: W_V and W_O have no part in it."""
    for size in (2, 4):
        context: Options = {'tokens and dimensions': size}
        attention = small(d_model=size)
        x_TD = stream(size, d_model=size)[0]
        other = small(d_model=size, seed=1)
        other.score = attention.score
        patterns = pattern(other, x_TD), pattern(attention, x_TD)
        quantity = 'change of the pattern by another W_V and W_O'
        yield same(quantity, *patterns, tolerance=1e-10, **context)
        tied = softmax_input(small('shared_qk/vo', d_model=size), x_TD[None])[0, 0]
        pairs = np.isclose(tied, tied.T, rtol=1e-12)[np.triu_indices(size, 1)].sum()
        yield exact('tied pairs of scores, W_Q W_Q^T', pairs, size * (size - 1) / 2, **context)


def pattern(attention: Attention, x_TD: jax.Array) -> np.ndarray:
    """P_TS of a layer with one head, from out = P (x B), all positions visible."""
    out_TD = output(attention, x_TD[None], jnp.ones((1, len(x_TD), len(x_TD)), bool))[0]
    return np.linalg.solve((x_TD @ attention.matrix()[1][0]).T, out_TD.T).T


def gauge() -> Iterator[Row]:
    """W_Q M and W_K M^-T, or W_V M and M^-1 W_O, are the same function."""
    attention = small()
    arrays = {**vars(attention.score), **vars(attention.value)}
    w = {n[:3]: np.asarray(a[...]).reshape(2, 2) for n, a in arrays.items() if 'w_' in n}
    M_HH = np.array([[2.0, 1.0], [-1.0, 1.0]])
    inverse_HH = np.linalg.inv(M_HH)
    for change, given in (
        ('W_Q M and W_K M^-T', {'w_q': w['w_q'] @ M_HH, 'w_k': w['w_k'] @ inverse_HH.T}),
        ('W_V M and M^-1 W_O', {'w_v': w['w_v'] @ M_HH, 'w_o': inverse_HH @ w['w_o']}),
    ):
        yield same_output(f', {change}', with_matrices(small(), given), attention)


def two_in_a_row() -> Iterator[Row]:
    """A double layer after `fold_double`, and one matrix as two, the first of them I.

    Then the numbers that all W_Q[n] together are free in, by the width R of the shared projection;
    O_Q W_Q[n] are the queries of the unit vectors.
    """
    double = layer('double/double')
    yield same_output(' by folding, as defined', fold_double(double), double, **WIDE)
    attention = layer()
    unfolded = layer('double/vo')
    eye = np.eye(D)
    one = attention.score
    two = unfolded.score
    unfolded.value = attention.value
    two.w_q_outer_DR[...] = eye
    two.w_q_RNH[...] = one.w_q_DNH[...]
    two.w_k_outer_DR[...] = eye
    two.w_k_RKH[...] = one.w_k_DKH[...]
    yield same_output(', shared W_Q = I', unfolded, attention, **WIDE)
    for R, context in ((8, WIDE), (5, {WIDTH: 'R < D'})):
        score = layer(f"double(size={R},which='q')/vo", d_model=8, num_heads=2).score
        free = freedom(lambda score: score.queries(jnp.eye(8)[None]), score)
        yield exact(f'free parameters of W_Q, D = 8, R = {R}', free, 8 * 8, **context)


def one_matrix_per_head() -> Iterator[Row]:
    """No published layout has a projection that heads share: every number belongs to one head."""
    numbers = np.arange(3 * D * D, dtype=np.float32)
    tensors = gpt2() | {C_ATTN: numbers.reshape(D, -1)}
    heads = published.load_gpt2(tensors, num_heads=N)[1]['blocks']['attention']
    projections = heads['score']['w_q_DNH'], heads['score']['w_k_DKH'], heads['value']['w_v_DKH']
    places = np.concatenate([np.ravel(w) for w in projections])
    quantity = 'entries of c_attn that are not in exactly one head, GPT-2'
    yield exact(quantity, int((np.sort(places) != numbers).sum()), 0, **ENTRIES)
    flax = nnx.MultiHeadAttention(N, D, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    square = {
        name: np.asarray(getattr(flax, which).kernel[...], np.float64).reshape(D, D)
        for name, which in zip(MATRICES, ('query', 'key', 'value', 'out'), strict=True)
    }
    flax = jax.tree.map(lambda a: a.astype(np.float64) if a.ndim > 1 else a, flax)
    x_BTD = stream()
    outputs = flax(x_BTD, mask=np.tri(T, dtype=bool)), output(with_matrices(layer(), square), x_BTD)
    yield same('change of the output, heads of flax.nnx', *outputs, tolerance=1e-6, **ENTRIES)


def steps_of_training() -> Iterator[Row]:
    """Three steps of an optimizer on W_Q as one D x D matrix, and as N matrices of D x H."""
    w_SDD = np.random.default_rng(1).normal(size=(4, D, D))
    for optimizer, context in ((optax.adam(0.1), ENTRIES), (optax.contrib.muon(0.1), WHOLE)):
        heads = [after_steps(optimizer, w_SDH) for w_SDH in np.split(w_SDD, N, axis=2)]
        joined = np.concatenate(heads, axis=1)
        square = after_steps(optimizer, w_SDD)
        yield same('change of W_Q by training heads in one matrix', joined, square, **context)


def after_steps(optimizer: optax.GradientTransformation, w_SDE: np.ndarray) -> np.ndarray:
    """The first matrix after a step with each of the others as its gradient."""
    w_DE, *gradients = w_SDE
    state = optimizer.init(w_DE)
    update = jax.jit(optimizer.update)
    for gradient_DE in gradients:
        updates, state = update(gradient_DE, state, w_DE)
        w_DE = optax.apply_updates(w_DE, updates)
    return w_DE


def trained_apart() -> Iterator[Row]:
    """A single head and the same function without W_Q, trained alike; SAME bounds rounding.

    Both learn the output of another head, 200 steps on the same 32 sequences. Of the trained head,
    W_K' = W_K W_Q^T still gives the softmax input.
    """
    x_BTD = jnp.asarray(np.random.default_rng(7).standard_normal((32, T, D)))
    target_BTD = output(layer(num_heads=1, seed=1), x_BTD)

    def loss(head: Attention) -> jax.Array:
        return ((output(head, x_BTD) - target_BTD) ** 2).mean()

    for name, optimizer in (('SGD', optax.sgd(1.0)), ('Adam', optax.adam(0.01))):
        pair = layer(num_heads=1), without_w_q(layer(num_heads=1))
        train = jax.jit(partial(descended, loss, optimizer=optimizer, steps=200))
        factored, one = map(train, pair)
        for when, heads in (
            ('before training', pair),
            ('trained, one product in place of two', (factored, without_w_q(factored))),
            ('trained apart', (factored, one)),
        ):
            inputs = (softmax_input(head, x_BTD) for head in reversed(heads))
            yield same(f'difference of the softmax input, {when}', *inputs, optimizer=name)


def penalty(matrices: Any) -> Any:
    """(|W_Q|^2 + |W_K|^2) / 2."""
    return sum((w**2).sum() for w in matrices) / 2


def least_penalty() -> Iterator[Row]:
    """min over W_Q W_K^T = A of the penalty is |A|_*, reached by balanced factors.

    |A|_* is the sum of the singular values of A. Srebro et al. 2005, lemma 1.
    """
    q_DR, k_DR = np.random.default_rng(0).normal(size=(2, 8, 3))
    nuclear = np.linalg.svd(q_DR @ k_DR.T, compute_uv=False).sum()
    balanced = penalty(balanced_factors((q_DR @ k_DR.T)[None], 3)[:2])
    yield exact('penalty of balanced factors over |A|_*', balanced / nuclear, 1, SAME, **L2)


def shrunk_spectra() -> Iterator[Row]:
    """Singular values after descent on |A - target|^2 / 2 with decay, by the form of A.

    With an L2 penalty lambda / 2, factors shrink every singular value d to max(0, d - lambda),
    which lowers the rank, and one matrix to d / (1 + lambda). Kobayashi et al., arXiv 2410.23819.
    """
    strength = 0.4
    for adam, decay in ((False, L2), (True, DECOUPLED)):
        for form, factored, expected in (
            ('W_Q W_K^T from max(0, d - lambda)', True, np.maximum(0, SPECTRUM - strength)),
            ('W_QK from d / (1 + lambda)', False, SPECTRUM / (1 + strength)),
        ):
            A_DD = fitted(strength, factored=factored, adam=adam)
            off = np.abs(np.linalg.svd(A_DD, compute_uv=False) - expected).max()
            about = decay | {'lambda': strength}
            yield exact(f'singular values of {form}', off, 0, 2e-3, **about)


@partial(jax.jit, static_argnames=('factored', 'adam'))
def fitted(strength: float, *, factored: bool, adam: bool) -> jax.Array:
    """A after 5,000 steps of descent on |A - target|^2 / 2 with decay of that strength.

    `factored`: A = W_Q W_K^T with both decayed, else one matrix. `adam`: AdamW decays beside the
    gradient, else the penalty is part of the loss of SGD.
    """
    rng = np.random.default_rng(0)
    left_DD, right_DD = np.linalg.qr(rng.normal(size=(2, 5, 5)))[0]
    target_DD = left_DD * SPECTRUM @ right_DD
    optimizer = optax.adamw(0.01, weight_decay=strength) if adam else optax.sgd(0.1)

    def form(matrices: tuple[jax.Array, ...]) -> jax.Array:
        return matrices[0] @ matrices[1].T if factored else matrices[0]

    def loss(matrices: tuple[jax.Array, ...]) -> jax.Array:
        misfit = ((form(matrices) - target_DD) ** 2).sum() / 2
        return misfit + (0 if adam else strength) * penalty(matrices)

    start = tuple(jnp.asarray(w) for w in rng.normal(size=(1 + factored, 5, 5)))
    return form(descended(loss, start, optimizer, 5000))

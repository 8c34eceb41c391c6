"""Exact rewrites: one W_QK for W_Q and W_K (A1), Q = X (B1), two matrices in a row as one (D1)."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qkattn.attention import Attention
from qkattn.attention.parameters import slices_DNH
from qkattn.attention.rope import rotate
from qkattn.claims.checks.small_layers import (
    SAME,
    D,
    H,
    N,
    Options,
    count,
    fit_error,
    float64,
    freedom,
    layer,
    rank,
    same,
    same_output,
    softmax_input,
    stream,
)
from qkattn.claims.claim import Row, exact
from qkattn.config import ModelConfig
from qkattn.convert.circuits import merge
from qkattn.convert.conversions import converted
from qkattn.convert.factors import (
    empty_layer,
    extract_factors,
    fill,
    logit_scale,
    relative_error,
)
from qkattn.convert.whole_layer import fold_double
from qkattn.model import Decoder, build

BETWEEN, LAYER, WIDTH = 'between W_Q and W_K', 'layer', 'width of the shared projection'
NOTHING: Options = {BETWEEN: 'nothing'}
SINGLE: Options = {LAYER: 'single head'}
WIDE: Options = {WIDTH: 'R >= D'}
ROPE: Options = {'positions': 'rope'}
BIASES: Options = {'biases': True}
MERGED_LAYERS: dict[str, Options] = {
    'as defined': {},
    'with biases': BIASES,
    'with shared key heads': {'num_kv_heads': 2},
    'with linear position biases': {'positions': 'alibi'},
}
FOLDED_LAYERS: dict[str, Options] = {
    'as defined': {},
    'RoPE': ROPE,
    'QK-norm': {'qk_norm': True},
    'biases': BIASES,
    'shared key heads': {'num_kv_heads': 2},
}
SMALL = ModelConfig(
    d_model=16, num_layers=1, num_heads=2, context=8, vocab_size=16, positions='learned'
)


@float64
def one_matrix() -> Iterator[Row]:
    """Softmax input and output of layers, and logits of a trained model, after `merge`."""
    inputs = [softmax_input(one, stream()) for one in (merge(layer()), layer())]
    yield same('change of the softmax input', *inputs, **NOTHING)
    for name, options in MERGED_LAYERS.items():
        attention = layer(**options)
        yield same_output(f', {name}', merge(attention), attention, **NOTHING)
    model, tokens_BT = trained(), jnp.arange(16).reshape(2, 8)
    logits = [jax.jit(lambda m: m(tokens_BT))(m) for m in (converted(model, 'merge'), model)]
    yield same('change of the logits of a trained model', *logits, **NOTHING)


@float64
def ranks() -> Iterator[Row]:
    """The rank of W_Q[n] W_K[n]^T by its singular values, at initialization and after training."""
    quantity = 'rank of W_Q W_K^T'
    for size in (1, 2, 4, 8, 16, 32):
        measured = rank(layer(num_heads=1, head_size=size).score.matrix())
        yield exact(quantity, measured, size, **NOTHING, head_size=size)
    spectrum_ND = np.linalg.svd(layer().score.matrix(), compute_uv=False)
    rest = float((spectrum_ND[:, H] / spectrum_ND[:, 0]).max())
    yield exact('singular value H + 1 over the first', rest, 0, 1e-13, **NOTHING)
    measured = max(rank(attention.score.matrix()) for attention in trained().layers())
    yield exact(f'{quantity} after training, H = 8', measured, 8, **NOTHING)


@float64
def what_stands_between() -> Iterator[Row]:
    """Error of the best single W_QK, fitted to the softmax input, where q or k are transformed.

    min over A of |x A x^T - s| / |s|, by least squares over all pairs of 24 tokens, N = 1.
    """
    x_BTD = stream(24, d_model=8)
    pairs = np.einsum('BTD,BSE->BTSDE', x_BTD, x_BTD)
    layers: dict[str, Options] = {'nothing': {}, 'RoPE': ROPE, 'QK-norm': {'qk_norm': True}}
    for name, options in layers.items():
        s_BNTS = softmax_input(layer(d_model=8, num_heads=1, **options), x_BTD)
        quantity, context = 'error of the best W_QK, relative to the softmax input', {BETWEEN: name}
        yield exact(quantity, fit_error(pairs, s_BNTS), 0, SAME, **context)


@functools.cache
def trained(num_steps: int = 20) -> Decoder:
    """A small decoder in float64 after a few steps of Adam on random tokens."""
    model = jax.tree.map(lambda a: a.astype(jnp.float64), build(SMALL, key=jax.random.key(0)))
    tokens_BT = jax.random.randint(jax.random.key(1), (4, 9), 0, 16)
    adam = optax.adam(1e-2)

    def loss(model: Decoder) -> jax.Array:
        logits_BTV = model(tokens_BT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:]).mean()

    @jax.jit
    def step(model: Decoder, state: optax.OptState) -> tuple[Decoder, optax.OptState]:
        updates, state = adam.update(jax.grad(loss)(model), state)
        return optax.apply_updates(model, updates), state

    state = adam.init(model)
    for _ in range(num_steps):
        model, state = step(model, state)
    return model


def without_w_q(attention: Attention) -> Attention:
    """The layer with queries X and keys of D x D matrices W_K'[n] = W_K[n] W_Q[n]^T."""
    factors = extract_factors(attention)
    target = empty_layer(attention, score='query_free_full')
    scale = factors.scale / logit_scale(target)
    w_k_DNE = scale * np.einsum('DNH,ENH->DNE', factors.w_k_DKH, factors.w_q_DNH)
    arrays = {'w_k_DNE': w_k_DNE, 'b_k_NE': np.zeros(w_k_DNE.shape[1:])}
    return fill(target, attention, score=arrays)


def share_left(variant: str, num_heads: int) -> float:
    """Attention's parameters over those of qk/vo."""
    return count(variant, num_heads=num_heads) / count('qk/vo', num_heads=num_heads)


@float64
def queries_of_one_head() -> Iterator[Row]:
    """Q = X in place of X W_Q, and back, and the parameters; a bias and rotation forbid it."""
    attention, free, x_BTD = layer(num_heads=1), layer('query_free/vo', num_heads=1), stream()
    without = without_w_q(attention)
    inputs = [softmax_input(one, x_BTD) for one in (without, attention)]
    yield same('change of the softmax input, W_Q removed', *inputs, **SINGLE)
    yield same_output(', W_Q removed', without, attention, **SINGLE)
    factors = {'w_q_DNH': np.eye(D)[:, None], 'w_k_DKH': np.asarray(free.score.w_k_DKH[...])}
    back = fill(empty_layer(free, score='qk'), free, score=factors)
    yield same_output(', W_Q = I put back', back, free, **SINGLE)
    share = share_left('query_free/vo', 1)
    yield exact('share of the attention parameters that is left', share, 3 / 4, **SINGLE)
    x_BTD = stream(24, d_model=8)
    # x_t R(t - s), so that x_t R(t - s) W_K'^T y_s is the logit; without rotation, x_t.
    turned = [rotate(x_BTD[:, :, None], jnp.arange(24) - s)[:, :, 0] for s in range(24)]
    for name, options, queries in (
        ('biases', BIASES, [x_BTD] * 24),
        ('RoPE', ROPE, turned),
    ):
        s_BTS = softmax_input(layer(d_model=8, num_heads=1, **options), x_BTD)[:, 0]
        pairs = jnp.einsum('BTSD,BSE->BTSDE', jnp.stack(queries, axis=2), x_BTD)
        # A query may add a constant to all of its logits: softmax ignores it.
        error = fit_error(*(a - a.mean(2, keepdims=True) for a in (pairs, s_BTS)))
        quantity = "error of the best W_K', relative to the softmax input"
        yield exact(quantity, error, 0, SAME, **{LAYER: f'single head, {name}'})


@float64
def queries_of_many_heads() -> Iterator[Row]:
    """N heads need N matrices of D x D; slices of X leave most of A[n] out of reach."""
    attention, left = layer(), 'share of the attention parameters that is left'
    whole: Options = {LAYER: 'many heads, all read X'}
    yield same_output(', W_Q removed', without_w_q(attention), attention, **whole)
    for heads in (2, 4, 8):
        share = share_left('query_free_full/vo', heads)
        yield exact(f'{left}, N = {heads}', share, 3 / 4, **whole)
    A_NDE, P_DNH = np.asarray(attention.score.matrix()), np.asarray(slices_DNH(attention.spec))
    reached_NDE = np.einsum('DNH,ENH,NEF->NDF', P_DNH, P_DNH, A_NDE)
    slices: Options = {LAYER: 'many heads, head n reads slice n of X'}
    error = relative_error(reached_NDE, A_NDE)
    yield exact("error of A[n] with the best W_K'", error, 0, SAME, **slices)
    yield exact(left, share_left('query_free/vo', N), 3 / 4, **slices)


@float64
def folded() -> Iterator[Row]:
    """A double layer after `fold_double`, whatever else it has, and one matrix as two, I first."""
    for name, options in FOLDED_LAYERS.items():
        double = layer('double/double', **options)
        yield same_output(f' by folding, {name}', fold_double(double), double, **WIDE)
    attention, eye = layer(), np.eye(D)
    q, k = (np.asarray(w[...]) for w in (attention.score.w_q_DNH, attention.score.w_k_DKH))
    arrays = {'w_q_outer_DR': eye, 'w_q_RNH': q, 'w_k_outer_DR': eye, 'w_k_RKH': k}
    double = fill(empty_layer(attention, score='double'), attention, score=arrays)
    yield same_output(', shared W_Q = I', double, attention, **WIDE)


@float64
def reach() -> Iterator[Row]:
    """The numbers that all W_Q[n] together are free in, by the width R of the shared projection.

    O_Q W_Q[n] are the queries of the unit vectors.
    """
    for R in (8, 12, 5, 3):
        score = layer(f"double(size={R},which='q')/vo", d_model=8, num_heads=2).score
        free = freedom(lambda score: score.queries(jnp.eye(8)[None]), score)
        context: Options = WIDE if R >= 8 else {WIDTH: 'R < D'}
        yield exact(f'numbers that W_Q is free in, D = 8, R = {R}', free, 8 * 8, **context)

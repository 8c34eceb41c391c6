"""W_Q and W_K as one matrix W_QK[n] = W_Q[n] W_K[n]^T: the same function, of rank at most H."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qkattn.attention import Attention
from qkattn.claims.checks.small_layers import (
    H,
    curve,
    difference,
    fit_error,
    float64,
    layer,
    output,
    rank,
    softmax_input,
    stream,
)
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row
from qkattn.config import ModelConfig
from qkattn.convert.circuits import merge
from qkattn.convert.conversions import converted
from qkattn.model import Decoder, build

BETWEEN = 'between W_Q and W_K'
NOTHING: dict[str, Any] = {BETWEEN: 'nothing'}
LAYERS: dict[str, dict[str, Any]] = {
    'as defined': {},
    'with biases': {'biases': True},
    'with shared key heads': {'num_kv_heads': 2},
    'with linear position biases': {'positions': 'alibi'},
}
SMALL = ModelConfig(
    d_model=16, num_layers=1, num_heads=2, context=8, vocab_size=16, positions='learned'
)


@float64
def same_function() -> list[Row]:
    """Softmax input and output of layers, and logits of a model, after `merge`."""
    rows = []
    for name, options in LAYERS.items():
        attention, x_BTD = layer(**options), stream()
        merged = merge(attention)
        change = difference(output(merged, x_BTD), output(attention, x_BTD))
        rows.append(exact(f'change of the output, {name}', change, 0, 1e-12, **NOTHING))
        if not options:
            change = difference(softmax_input(merged, x_BTD), softmax_input(attention, x_BTD))
            rows.insert(0, exact('change of the softmax input', change, 0, 1e-12, **NOTHING))
    model, tokens_BT = trained(), jnp.arange(16).reshape(2, 8)
    logits = [jax.jit(lambda m: m(tokens_BT))(m) for m in (converted(model, 'merge'), model)]
    change = difference(*logits)
    rows.append(exact('change of the logits of a trained model', change, 0, 1e-12, **NOTHING))
    return rows


@float64
def ranks() -> list[Row]:
    """The rank of W_Q[n] W_K[n]^T by its singular values, at initialization and after training."""
    rows = []
    for size in (1, 2, 4, 8, 16, 32):
        found = rank(layer(num_heads=1, head_size=size).score.matrix())
        rows.append(curve(exact('rank of W_Q W_K^T', found, size, **NOTHING), size, 'head_size'))
    spectrum_ND = np.linalg.svd(layer().score.matrix(), compute_uv=False)
    rest = float((spectrum_ND[:, H] / spectrum_ND[:, 0]).max())
    rows.append(exact('singular value H + 1 over the first', rest, 0, 1e-13, **NOTHING))
    found = max(rank(attention.score.matrix()) for attention in trained().layers())
    rows.append(exact('rank of W_Q W_K^T after training, H = 8', found, 8, **NOTHING))
    return rows


@float64
def what_stands_between() -> list[Row]:
    """The error of the best one matrix, fitted to the softmax input, where more acts on q and k."""
    found = {
        'nothing': layer(d_model=8, num_heads=1),
        'RoPE': layer(d_model=8, num_heads=1, positions='rope'),
        'QK-norm': layer(d_model=8, num_heads=1, qk_norm=True),
    }
    what = 'error of the best W_QK, relative to the softmax input'
    return [
        exact(what, best_matrix_error(attention), 0, 1e-12, **{BETWEEN: name})
        for name, attention in found.items()
    ]


def best_matrix_error(attention: Attention) -> float:
    """min over A of |x A x^T - s| / |s|, by least squares over all pairs of 24 tokens, N = 1."""
    x_BTD = stream(24, d_model=attention.spec.d_model)
    pairs = np.einsum('BTD,BSE->BTSDE', x_BTD, x_BTD)
    return fit_error(pairs, softmax_input(attention, x_BTD))


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

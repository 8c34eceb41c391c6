"""The same language model as a hand-written function of a dictionary of arrays, in plain JAX."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmark.race import Work


def init(model: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
    """Draws the parameters of a decoder. `model` has the fields of `ModelConfig`."""
    D = model['d_model']
    N = model['num_heads']
    H = D // N
    shapes = {
        'q': (D, N, H),
        'k': (D, N, H),
        'v': (D, N, H),
        'o': (N, H, D),
        'in': (D, 4 * D),
        'out': (4 * D, D),
    }

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        params = {}
        for (name, shape), key_of_matrix in zip(shapes.items(), keys, strict=True):
            params[name] = 0.02 * jax.random.normal(key_of_matrix, shape)
        return params | {'attention_gain': jnp.ones(D), 'mlp_gain': jnp.ones(D)}

    embedding_key, position_key, *layer_keys = jax.random.split(key, 2 + model['num_layers'])
    return {
        'embedding': 0.02 * jax.random.normal(embedding_key, (model['vocab_size'], D)),
        'position': 0.02 * jax.random.normal(position_key, (model['context'], D)),
        'layers': [layer(key) for key in layer_keys],
        'gain': jnp.ones(D),
    }


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Normalizes x over its last axis, in float32: a LayerNorm without bias."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    normalized = centred * jax.lax.rsqrt(variance + 1e-5)
    return normalized.astype(x.dtype) * gain


def attention(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """Computes causal multi-head attention with the matrices 'q', 'k', 'v' and 'o'."""
    q = jnp.einsum('btd,dnh->btnh', x, params['q'])
    k = jnp.einsum('btd,dnh->btnh', x, params['k'])
    v = jnp.einsum('btd,dnh->btnh', x, params['v'])
    _, T, _, H = q.shape
    s = jnp.einsum('btnh,bsnh->bnts', q, k, preferred_element_type=jnp.float32) * H**-0.5
    is_causal = jnp.tril(jnp.ones((T, T), bool))
    s = jnp.where(is_causal, s, -1e30)
    p = jax.nn.softmax(s).astype(x.dtype)
    o = jnp.einsum('bnts,bsnh->btnh', p, v)
    return jnp.einsum('btnh,nhd->btd', o, params['o'])


def loss(model: Mapping[str, Any], params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of tokens[:, 1:]; tokens is [B, T + 1]."""
    params = jax.tree.map(lambda array: array.astype(model['compute_dtype']), params)
    uses_tanh = model['activation'] == 'gelu_tanh'
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    x = params['embedding'][inputs] + params['position'][: inputs.shape[1]]
    for layer in params['layers']:
        x = x + attention(norm(x, layer['attention_gain']), layer)
        hidden = norm(x, layer['mlp_gain']) @ layer['in']
        x = x + jax.nn.gelu(hidden, approximate=uses_tanh) @ layer['out']
    x = norm(x, params['gain'])
    logits = jnp.dot(x, params['embedding'].T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def optimizer() -> optax.GradientTransformation:
    """Returns AdamW after clipping of gradients. Weight decay leaves out vectors, such as gains."""
    is_matrix = functools.partial(jax.tree.map, lambda array: array.ndim > 1)
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.99, weight_decay=0.1, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(config: Mapping[str, Any]) -> Work:
    """Builds the training steps of a run, whose config is JSON: gradients, clipping, AdamW.

    A call makes C = `steps_per_dispatch` steps.
    """
    model = config['model']
    transform = optimizer()
    loss_and_gradient = jax.value_and_grad(functools.partial(loss, model))
    C = config['train']['steps_per_dispatch']
    B = config['train']['batch_size']
    shape = (C, B, model['context'] + 1)

    def step(state: tuple, tokens: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state = state
        value, grads = loss_and_gradient(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), value

    params = init(model, jax.random.key(0))
    state = (params, transform.init(params))
    tokens = jnp.asarray(np.random.default_rng(0).integers(model['vocab_size'], size=shape))
    train_steps = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)

    def run(calls: int) -> None:
        nonlocal state
        for _ in range(calls):
            state, losses = train_steps(state, tokens)
        jax.block_until_ready((state, losses))

    return Work(run, steps=C)

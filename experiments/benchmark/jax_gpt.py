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
    sizes: dict[str, tuple[int, ...]] = {name: (D, N, H) for name in 'qkv'}
    sizes |= {'o': (N, H, D), 'in': (D, 4 * D), 'out': (4 * D, D)}

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = dict(zip(sizes, jax.random.split(key, len(sizes)), strict=True))
        drawn = {name: 0.02 * jax.random.normal(keys[name], sizes[name]) for name in sizes}
        return drawn | {'attention_gain': jnp.ones(D), 'mlp_gain': jnp.ones(D)}

    embedding_key, position_key, *layer_keys = jax.random.split(key, 2 + model['num_layers'])
    return {
        'embedding': 0.02 * jax.random.normal(embedding_key, (model['vocab_size'], D)),
        'position': 0.02 * jax.random.normal(position_key, (model['context'], D)),
        'layers': [layer(key) for key in layer_keys],
        'gain': jnp.ones(D),
    }


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def attention(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (jnp.einsum('btd,dnh->btnh', x, p[name]) for name in 'qkv')
    T, H = q.shape[1], q.shape[3]
    s = jnp.einsum('btnh,bsnh->bnts', q, k, preferred_element_type=jnp.float32) * H**-0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    o = jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(s).astype(x.dtype), v)
    return jnp.einsum('btnh,nhd->btd', o, p['o'])


def loss(model: Mapping[str, Any], params: dict, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of tokens[:, 1:]; tokens is [B, T + 1]."""
    p = jax.tree.map(lambda a: a.astype(model['compute_dtype']), params)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    x = p['embedding'][inputs] + p['position'][: inputs.shape[1]]
    for layer in p['layers']:
        x = x + attention(norm(x, layer['attention_gain']), layer)
        hidden = norm(x, layer['mlp_gain']) @ layer['in']
        x = x + jax.nn.gelu(hidden, approximate=model['activation'] == 'gelu_tanh') @ layer['out']
    x = norm(x, p['gain'])
    logits = jnp.dot(x, p['embedding'].T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def optimizer() -> optax.GradientTransformation:
    matrices = functools.partial(jax.tree.map, lambda a: a.ndim > 1)
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.99, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(config: Mapping[str, Any]) -> Work:
    """Builds the training steps of a run, whose config is JSON: gradients, clipping, AdamW.

    A call makes C = `steps_per_dispatch` steps.
    """
    model = config['model']
    transform = optimizer()
    C = config['train']['steps_per_dispatch']
    B = config['train']['batch_size']
    shape = (C, B, model['context'] + 1)

    def step(state: tuple, tokens: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(functools.partial(loss, model))(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = init(model, jax.random.key(0))
    state = (params, transform.init(params))
    tokens = jnp.asarray(np.random.default_rng(0).integers(model['vocab_size'], size=shape))
    steps = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)

    def run(calls: int) -> None:
        nonlocal state
        for _ in range(calls):
            state, losses = steps(state, tokens)
        jax.block_until_ready((state, losses))

    return Work(run, C)

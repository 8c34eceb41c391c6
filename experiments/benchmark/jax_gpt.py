"""The same language model as a hand-written function of a dictionary of arrays, in plain JAX.

Its attention is two einsums, Flax's MultiHeadDotProductAttention or jax.nn.dot_product_attention.
"""

import functools
import time
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from qkattn.benchmark.shape import Shape
from qkattn.benchmark.work import Work


def init(shape: Shape, key: jax.Array) -> dict[str, Any]:
    D, N, H = shape.width, shape.heads, shape.width // shape.heads
    sizes: dict[str, tuple[int, ...]] = {
        'q': (D, N, H),
        'k': (D, N, H),
        'v': (D, N, H),
        'o': (N, H, D),
    }
    sizes |= {'in': (D, 4 * D), 'out': (4 * D, D)}

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(sizes))
        drawn = {
            n: 0.02 * jax.random.normal(k, s) for k, (n, s) in zip(keys, sizes.items(), strict=True)
        }
        return drawn | {'attention_gain': jnp.ones(D), 'mlp_gain': jnp.ones(D)}

    embedding, position, *keys = jax.random.split(key, 2 + shape.layers)
    return {
        'embedding': 0.02 * jax.random.normal(embedding, (shape.vocabulary, D)),
        'position': 0.02 * jax.random.normal(position, (shape.context, D)),
        'layers': [layer(key) for key in keys],
        'gain': jnp.ones(D),
    }


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def einsum(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (jnp.einsum('btd,dnh->btnh', x, p[name]) for name in 'qkv')
    T, H = q.shape[1], q.shape[3]
    s = jnp.einsum('btnh,bsnh->bnts', q, k, preferred_element_type=jnp.float32) * H**-0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    o = jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(s).astype(x.dtype), v)
    return jnp.einsum('btnh,nhd->btd', o, p['o'])


def dot_product(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (jnp.einsum('btd,dnh->btnh', x, p[name]) for name in 'qkv')
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum('btnh,nhd->btd', o, p['o'])


def flax_mha(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    N, D = p['o'].shape[0], p['o'].shape[2]
    layer = flax.linen.MultiHeadDotProductAttention(
        N, qkv_features=D, use_bias=False, dtype=x.dtype
    )
    names = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}
    params = {name: {'kernel': p[own]} for name, own in names.items()}
    return layer.apply({'params': params}, x, mask=flax.linen.make_causal_mask(x[..., 0]))


ATTENTIONS = {'einsum': einsum, 'flax': flax_mha, 'dot_product': dot_product}


def loss(shape: Shape, attention: str, params: dict, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of tokens[:, 1:]; tokens is [B, T + 1]."""
    p = jax.tree.map(lambda a: a.astype(shape.dtype), params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = p['embedding'][inputs] + p['position'][: inputs.shape[1]]
    for layer in p['layers']:
        x = x + ATTENTIONS[attention](norm(x, layer['attention_gain']), layer)
        hidden = norm(x, layer['mlp_gain']) @ layer['in']
        x = x + jax.nn.gelu(hidden, approximate=shape.gelu == 'tanh') @ layer['out']
    x = norm(x, p['gain'])
    logits = jnp.dot(x, p['embedding'].T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def optimizer() -> optax.GradientTransformation:
    matrices = functools.partial(jax.tree.map, lambda a: a.ndim > 1)
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.99, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(
    shape: dict[str, Any], attention: str = 'einsum', steps_per_dispatch: int | None = None
) -> Work:
    """Training steps: forward, backward, clipping, AdamW."""
    sizes, transform = Shape(**shape), optimizer()
    B, T, C = sizes.batch, sizes.context, steps_per_dispatch or sizes.dispatch

    def step(state: tuple, tokens: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(functools.partial(loss, sizes, attention))(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = init(sizes, jax.random.key(0))
    state = (params, transform.init(params))
    tokens = jnp.asarray(np.random.default_rng(0).integers(sizes.vocabulary, size=(C, B, T + 1)))
    steps = jax.jit(lambda state, tokens: jax.lax.scan(step, state, tokens), donate_argnums=0)
    if C == 1:
        steps = jax.jit(lambda state, tokens: step(state, tokens[0]), donate_argnums=0)
    start = time.perf_counter()
    compiled = steps.lower(state, tokens).compile()
    compile_seconds = time.perf_counter() - start

    def run(calls: int) -> None:
        nonlocal state
        for _ in range(calls):
            state, losses = compiled(state, tokens)
        jax.block_until_ready((state, losses))

    count = sum(a.size for a in jax.tree.leaves(params))
    return Work(run, C, {'parameters': count, 'compile_seconds': compile_seconds})

"""What the attention layers of a model read and compute for a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.analysis.patterns import Pattern
from qkattn.attention import Attention, Cache, Mask
from qkattn.attention.normalizers import Normalizer
from qkattn.attention.registry import find_normalizer
from qkattn.attention.scores.score import Score
from qkattn.attention.values.value import Value
from qkattn.model.stack import layer_of
from qkattn.model.transformer import Stream, Transformer

# (site, layer, attention, x_BTD, mask, y_BSD or None in self-attention), called at every layer.
Visit = Callable[[str, int, Attention, jax.Array, Mask, jax.Array | None], None]
Inputs = Mapping[str, Any]


def streams(model: Transformer) -> dict[str, Stream]:
    """The stacks of layers of a model by the beginning of their sites' names: '' or 'encoder/'."""
    encoder = getattr(model, 'encoder', None)
    return {'': model} | ({} if encoder is None else {'encoder/': encoder})


def sites(model: Transformer) -> dict[str, list[Attention]]:
    """All attention layers, first to last: 'attention', 'cross_attention', 'encoder/attention'."""
    found: dict[str, list[Attention]] = {}
    for prefix, stream in streams(model).items():
        block = layer_of(stream.blocks, 0)
        for name, part in vars(block).items():
            if isinstance(part, Attention):
                found[prefix + name] = stream.layers(name)
    return found


def walk(model: Transformer, inputs: Inputs, visit: Visit) -> jax.Array:
    """`model.stream(**inputs)`, layer by layer, with a call of `visit` at every attention layer."""
    watched = jax.tree.map(lambda leaf: leaf, model)
    for prefix, stream in streams(watched).items():
        stream.run = functools.partial(_run, stream, prefix, visit)  # type: ignore[method-assign]
    return watched.stream(**inputs)


def see(
    attention: Attention, x_BTD: jax.Array, mask: Mask, y_BSD: jax.Array | None = None
) -> Pattern:
    """What one layer computes, by the layer's own code: with values that tell keys apart."""
    length = (x_BTD if y_BSD is None else y_BSD).shape[1]
    if attention.score.hides_self and y_BSD is None:
        mask = dataclasses.replace(mask, hides_self=True)
    mask_BTS = mask.dense(x_BTD.shape[1], length)
    normalizer = find_normalizer(attention.spec.normalizer)
    seen = jax.tree.map(lambda leaf: leaf, attention)
    name = f'{__name__}:{Logits.__name__}'
    seen.spec = dataclasses.replace(attention.spec, kernel='einsum', normalizer=name)
    seen.value = _Keys(length)
    s_BNTS, mask_B1TS = jnp.swapaxes(seen(x_BTD, mask, y_BSD=y_BSD), 1, 2), mask_BTS[:, None]
    masked_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(s_BNTS.dtype).min / 2)
    p_BNTS = normalizer(masked_BNTS, mask_B1TS)
    return Pattern(s_BNTS, jnp.where(mask_B1TS, p_BNTS, 0), mask_BTS)


class Logits(Normalizer):
    """The logits themselves, 0 at masked keys."""

    source = 'none: what a normalizer is given'
    simplex = False

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        return jnp.where(mask_B1TS, s_BNTS, 0)


class _Keys(Value):
    """Value s is unit vector number s, so that the mix of values is the probabilities."""

    def __init__(self, length: int):
        self.length = length

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        S, rows = self.length, jax.tree.leaves(cache)[0].shape[0]
        return jnp.broadcast_to(jnp.eye(S)[:, None], (rows, S, 1, S))

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        return o_BTNH


def _run(
    stream: Stream,
    prefix: str,
    visit: Visit,
    x_BTD: jax.Array,
    mask: Mask,
    dropout_key: None = None,
    **shared: Any,
) -> jax.Array:
    for index in range(stream.config.num_layers):
        block = layer_of(stream.blocks, index)
        for name, part in list(vars(block).items()):
            if isinstance(part, Attention):
                setattr(block, name, _watched(part, functools.partial(visit, prefix + name, index)))
        x_BTD = block(x_BTD, mask, **shared)
    return stream.normed(x_BTD)


def _watched(attention: Attention, visit: Callable[..., None]) -> Callable[..., jax.Array]:
    def attend(
        x_BTD: jax.Array, mask: Mask, *, y_BSD: jax.Array | None = None, **dropout: Any
    ) -> jax.Array:
        visit(attention, x_BTD, mask, y_BSD)
        return attention(x_BTD, mask, y_BSD=y_BSD, **dropout)

    return attend


def attention_patterns(model: Transformer, inputs: Inputs) -> dict[tuple[str, int], Pattern]:
    """The pattern of every attention layer by site and layer, in the order of computation."""
    found: dict[tuple[str, int], Pattern] = {}

    def visit(site: str, layer: int, attention: Attention, *read: Any) -> None:
        found[site, layer] = see(attention, *read)

    walk(model, inputs, visit)
    return found

"""Attention patterns: what the layers of a model compute for a batch, and quantities of it.

A quantity is a function from a `Pattern` to one number a head [N]. Means are over the queries of
all rows that may attend to the key in question, or to any key; NaN where there is no such query.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import entr

from qkattn.attention import Attention, Cache, Mask
from qkattn.attention.normalizers import Normalizer
from qkattn.attention.registry import find_normalizer
from qkattn.attention.scores.score import Score
from qkattn.attention.values.value import Value
from qkattn.model.stack import layer_of
from qkattn.model.transformer import Stream, Transformer

# (site, layer, attention, x_BTD, mask, y_BSD or None in self-attention), called at every layer.
Visit = Callable[[str, int, Attention, jax.Array, Mask, jax.Array | None], None]


class Pattern(NamedTuple):
    """What an attention layer computes for one batch."""

    logits_BNTS: jax.Array  # after scale, cap and position biases; 0 at masked keys
    probabilities_BNTS: jax.Array  # of the normalizer, before a Value mixes heads; 0 at masked keys
    mask_BTS: jax.Array  # True where a query may attend to a key; B may be 1


def entropy(pattern: Pattern) -> jax.Array:
    """-sum_s p log p of p / sum_s p, nats: 0 where one key has all, log S where all S are equal."""
    total_BNT1 = pattern.probabilities_BNTS.sum(-1, keepdims=True)
    p_BNTS = pattern.probabilities_BNTS / jnp.where(total_BNT1 > 0, total_BNT1, 1)
    return _mean(entr(p_BNTS).sum(-1), pattern.mask_BTS.any(-1))


def diagonal_mass(pattern: Pattern) -> jax.Array:
    """Mean of p[t, t], the probability with which a token attends to itself; 0 where it may not."""
    p_BNT = jnp.diagonal(pattern.probabilities_BNTS, axis1=-2, axis2=-1)
    return _mean(p_BNT, pattern.mask_BTS.any(-1))


def previous_token_mass(pattern: Pattern) -> jax.Array:
    """Mean of p[t, t - 1]; in a previous-token head it is near 1 (Olsson et al. 2022)."""
    return _shifted_mass(pattern, 1)


def logit_deviation(pattern: Pattern) -> jax.Array:
    """Standard deviation of the logits of a query over its visible keys, nats.

    The root of the mean variance. What is added to all logits of a query, softmax ignores.
    """
    mask_B1TS = pattern.mask_BTS[:, None]
    count_B1T1 = jnp.maximum(mask_B1TS.sum(-1, keepdims=True), 1)
    s_BNTS = jnp.where(mask_B1TS, pattern.logits_BNTS, 0)
    s_BNTS = s_BNTS - s_BNTS.sum(-1, keepdims=True) / count_B1T1
    variance_BNT = (jnp.where(mask_B1TS, s_BNTS, 0) ** 2).sum(-1) / count_B1T1[..., 0]
    return jnp.sqrt(_mean(variance_BNT, pattern.mask_BTS.any(-1)))


def largest_logit(pattern: Pattern) -> jax.Array:
    """max |logit| over visible keys, nats."""
    s_BNTS = jnp.where(pattern.mask_BTS[:, None], jnp.abs(pattern.logits_BNTS), 0)
    return s_BNTS.max((0, 2, 3))


def induction_score(pattern: Pattern, period: int) -> jax.Array:
    """Mean of p[t, t - period + 1] over t >= period, of tokens that repeat after `period`.

    The key is the token that followed the previous occurrence of token t, which an induction head
    attends to (Olsson et al. 2022: prefix matching). Attention that is equal over S keys has 1 / S.
    """
    return _shifted_mass(Pattern(*(a[..., period:, :] for a in pattern)), -1)


def _shifted_mass(pattern: Pattern, distance: int) -> jax.Array:
    """Mean of p[t, t - distance] over the rows of the pattern."""
    T, S = pattern.probabilities_BNTS.shape[-2:]
    t_T, s_T = jnp.arange(T), jnp.arange(T) - distance
    visible_BT = pattern.mask_BTS[:, t_T, jnp.clip(s_T, 0, S - 1)] & (s_T >= 0) & (s_T < S)
    return _mean(pattern.probabilities_BNTS[..., t_T, jnp.clip(s_T, 0, S - 1)], visible_BT)


def _mean(value_BNT: jax.Array, visible_BT: jax.Array) -> jax.Array:
    """Mean over rows and those queries that are visible; NaN without any."""
    weight_B1T = jnp.broadcast_to(visible_BT[:, None], value_BNT[:, :1].shape)
    return (value_BNT * weight_B1T).sum((0, 2)) / weight_B1T.sum()


def pattern_quantities(site: str) -> dict[str, Callable[[Pattern], jax.Array]]:
    """What is measured of every head at a site; some where t and s count one sequence alone."""
    functions = [entropy, logit_deviation, largest_logit]
    if not site.endswith('cross_attention'):
        functions += [diagonal_mass, previous_token_mass]
    return {function.__name__: function for function in functions}


def sites(model: Transformer) -> dict[str, list[Attention]]:
    """All attention layers, first to last: 'attention', 'cross_attention', 'encoder/attention'."""
    return {
        prefix + name: stream.layers(name)
        for prefix, stream in streams(model).items()
        for name, part in vars(layer_of(stream.blocks, 0)).items()
        if isinstance(part, Attention)
    }


def attention_patterns(
    model: Transformer, inputs: Mapping[str, Any]
) -> dict[tuple[str, int], Pattern]:
    """The pattern of every attention layer by site and layer, in the order of computation."""
    read: dict[tuple[str, int], tuple] = {}
    walk(model, inputs, lambda site, layer, *rest: read.update({(site, layer): rest}))
    return {place: pattern_of(*rest) for place, rest in read.items()}


def walk(model: Transformer, inputs: Mapping[str, Any], visit: Visit) -> jax.Array:
    """`model.stream(**inputs)`, layer by layer, with a call of `visit` at every attention layer."""
    watched = jax.tree.map(lambda leaf: leaf, model)
    for prefix, stream in streams(watched).items():
        stream.run = functools.partial(_run, stream, prefix, visit)  # type: ignore[method-assign]
    return watched.stream(**inputs)


def pattern_of(
    attention: Attention, x_BTD: jax.Array, mask: Mask, y_BSD: jax.Array | None = None
) -> Pattern:
    """What one layer computes, by the layer's own code: with values that tell keys apart."""
    length = (x_BTD if y_BSD is None else y_BSD).shape[1]
    if attention.score.hides_self and y_BSD is None:
        mask = dataclasses.replace(mask, hides_self=True)
    mask_BTS = mask.dense(x_BTD.shape[1], length)
    normalizer = find_normalizer(attention.spec.normalizer)
    watched = jax.tree.map(lambda leaf: leaf, attention)
    name = f'{__name__}:{Logits.__name__}'
    watched.spec = dataclasses.replace(attention.spec, kernel='einsum', normalizer=name)
    watched.value = _Keys(length)
    s_BNTS, mask_B1TS = jnp.swapaxes(watched(x_BTD, mask, y_BSD=y_BSD), 1, 2), mask_BTS[:, None]
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


def streams(model: Transformer) -> dict[str, Stream]:
    """The stacks of layers of a model by the beginning of their sites' names: '' or 'encoder/'."""
    encoder = getattr(model, 'encoder', None)
    return {'': model} | ({} if encoder is None else {'encoder/': encoder})


def _run(
    stream: Stream, prefix: str, visit: Visit, x_BTD: Any, mask: Any, _: None = None, **shared: Any
) -> jax.Array:
    """`Stream.run` without dropout, with a call of `visit` before every attention layer."""

    def attend(
        watched: tuple[str, int, Attention], x_BTD: Any, mask: Any, *, y_BSD: Any = None, **key: Any
    ) -> jax.Array:
        visit(*watched, x_BTD, mask, y_BSD)
        return watched[2](x_BTD, mask, y_BSD=y_BSD, **key)

    for index in range(stream.config.num_layers):
        block = layer_of(stream.blocks, index)
        for name, part in list(vars(block).items()):
            if isinstance(part, Attention):
                setattr(block, name, functools.partial(attend, (prefix + name, index, part)))
        x_BTD = block(x_BTD, mask, **shared)
    return stream.normed(x_BTD)

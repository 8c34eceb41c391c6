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
from qkattn.model.transformer import EncoderDecoder, Stream, Transformer

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
    later = Pattern(
        logits_BNTS=pattern.logits_BNTS[..., period:, :],
        probabilities_BNTS=pattern.probabilities_BNTS[..., period:, :],
        mask_BTS=pattern.mask_BTS[..., period:, :],
    )
    # Row t of `later` is query t + period, so the key t + 1 is at distance -1 from its row.
    return _shifted_mass(later, -1)


def _shifted_mass(pattern: Pattern, distance: int) -> jax.Array:
    """Mean of p[t, t - distance] over the rows of the pattern."""
    T, S = pattern.probabilities_BNTS.shape[-2:]
    t_T = jnp.arange(T)
    s_T = t_T - distance
    exists_T = (s_T >= 0) & (s_T < S)
    s_T = jnp.clip(s_T, 0, S - 1)
    visible_BT = pattern.mask_BTS[:, t_T, s_T] & exists_T
    return _mean(pattern.probabilities_BNTS[..., t_T, s_T], visible_BT)


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
    layers = {}
    for prefix, stream in streams(model).items():
        for name, part in vars(layer_of(stream.blocks, 0)).items():
            if isinstance(part, Attention):
                layers[prefix + name] = stream.layers(name)
    return layers


def attention_patterns(
    model: Transformer, inputs: Mapping[str, Any]
) -> dict[tuple[str, int], Pattern]:
    """The pattern of every attention layer by site and layer, in the order of computation."""
    patterns: dict[tuple[str, int], Pattern] = {}

    def measure(
        site: str,
        layer: int,
        attention: Attention,
        x_BTD: jax.Array,
        mask: Mask,
        y_BSD: jax.Array | None,
    ) -> None:
        patterns[site, layer] = pattern_of(attention, x_BTD, mask, y_BSD)

    walk(model, inputs, measure)
    return patterns


def walk(model: Transformer, inputs: Mapping[str, Any], visit: Visit) -> jax.Array:
    """`model.stream(**inputs)`, layer by layer, with a call of `visit` at every attention layer."""
    # A copy of the modules, whose streams run their layers one by one in place of a scan.
    copy = jax.tree.map(lambda leaf: leaf, model)
    for prefix, stream in streams(copy).items():
        stream.run = functools.partial(_run, stream, prefix, visit)  # type: ignore[method-assign]
    return copy.stream(**inputs)


def pattern_of(
    attention: Attention, x_BTD: jax.Array, mask: Mask, y_BSD: jax.Array | None = None
) -> Pattern:
    """The pattern of one layer for x, or for x and y in cross-attention.

    The layer's own code computes the logits: in a copy of the layer with `Logits` as normalizer and
    unit vectors as values, the average of the values is the logits.
    """
    T = x_BTD.shape[1]
    S = T if y_BSD is None else y_BSD.shape[1]
    if attention.score.hides_self and y_BSD is None:
        mask = dataclasses.replace(mask, hides_self=True)
    mask_BTS = mask.dense(T, S)
    mask_B1TS = mask_BTS[:, None]
    copy = jax.tree.map(lambda leaf: leaf, attention)
    logits_name = f'{__name__}:{Logits.__name__}'
    copy.spec = dataclasses.replace(attention.spec, kernel='einsum', normalizer=logits_name)
    copy.value = _UnitValues(S)
    s_BNTS = jnp.swapaxes(copy(x_BTD, mask, y_BSD=y_BSD), 1, 2)
    masked_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(s_BNTS.dtype).min / 2)
    normalizer = find_normalizer(attention.spec.normalizer)
    p_BNTS = normalizer(masked_BNTS, mask_B1TS)
    return Pattern(s_BNTS, jnp.where(mask_B1TS, p_BNTS, 0), mask_BTS)


class Logits(Normalizer):
    """The logits in place of probabilities, 0 at masked keys."""

    source = 'none: what a normalizer is given'
    simplex = False

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        return jnp.where(mask_B1TS, s_BNTS, 0)


class _UnitValues(Value):
    """The value of key s is unit vector s: the average of a query is its row of probabilities."""

    def __init__(self, num_keys: int):
        self.num_keys = num_keys

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        B = jax.tree.leaves(cache)[0].shape[0]
        S = self.num_keys
        return jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, 1, S))

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        return o_BTNH


def streams(model: Transformer) -> dict[str, Stream]:
    """The stacks of layers of a model by the beginning of their sites' names: '' or 'encoder/'."""
    if isinstance(model, EncoderDecoder):
        return {'': model, 'encoder/': model.encoder}
    return {'': model}


def _run(
    stream: Stream,
    prefix: str,
    visit: Visit,
    x_BTD: jax.Array,
    mask: Mask,
    dropout_key: None = None,
    **shared: Any,
) -> jax.Array:
    """`Stream.run` without dropout, with a call of `visit` before every attention layer."""
    for index in range(stream.config.num_layers):
        block = layer_of(stream.blocks, index)
        for name, part in list(vars(block).items()):
            if isinstance(part, Attention):
                setattr(block, name, _visited(part, prefix + name, index, visit))
        x_BTD = block(x_BTD, mask, **shared)
    return stream.normed(x_BTD)


def _visited(attention: Attention, site: str, layer: int, visit: Visit) -> Callable[..., jax.Array]:
    """The attention as a function that calls `visit` with what it reads."""

    def attend(
        x_BTD: jax.Array, mask: Mask, *, y_BSD: jax.Array | None = None, **dropout: Any
    ) -> jax.Array:
        visit(site, layer, attention, x_BTD, mask, y_BSD)
        return attention(x_BTD, mask, y_BSD=y_BSD, **dropout)

    return attend

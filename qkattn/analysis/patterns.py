"""Attention patterns: a model's logits and probabilities for a batch, and quantities of them.

A quantity maps a `Pattern` to one number per head, [N]. A mean is over the queries of all rows.
Queries without a visible key do not count. The mean of no queries is NaN.
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

# A callback visit(site, layer, attention, x_BTD, mask, y_BSD). The site is, for example,
# 'encoder/attention', and `layer` the index of the layer at this site, from 0. The last three are
# the inputs of `attention`; y_BSD is None in self-attention.
Visit = Callable[[str, int, Attention, jax.Array, Mask, jax.Array | None], None]


class Pattern(NamedTuple):
    """The logits and probabilities of an attention layer, for T queries, S keys and N heads."""

    logits_BNTS: jax.Array  # after scale, cap and position biases; 0 at masked keys
    probabilities_BNTS: jax.Array  # after the normalizer; 0 at masked keys
    mask_BTS: jax.Array  # True where a query may attend to a key; B may be 1


def entropy(pattern: Pattern) -> jax.Array:
    """Mean entropy -sum_s p log p in nats, where p is normalized to sum to 1.

    The entropy is 0 if one key has all the probability, and log S for S equal keys.
    """
    total_BNT1 = pattern.probabilities_BNTS.sum(-1, keepdims=True)  # 0 without a visible key
    p_BNTS = pattern.probabilities_BNTS / jnp.where(total_BNT1 > 0, total_BNT1, 1)
    entropy_BNT = entr(p_BNTS).sum(-1)
    return _mean(entropy_BNT, pattern.mask_BTS.any(-1))


def diagonal_mass(pattern: Pattern) -> jax.Array:
    """Mean of p[t, t], the probability with which a token attends to itself (0 if masked)."""
    p_BNT = jnp.diagonal(pattern.probabilities_BNTS, axis1=-2, axis2=-1)
    return _mean(p_BNT, pattern.mask_BTS.any(-1))


def previous_token_mass(pattern: Pattern) -> jax.Array:
    """Mean of p[t, t - 1], which is near 1 in a previous-token head (Olsson et al. 2022)."""
    return _mass_at_distance(pattern, distance=1)


def logit_deviation(pattern: Pattern) -> jax.Array:
    """Standard deviation of a query's logits over its visible keys, in nats.

    Each query has its own mean and variance. The result per head is the square root of the mean
    variance.
    """
    mask_B1TS = pattern.mask_BTS[:, None]
    num_visible_B1T = jnp.maximum(mask_B1TS.sum(-1), 1)  # at least 1, to avoid 0 / 0
    s_BNTS = jnp.where(mask_B1TS, pattern.logits_BNTS, 0)
    mean_BNT = s_BNTS.sum(-1) / num_visible_B1T
    deviation_BNTS = jnp.where(mask_B1TS, s_BNTS - mean_BNT[..., None], 0)
    variance_BNT = (deviation_BNTS**2).sum(-1) / num_visible_B1T

    has_visible_key_BT = pattern.mask_BTS.any(-1)
    mean_variance_N = _mean(variance_BNT, has_visible_key_BT)
    return jnp.sqrt(mean_variance_N)


def largest_logit(pattern: Pattern) -> jax.Array:
    """The largest |logit| of any query and visible key, in nats."""
    s_BNTS = jnp.where(pattern.mask_BTS[:, None], jnp.abs(pattern.logits_BNTS), 0)
    return s_BNTS.max((0, 2, 3))


def induction_score(pattern: Pattern, period: int) -> jax.Array:
    """Mean of p[t, t - period + 1] over t >= period, for tokens that repeat with this period.

    The key is the token after the previous occurrence of token t. The score is near 1 for an
    induction head (Olsson et al. 2022, "prefix matching"), and 1 / S for uniform attention to S
    keys.
    """
    return _mass_at_distance(pattern, distance=period - 1, first_query=period)


def _mass_at_distance(pattern: Pattern, distance: int, first_query: int = 0) -> jax.Array:
    """Mean of p[t, t - distance] over queries t >= first_query whose key exists and is visible."""
    T = pattern.probabilities_BNTS.shape[-2]
    t_T = jnp.arange(first_query, T)
    s_T = t_T - distance
    exists_T = s_T >= 0
    s_T = jnp.maximum(s_T, 0)  # a negative index would count from the end
    visible_BT = pattern.mask_BTS[:, t_T, s_T] & exists_T
    p_BNT = pattern.probabilities_BNTS[..., t_T, s_T]
    return _mean(p_BNT, visible_BT)


def _mean(value_BNT: jax.Array, counted_BT: jax.Array) -> jax.Array:
    """Mean [N] over the rows and queries where counted_BT is True; NaN if there are none.

    Axis B of counted_BT may be 1.
    """
    B, _, T = value_BNT.shape
    weight_B1T = jnp.broadcast_to(counted_BT[:, None], (B, 1, T))
    return (value_BNT * weight_B1T).sum((0, 2)) / weight_B1T.sum()


def pattern_quantities(site: str) -> dict[str, Callable[[Pattern], jax.Array]]:
    """Returns the quantities that are measured at a site, by name.

    Quantities that compare the positions of query and key are not for cross-attention.
    """
    functions = [entropy, logit_deviation, largest_logit]
    if not site.endswith('cross_attention'):
        functions += [diagonal_mass, previous_token_mass]
    return {function.__name__: function for function in functions}


def sites(model: Transformer) -> dict[str, list[Attention]]:
    """Returns the attention layers of a model, in order, by site.

    The sites are 'attention', and in an encoder-decoder also 'cross_attention' and
    'encoder/attention'.
    """
    layers_by_site = {}
    for prefix, stream in streams(model).items():
        # All blocks of a stream have the same attributes, such as `attention` and `mlp`.
        first_block = layer_of(stream.blocks, 0)
        for name, attribute in vars(first_block).items():
            if isinstance(attribute, Attention):
                site = f'{prefix}{name}'
                layers_by_site[site] = stream.layers(name)  # this attribute of every block
    return layers_by_site


def attention_patterns(
    model: Transformer, inputs: Mapping[str, Any]
) -> dict[tuple[str, int], Pattern]:
    """Runs a model, and returns the `Pattern` of every attention layer by (site, layer)."""
    patterns: dict[tuple[str, int], Pattern] = {}

    def store_pattern(
        site: str,
        layer: int,
        attention: Attention,
        x_BTD: jax.Array,
        mask: Mask,
        y_BSD: jax.Array | None,
    ) -> None:
        patterns[site, layer] = pattern_of(attention, x_BTD, mask, y_BSD)

    walk(model, inputs, store_pattern)
    return patterns


def walk(model: Transformer, inputs: Mapping[str, Any], visit: Visit) -> jax.Array:
    """Computes `model.stream(**inputs)`, and calls `visit` at every attention layer."""
    # The model scans over its layers, and traces only one. The copy loops over the layers instead.
    copy = jax.tree.map(lambda leaf: leaf, model)
    for prefix, stream in streams(copy).items():
        run = functools.partial(_run_with_visits, stream, prefix, visit)
        stream.run = run  # type: ignore[method-assign]
    return copy.stream(**inputs)


def pattern_of(
    attention: Attention, x_BTD: jax.Array, mask: Mask, y_BSD: jax.Array | None = None
) -> Pattern:
    """Returns the logits and probabilities of one layer for x, in cross-attention for x and y.

    The layer returns only out[t] = sum_s p[t, s] v[s]. So the logits are computed by a copy of the
    layer, without normalizer, where v[s] is the s-th unit vector. Then out[t] has the logits of
    query t.
    """
    T = x_BTD.shape[1]
    S = T if y_BSD is None else y_BSD.shape[1]

    copy = jax.tree.map(lambda leaf: leaf, attention)
    copy.value = _UnitValues(S)
    no_normalizer = f'{__name__}:{Logits.__name__}'  # an import path, as a spec requires
    copy.spec = dataclasses.replace(attention.spec, kernel='einsum', normalizer=no_normalizer)
    s_BTNS = copy(x_BTD, mask, y_BSD=y_BSD)
    s_BNTS = jnp.swapaxes(s_BTNS, 1, 2)

    # With hides_self, a query attends to itself only if it may attend to nothing else. The layer
    # sets hides_self in its mask, and so does this function.
    is_self_attention = y_BSD is None
    if is_self_attention and attention.score.hides_self:
        mask = dataclasses.replace(mask, hides_self=True)

    # As in the kernel `einsum`.
    mask_BTS = mask.dense(T, S)
    mask_B1TS = mask_BTS[:, None]
    masked_s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(s_BNTS.dtype).min / 2)
    normalizer = find_normalizer(attention.spec.normalizer)
    p_BNTS = normalizer(masked_s_BNTS, mask_B1TS)
    p_BNTS = jnp.where(mask_B1TS, p_BNTS, 0)
    return Pattern(s_BNTS, p_BNTS, mask_BTS)


class Logits(Normalizer):
    """Returns the logits in place of probabilities, and 0 at masked keys."""

    source = 'none: the logits themselves'
    simplex = False

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        return jnp.where(mask_B1TS, s_BNTS, 0)


class _UnitValues(Value):
    """Values v[s] that are unit vectors, so that the output of query t is p[t]."""

    def __init__(self, num_keys: int):
        self.num_keys = num_keys

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        any_array = jax.tree.leaves(cache)[0]  # of the score, as `cached` adds none
        B = any_array.shape[0]
        S = self.num_keys
        unit_vectors_S1S = jnp.eye(S)[:, None]
        return jnp.broadcast_to(unit_vectors_S1S, (B, S, 1, S))

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        return o_BTNH


def streams(model: Transformer) -> dict[str, Stream]:
    """Returns the residual streams of a model by the prefix of their sites, '' or 'encoder/'."""
    if isinstance(model, EncoderDecoder):
        return {'': model, 'encoder/': model.encoder}
    return {'': model}


def _run_with_visits(
    stream: Stream,
    prefix: str,
    visit: Visit,
    x_BTD: jax.Array,
    mask: Mask,
    dropout_key: None = None,
    **shared: Any,
) -> jax.Array:
    """Replaces `Stream.run` by a loop that calls `visit` at every attention layer.

    Args:
        stream: The stream whose blocks are run.
        prefix: The beginning of its sites, '' or 'encoder/'.
        visit: The callback.
        x_BTD: The input of the first block.
        mask: The mask of self-attention.
        dropout_key: Must be None.
        **shared: Further inputs of every block, such as the encoder's output.
    """
    for layer in range(stream.config.num_layers):
        block = layer_of(stream.blocks, layer)  # a copy
        attributes = list(vars(block).items())  # a list, because the loop sets attributes
        for name, attribute in attributes:
            if isinstance(attribute, Attention):
                site = f'{prefix}{name}'
                setattr(block, name, _with_visit(attribute, site, layer, visit))
        x_BTD = block(x_BTD, mask, **shared)
    return stream.normed(x_BTD)  # the final norm, if the model has one


def _with_visit(
    attention: Attention, site: str, layer: int, visit: Visit
) -> Callable[..., jax.Array]:
    """Returns a function that calls `visit`, and then the attention layer."""

    def attend(
        x_BTD: jax.Array, mask: Mask, *, y_BSD: jax.Array | None = None, **dropout: Any
    ) -> jax.Array:
        visit(site, layer, attention, x_BTD, mask, y_BSD)
        return attention(x_BTD, mask, y_BSD=y_BSD, **dropout)

    return attend

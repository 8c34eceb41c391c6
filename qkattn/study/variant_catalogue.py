"""The catalogue of Scores and Values: declarations, and what real layers cache.

`experiments.variants --measure` stores it as JSON, which that command and reports read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.attention import SCORES, VALUES, Attention, AttentionSpec
from qkattn.config import ModelConfig
from qkattn.config.calls import options_of
from qkattn.model.sites import attention_spec

# A power of two, N H = D, an even head size: a size at which every Score and Value can be built.
REFERENCE = ModelConfig(d_model=64, num_layers=1, num_heads=4, context=128)


def measured() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the description of every registered Score and Value, by kind and name."""
    scores = {name: describe_circuit(name, 'vo') for name in SCORES}
    values = {name: describe_circuit(cls.partner, name, 'value') for name, cls in VALUES.items()}
    return {'Score': scores, 'Value': values}


def documented_variants() -> list[tuple[str, str]]:
    """Returns pairs (score, value): every Score with `vo`, then every Value with its partner."""
    variants = [(score, 'vo') for score in SCORES]
    variants += [(cls.partner, value) for value, cls in VALUES.items()]
    return list(dict.fromkeys(variants))


def reference_spec(score: str, value: str) -> AttentionSpec:
    """Returns the attention layer of this variant at the reference size."""
    return attention_spec(dataclasses.replace(REFERENCE, score=score, value=value))


def describe_circuit(score: str, value: str, circuit: str = 'score') -> dict[str, Any]:
    """Describes the Score of a variant (circuit 'score') or its Value (circuit 'value').

    Returns:
        A dictionary with the keys

        - equation: the equation of A[n] or B[n];
        - options: the keyword arguments of the class, with their defaults;
        - parameters: the number of parameters in letters, such as `D*N*H`;
        - cache: the floats cached for each token in letters, such as `K*H`. For a Value, only
          those that its Score does not cache;
        - rope: whether rotary positions may be used;
        - source: where the form comes from.
    """
    spec = reference_spec(score, value)
    # Only shapes are needed, so eval_shape traces the layer and its cache without computing them.
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    y_BSD = jax.ShapeDtypeStruct((1, 1, spec.d_model), jnp.float32)
    cache_of_score = jax.eval_shape(lambda layer, y: layer.score.cached(y), layer, y_BSD)
    cache_of_layer = jax.eval_shape(lambda layer, y: layer.cached(y), layer, y_BSD)

    # A cache is a dict of arrays by name, such as {'k_BSKH': ..., 'v_BSKH': ...}.
    cached_by_score = list(cache_of_score)
    cached_by_value = [name for name in cache_of_layer if name not in cache_of_score]
    cached_names = cached_by_score if circuit == 'score' else cached_by_value

    # The axes after B and S are the floats of one token: 'k_BSKH' -> 'K*H'.
    sizes: list[str] = []
    for name in cached_names:
        letters = name.rpartition('_BS')[2]
        sizes.append('*'.join(letters))
    cls = SCORES[score] if circuit == 'score' else VALUES[value]
    return {
        'equation': cls.equation,
        'options': options_of(cls),
        'parameters': getattr(layer, circuit).parameter_count,
        'cache': ' + '.join(sizes) or '0',
        'rope': SCORES[score].supports_rope,
        'source': cls.source,
    }

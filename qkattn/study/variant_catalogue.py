"""The catalogue of Scores and Values: their equations, options, parameters and caches.

`experiments.variants --measure` stores the catalogue as JSON.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.attention import SCORES, VALUES, Attention, AttentionSpec
from qkattn.config import ModelConfig
from qkattn.config.calls import options_of
from qkattn.model.sites import attention_spec

# A size at which every Score and Value can be built.
REFERENCE = ModelConfig(d_model=64, num_layers=1, num_heads=4, context=128)


def measured() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the description of every registered Score and Value, by kind and name.

    For example, {'Score': {'qk': ..., ...}, 'Value': {'vo': ..., ...}}. Each Score is described
    beside the Value 'vo', and each Value beside its `partner`, a Score.
    """
    scores = {name: describe_circuit(name, 'vo') for name in SCORES}
    values = {name: describe_circuit(cls.partner, name, 'value') for name, cls in VALUES.items()}
    return {'Score': scores, 'Value': values}


def documented_variants() -> list[tuple[str, str]]:
    """Returns pairs (score, value) in which every Score and every Value appears."""
    variants = [(score, 'vo') for score in SCORES]
    variants += [(cls.partner, value) for value, cls in VALUES.items()]
    return list(dict.fromkeys(variants))  # without duplicates


def reference_spec(score: str, value: str) -> AttentionSpec:
    """Returns the spec of a variant at the size REFERENCE."""
    return attention_spec(dataclasses.replace(REFERENCE, score=score, value=value))


def describe_circuit(score: str, value: str, circuit: str = 'score') -> dict[str, Any]:
    """Describes the Score of a variant (circuit 'score') or its Value (circuit 'value').

    Returns:
        A dict with these keys:

        - equation: The equation of A[n] or B[n].
        - options: The keyword arguments of the class, with their defaults.
        - parameters: The number of parameters in axis letters, such as `D*N*H`.
        - cache: The floats cached per token in axis letters, such as `K*H`. A Value does not count
          what its Score caches.
        - rope: Whether the Score supports rotary positions.
        - source: The publication of the form.
    """
    spec = reference_spec(score, value)
    # Trace the layer and its cache without computing any array.
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    y_BSD = jax.ShapeDtypeStruct((1, 1, spec.d_model), jnp.float32)
    score_cache = jax.eval_shape(lambda layer, y: layer.score.cached(y), layer, y_BSD)
    layer_cache = jax.eval_shape(lambda layer, y: layer.cached(y), layer, y_BSD)

    # A cache is a dict of arrays, such as {'k_BSKH': ..., 'v_BSKH': ...}.
    if circuit == 'score':
        array_names = list(score_cache)
    else:
        array_names = [name for name in layer_cache if name not in score_cache]
    circuit_class = SCORES[score] if circuit == 'score' else VALUES[value]
    return {
        'equation': circuit_class.equation,
        'options': options_of(circuit_class),
        'parameters': getattr(layer, circuit).parameter_count,
        'cache': _floats_per_token(array_names),
        'rope': SCORES[score].supports_rope,
        'source': circuit_class.source,
    }


def _floats_per_token(array_names: list[str]) -> str:
    """Returns the size of a cache: ['k_BSKH', 'v_BSKH'] gives 'K*H + K*H', and [] gives '0'."""
    sizes: list[str] = []
    for name in array_names:
        _, _, axes = name.rpartition('_BS')  # 'KH' of 'k_BSKH'
        sizes.append('*'.join(axes))
    return ' + '.join(sizes) or '0'

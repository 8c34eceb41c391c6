"""The catalogue of Scores and Values: declarations, and measurements on real layers.

`experiments.variants --measure` stores it as JSON, which that command and reports read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.attention import SCORES, VALUES, Attention, AttentionSpec, visible
from qkattn.config import ModelConfig
from qkattn.config.calls import options_of
from qkattn.convert.conversions import CONVERSIONS
from qkattn.errors import ConversionError
from qkattn.model import cost
from qkattn.model.sites import attention_spec

# A power of two, N H = D, an even head size: a size at which every Score and Value can be built.
REFERENCE = ModelConfig(d_model=64, num_layers=1, num_heads=4, context=128)


def measured(with_conversions: bool = True) -> dict[str, dict[str, dict[str, Any]]]:
    """Declarations and measurements of every registered Score and Value, by kind and name.

    equation   A[n] or B[n]
    options    keyword arguments of the class with their defaults
    parameters, count    number of parameters in letters, and at the reference size
    flops      of a forward pass of a one-layer model, per token
    cache      floats per token in letters; of a Value, those beyond what its Score caches
    rope       whether rotary positions may be used
    exact      conversions that keep the function, if asked for: a second each
    source     where the form comes from
    """
    pairs = {'Score': {name: (name, 'vo') for name in SCORES}}
    pairs['Value'] = {name: (cls.partner, name) for name, cls in VALUES.items()}
    return {
        kind: {
            name: _entry(*pair, kind == 'Score')
            | ({'exact': exact(conversions(*pair))} if with_conversions else {})
            for name, pair in of_kind.items()
        }
        for kind, of_kind in pairs.items()
    }


def documented_variants() -> list[tuple[str, str]]:
    """Every Score with `vo`, then every Value with its partner."""
    pairs = [(name, 'vo') for name in SCORES]
    return list(dict.fromkeys(pairs + [(cls.partner, name) for name, cls in VALUES.items()]))


def conversion_table() -> str:
    """Measured errors of every conversion of every documented variant."""
    lines = ['largest relative change of the output, float64; - where the conversion is refused']
    for circuit in ('QK', 'OV', 'both'):
        names = [name for name, c in CONVERSIONS.items() if c.circuit == circuit]
        lines.append(f'{circuit}: {", ".join(names)}')
    lines.append('')
    for score, value in documented_variants():
        done = {n: e for n, e in conversions(score, value).items() if isinstance(e, float)}
        words = ', '.join(f'{n} {e:.0e}' for n, e in done.items())
        lines.append(f'{f"{score}/{value}":32s} {words or "-"}')
    return '\n'.join(lines)


def conversions(score: str, value: str) -> dict[str, float | str]:
    """The effect of each conversion on a layer of this variant with random parameters.

    By name of the conversion: the largest relative change of the layer's output, in float64, or the
    message with which the conversion is refused.
    """
    with jax.enable_x64(True):
        spec = reference_spec(score, value)
        leaves, tree = jax.tree.flatten(Attention(spec, key=jax.random.key(0)))
        keys = jax.random.split(jax.random.key(1), max(1, len(leaves)))
        leaves = [
            a.astype(jnp.float64) + 0.1 * jax.random.normal(k, a.shape, jnp.float64)
            for a, k in zip(leaves, keys, strict=False)
        ]
        layer = jax.tree.unflatten(tree, leaves)
        x_BTD = jax.random.normal(jax.random.key(2), (2, 9, spec.d_model), jnp.float64)
        mask_BTS = visible(9, 9, causal=True)
        want = layer(x_BTD, mask_BTS)
        out: dict[str, float | str] = {}
        for name, conversion in CONVERSIONS.items():
            if conversion.takes_norm:
                continue
            try:
                converted, _ = conversion(layer, **conversion.example)
            except ConversionError as error:
                out[name] = str(error)
                continue
            got = converted(x_BTD, mask_BTS)
            out[name] = float(jnp.abs(got - want).max() / jnp.abs(want).max())
        return out


def exact(errors: dict[str, float | str]) -> list[str]:
    """The conversions that keep the function."""
    return [n for n, e in errors.items() if isinstance(e, float) and e < 1e-9]


def reference_spec(score: str, value: str) -> AttentionSpec:
    """The attention layer of this variant at the reference size."""
    return attention_spec(dataclasses.replace(REFERENCE, score=score, value=value))


def _entry(score: str, value: str, is_score: bool) -> dict[str, Any]:
    spec = reference_spec(score, value)
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    circuit = layer.score if is_score else layer.value
    cls = SCORES[score] if is_score else VALUES[value]
    model = dataclasses.replace(REFERENCE, score=score, value=value)
    return {
        'equation': cls.equation,
        'options': options_of(cls),
        'parameters': circuit.parameter_count,
        'count': sum(leaf.size for leaf in jax.tree.leaves(circuit)),
        'flops': cost.flops_per_token(model),
        'cache': _cache(layer, is_score),
        'rope': SCORES[score].supports_rope,
        'source': cls.source,
    }


def _cache(layer: Attention, is_score: bool) -> str:
    """'K*H' from {'k_BSKH': ...}: the letters after B and S of all cached arrays."""
    y_BSD = jax.ShapeDtypeStruct((1, 1, layer.spec.d_model), jnp.float32)
    keys, both = jax.eval_shape(
        lambda layer, y: (layer.score.cached(y), layer.cached(y)), layer, y_BSD
    )
    names = keys if is_score else [name for name in both if name not in keys]
    terms = [name.rpartition('_BS')[2] for name in names]
    return ' + '.join('*'.join(term) for term in terms) or '0'

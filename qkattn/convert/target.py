"""The converted layer: its spec, and its parameters set from float64 arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import registry
from qkattn.attention.attention import Attention
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Value
from qkattn.convert.factors import Factors
from qkattn.errors import ConversionError

Arrays = Mapping[str, np.ndarray]


def dtype_of(layer: Attention) -> np.dtype:
    """Dtype of the parameters; float32 for a layer without any."""
    leaves = jax.tree.leaves(layer)
    return leaves[0].dtype if leaves else np.dtype('float32')


def tolerance(layer: Attention) -> float:
    """Relative size below which a singular value is rounding error: 256 ulp of the parameters."""
    return 256 * float(jnp.finfo(dtype_of(layer)).eps)


def respecified(spec: AttentionSpec, **changes: Any) -> AttentionSpec:
    """The spec with changes; num_kv_heads becomes num_heads where no circuit shares heads."""
    spec = dataclasses.replace(spec, **changes)
    score, value = registry.find_score(spec.score)[0], registry.find_value(spec.value)[0]
    if not (score.uses_kv_heads or value.uses_kv_heads):
        spec = dataclasses.replace(spec, num_kv_heads=spec.num_heads)
    return spec


def empty_layer(spec: AttentionSpec, source: Attention) -> Attention:
    """A layer of `spec` whose circuits `fill` has yet to set, with the QK-norm gains of `source`.

    Raises:
      ConversionError: `spec` gives the queries another size than the QK-norm gains have.
    """
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    for name in ('g_q_H', 'g_k_H'):
        if getattr(layer, name) is not None:
            gain, target = getattr(source, name), getattr(layer, name)
            if gain.shape != target.shape:
                raise ConversionError(
                    f'QK-norm acts on queries of size {gain.shape[0]}, and in '
                    f'{spec.variant} they have size {target.shape[0]}'
                )
            setattr(layer, name, nnx.Param(jnp.array(gain[...], dtype_of(source))))
    return layer


def fill(
    layer: Attention, source: Attention, *, score: Arrays | None = None, value: Arrays | None = None
) -> Attention:
    """Sets every parameter of an empty layer, in the dtype of `source`, and returns the layer.

    Args:
      score: parameters of the Score by name; biases may be given where the Score has none, if
        they are zero. None copies the Score of `source`.
      value: the same for the Value.

    Raises:
      ConversionError: a non-zero bias where the circuit has no parameter for it.
    """
    if score is None:
        nnx.update(layer.score, jax.tree.map(jnp.array, nnx.state(source.score)))
    else:
        _set_parameters(layer.score, score, dtype_of(source))
    if value is None:
        nnx.update(layer.value, jax.tree.map(jnp.array, nnx.state(source.value)))
    else:
        _set_parameters(layer.value, value, dtype_of(source))
    return layer


def standard_layer(spec: AttentionSpec, source: Attention, factors: Factors) -> Attention:
    """A layer of `spec`, whose variant is qk/vo, with those factors."""
    return fill(empty_layer(spec, source), source, score=factors.qk(), value=factors.vo())


def _set_parameters(circuit: Score | Value, arrays: Arrays, dtype: np.dtype) -> None:
    parameters = {name: a for name, a in vars(circuit).items() if isinstance(a, nnx.Param)}
    for name, array in arrays.items():
        if name in parameters:
            shape = parameters[name].shape
            assert shape == array.shape, (name, shape, array.shape)
            setattr(circuit, name, nnx.Param(jnp.array(array, dtype)))
        elif not name.startswith('b_'):
            raise AssertionError(f'{type(circuit).__name__} has no parameter {name}')
        elif np.abs(array).max() > 0:
            raise ConversionError(f'{type(circuit).__name__} without biases cannot hold {name}')
    missing = parameters.keys() - arrays.keys()
    assert not missing, f'{type(circuit).__name__} still needs {sorted(missing)}'

"""What a conversion requires of a layer, and the converted layer from float64 arrays."""

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
from qkattn.attention.values.value import Value
from qkattn.convert.factors import Factors, extract_factors
from qkattn.errors import ConversionError

Arrays = Mapping[str, np.ndarray]


def require(condition: bool, reason: str) -> None:
    """Raises ConversionError with the reason unless the condition holds."""
    if not condition:
        raise ConversionError(reason)


def require_bilinear(layer: Attention) -> None:
    """Requires logits that are a bilinear form of x and y, for all pairs and nothing more."""
    name, score = layer.spec.score, layer.score
    bias_NTS = score.relative_bias(jnp.zeros((1, 1), int))
    require(bias_NTS is None, f'{name} adds a learned bias to the logits; the target does not')
    require(not score.hides_self, f'{name} masks the diagonal, which the target does not')
    require(score.bilinear, f'{name} is not bilinear in x and y, so it has no matrix A[n]')


def require_standard(layer: Attention) -> None:
    """Requires the variant qk/vo."""
    variant = str(layer.spec.variant)
    require(variant == 'qk/vo', f'it starts from qk/vo, not {variant}; apply to_standard first')


def require_multi_head(layer: Attention) -> None:
    """Requires a key and a value head for each query head."""
    N, K = layer.spec.num_heads, layer.spec.num_kv_heads
    require(
        N == K,
        f'every query head gets its own key head, and num_kv_heads={K} are shared among {N}; '
        'apply gqa_to_mha first',
    )


def qk_factors(layer: Attention) -> Factors:
    """The factors of a layer whose logits are scale x A[n] y^T, so that A[n] may be rewritten.

    Raises:
      ConversionError: RoPE, QK-norm, a Score that is not bilinear, masks the diagonal or adds to
        the logits, a Value that shares a matrix of the Score, or a logit cap together with a bias
        of the keys.
    """
    spec = layer.spec
    require(
        spec.positions != 'rope',
        'RoPE rotates queries and keys between W_Q and W_K, so their product cannot be rewritten; '
        'it can with positions none, learned, sinusoidal or alibi',
    )
    require(not spec.qk_norm, 'QK-norm divides by the length of queries and keys, which changes')
    require_bilinear(layer)
    require(
        not layer.value.shares,
        f'{spec.value} shares a matrix of {spec.score}, which is replaced; apply to_standard first',
    )
    factors = extract_factors(layer)
    require(
        spec.logit_cap is None or not factors.b_k_KH.any(),
        'the bias of the keys, which is dropped, shifts all logits of a query alike; softmax '
        f'ignores that, but logit_cap={spec.logit_cap} does not',
    )
    return factors


def dtype_of(layer: Attention) -> np.dtype:
    """Dtype of the parameters; float32 for a layer without any."""
    leaves = jax.tree.leaves(layer)
    return leaves[0].dtype if leaves else np.dtype('float32')


def tolerance(layer: Attention) -> float:
    """Relative size below which a singular value is rounding error: 256 ulp of the parameters."""
    return 256 * float(jnp.finfo(dtype_of(layer)).eps)


def empty_layer(source: Attention, **changes: Any) -> Attention:
    """A layer without values, of the spec of `source` with changes; it has its QK-norm gains.

    num_kv_heads becomes num_heads where no circuit shares heads.

    Raises:
      ConversionError: queries get another size than the QK-norm gains have.
    """
    spec = dataclasses.replace(source.spec, **changes)
    score, value = registry.find_score(spec.score)[0], registry.find_value(spec.value)[0]
    if not (score.uses_kv_heads or value.uses_kv_heads):
        spec = dataclasses.replace(spec, num_kv_heads=spec.num_heads)
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    for name in ('g_q_H', 'g_k_H') if spec.qk_norm else ():
        gain, target = getattr(source, name), getattr(layer, name)
        require(
            gain.shape == target.shape,
            f'QK-norm acts on queries of size {gain.shape[0]}, and in {spec.variant} they have '
            f'size {target.shape[0]}',
        )
        setattr(layer, name, nnx.Param(jnp.array(gain[...], dtype_of(source))))
    return layer


def logit_scale(layer: Attention) -> float:
    """The factor on q k^T."""
    return layer.score.scale * layer.spec.score_scale


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
    for name, arrays in (('score', score), ('value', value)):
        circuit = getattr(layer, name)
        if arrays is None:
            nnx.update(circuit, jax.tree.map(jnp.array, nnx.state(getattr(source, name))))
        else:
            _set_parameters(circuit, arrays, dtype_of(source))
    return layer


def standard_layer(source: Attention, factors: Factors, **changes: Any) -> Attention:
    """A layer qk/vo with those factors, otherwise of the spec of `source` with changes."""
    layer = empty_layer(source, score='qk', value='vo', **changes)
    return fill(layer, source, score=factors.qk(), value=factors.vo())


def _set_parameters(circuit: Score | Value, arrays: Arrays, dtype: np.dtype) -> None:
    parameters = {name: a for name, a in vars(circuit).items() if isinstance(a, nnx.Param)}
    for name, parameter in parameters.items():
        assert parameter.shape == arrays[name].shape, (name, parameter.shape, arrays[name].shape)
        setattr(circuit, name, nnx.Param(jnp.array(arrays[name], dtype)))
    for name in arrays.keys() - parameters.keys():
        assert name.startswith('b_'), f'{type(circuit).__name__} has no parameter {name}'
        reason = f'{type(circuit).__name__} without biases has no parameter for {name}'
        require(not arrays[name].any(), reason)

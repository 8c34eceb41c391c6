"""Preconditions of conversions; each raises `ConversionError` with the reason."""

import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import Factors, extract_factors
from qkattn.errors import ConversionError


def qk_factors(layer: Attention, conversion: str) -> Factors:
    """The factors of a layer whose logits are scale x A[n] y^T, so that A[n] may be rewritten.

    Raises:
      ConversionError: RoPE, QK-norm, a Score that is not bilinear or masks the diagonal, a Value
        that shares a matrix of the Score, or a logit cap together with a bias of the keys.
    """
    require_free_logits(layer, conversion)
    if layer.value.shares:
        raise ConversionError(
            f'{layer.spec.value} shares a matrix of {layer.spec.score}, which {conversion} '
            'replaces; convert with to_standard first'
        )
    factors = extract_factors(layer)
    require_no_cap_on(layer, factors.b_k_KH, conversion)
    return factors


def require_free_logits(layer: Attention, conversion: str) -> None:
    """Requires logits x A[n] y^T: nothing else acts between the projections and the softmax."""
    spec = layer.spec
    if spec.positions == 'rope':
        raise ConversionError(
            f'{conversion} rewrites W_Q W_K^T as a product, and RoPE rotates queries and keys '
            'between its two factors; it is exact for positions none, learned, sinusoidal or alibi'
        )
    if spec.qk_norm:
        raise ConversionError(
            f'{conversion} changes the length of queries and keys, which QK-norm divides by'
        )
    require_unbiased_logits(layer, conversion)
    require_visible_diagonal(layer, conversion)
    if not layer.score.bilinear:
        raise ConversionError(f'{spec.score} is not bilinear in x and y, so it has no matrix A[n]')


def require_unbiased_logits(layer: Attention, conversion: str) -> None:
    """Requires a Score without a relative bias, which no target has."""
    if layer.score.relative_bias(jnp.zeros((1, 1), int)) is not None:
        raise ConversionError(
            f'{layer.spec.score} adds a learned bias to the logits, which the target of '
            f'{conversion} does not'
        )


def require_visible_diagonal(layer: Attention, conversion: str) -> None:
    """Requires a Score without a self mask, which no target has."""
    if layer.score.hides_self:
        raise ConversionError(
            f'{layer.spec.score} masks the diagonal, which the target of {conversion} does not'
        )


def require_no_cap_on(layer: Attention, b_k_KH: np.ndarray, conversion: str) -> None:
    """Requires that the bias of the keys, constant over a query's logits, meets no logit cap."""
    if layer.spec.logit_cap is not None and np.abs(b_k_KH).max() > 0:
        raise ConversionError(
            f'{conversion} drops the bias of the keys, which shifts all logits of a query alike; '
            f'softmax ignores that, but logit_cap={layer.spec.logit_cap} does not'
        )


def require_multi_head(layer: Attention, conversion: str) -> None:
    """Requires a key and a value head for each query head."""
    if layer.spec.num_kv_heads != layer.spec.num_heads:
        raise ConversionError(
            f'{conversion} gives every query head its own key head, and this layer shares '
            f'num_kv_heads={layer.spec.num_kv_heads} among {layer.spec.num_heads}; '
            'convert with gqa_to_mha first'
        )


def require_score(layer: Attention, name: str, conversion: str) -> None:
    """Requires the Score `name`."""
    if layer.spec.score != name:
        raise ConversionError(f'{conversion} starts from the score {name}, not {layer.spec.score}')


def require_standard(layer: Attention, conversion: str) -> None:
    """Requires the variant qk/vo."""
    if (layer.spec.score, layer.spec.value) != ('qk', 'vo'):
        raise ConversionError(
            f'{conversion} starts from qk/vo, not {layer.spec.variant}; '
            'convert with to_standard first'
        )

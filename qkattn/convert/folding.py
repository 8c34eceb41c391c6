"""Double projections, norm gains and biases folded into neighbouring parameters."""

import dataclasses

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import extract_factors
from qkattn.convert.preconditions import (
    require_free_logits,
    require_no_cap_on,
    require_standard,
)
from qkattn.convert.target import empty_layer, fill, standard_layer
from qkattn.errors import ConversionError


def fold_double(layer: Attention) -> Attention:
    """`double` -> qk, vo, or both: each pair of projections becomes its product. Exact.

    Positions and QK-norm may be any.

    Raises:
      ConversionError: neither circuit is double.
    """
    spec = layer.spec
    double_score = spec.score.partition('(')[0] == 'double'
    double_value = spec.value.partition('(')[0] == 'double'
    if not (double_score or double_value):
        raise ConversionError(f'{spec.variant} has no double projection to fold')
    spec = dataclasses.replace(
        spec,
        score='qk' if double_score else spec.score,
        value='vo' if double_value else spec.value,
    )
    factors = extract_factors(layer)
    return fill(
        empty_layer(spec, layer),
        layer,
        score=factors.qk() if double_score else None,
        value=factors.vo() if double_value else None,
    )


def fold_gains(layer: Attention, gain_D: np.ndarray, bias_D: np.ndarray | None = None) -> Attention:
    """Moves the gain and bias of the norm before self-attention into W_Q, W_K and W_V. Exact.

    layer(z * gain + bias) = result(z): W <- diag(gain) W, b <- b + bias W. The result has biases
    where the norm has one. Positions, QK-norm and caps may be any.

    Raises:
      ConversionError: another variant than qk/vo. Where queries are slices of the stream
        (`query_free`), no matrix can take the gain.
    """
    require_standard(layer, 'fold_gains')
    gain_D = np.asarray(gain_D, np.float64)
    bias_D = np.zeros_like(gain_D) if bias_D is None else np.asarray(bias_D, np.float64)
    spec, factors = layer.spec, extract_factors(layer)
    spec = dataclasses.replace(spec, biases=spec.biases or bool(np.abs(bias_D).max() > 0))
    factors = dataclasses.replace(
        factors,
        w_q_DNH=gain_D[:, None, None] * factors.w_q_DNH,
        w_k_DKH=gain_D[:, None, None] * factors.w_k_DKH,
        w_v_DKH=gain_D[:, None, None] * factors.w_v_DKH,
        b_q_NH=factors.b_q_NH + np.tensordot(bias_D, factors.w_q_DNH, axes=1),
        b_k_KH=factors.b_k_KH + np.tensordot(bias_D, factors.w_k_DKH, axes=1),
        b_v_KH=factors.b_v_KH + np.tensordot(bias_D, factors.w_v_DKH, axes=1),
    )
    return standard_layer(spec, layer, factors)


def fold_biases(layer: Attention, *, keys: bool = True) -> Attention:
    """qk/vo -> the same with b_V = 0, added to b_O, and with `keys` also b_K = 0. Exact.

    b_V always folds: the probabilities of a head sum to 1 (so not with dropout on them). b_K adds
    the same to all logits of a query, unless something acts between q k^T and the softmax.

    Raises:
      ConversionError: another variant; or, with `keys`, a b_K together with RoPE, QK-norm or a
        logit cap.
    """
    require_standard(layer, 'fold_biases')
    factors = extract_factors(layer)
    b_k = factors.b_k_KH
    if keys and np.abs(b_k).max() > 0:
        require_free_logits(layer, 'fold_biases(keys=True)')
        require_no_cap_on(layer, b_k, 'fold_biases(keys=True)')
        b_k = np.zeros_like(b_k)
    factors = dataclasses.replace(
        factors,
        b_k_KH=b_k,
        b_v_KH=np.zeros_like(factors.b_v_KH),
        b_o_D=factors.output_matrices()[1],
    )
    return standard_layer(layer.spec, layer, factors)

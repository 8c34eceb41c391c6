"""Attention probabilities and the mix of values, which all variants share."""

import jax

from qkattn.attention.kernels import choice
from qkattn.attention.kernels.call import Bias, Call
from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import Normalizer, Softmax

SOFTMAX = Softmax()


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask | jax.Array,
    *,
    scale: float | jax.Array,
    bias: Bias | None = None,
    logit_cap: float | None = None,
    normalizer: Normalizer = SOFTMAX,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    kernel: str = 'auto',
) -> jax.Array:
    """o[t, n] = sum_s softmax_s(scale * q[t, n] . k[s]) v[s]; probabilities in float32 or wider.

    Keys and values may have fewer heads than queries, each a number that divides N, and values may
    have another head size. A shared head is not copied to the N query heads. What a query without
    visible keys returns is finite, but without meaning.

    Args:
      q_BTNH, k_BSKH, v_BSKH: queries, keys and values; K and H may differ between k and v.
      mask: a Mask, or a mask_BTS, True where a query may attend to a key; B may be 1.
      scale: factor on the logits.
      bias: of the distances t - s, added to the scaled (and capped) logits.
      logit_cap: c in c tanh(logit / c); None is off.
      normalizer: what stands in place of softmax.
      dropout: rate at which attention probabilities are dropped; off without a key.
      dropout_key: random key of dropout.
      kernel: what computes it; see `kernels.choice`.

    Returns:
      o_BTNH with the head size and dtype of v.

    Raises:
      SpecError: the kernel cannot serve this attention.
    """
    call = Call(
        q_BTNH=q_BTNH,
        k_BSKH=k_BSKH,
        v_BSKH=v_BSKH,
        mask=Mask.of(mask),
        scale=scale,
        bias=bias,
        logit_cap=logit_cap,
        normalizer=normalizer,
        dropout=0.0 if dropout_key is None else dropout,
        dropout_key=dropout_key,
    )
    return choice.run(kernel, call)

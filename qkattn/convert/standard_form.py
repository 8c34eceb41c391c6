"""Any linear variant as standard attention, qk/vo."""

import dataclasses

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import extract_factors, repeat_heads
from qkattn.convert.preconditions import require_visible_diagonal
from qkattn.convert.target import empty_layer, fill
from qkattn.errors import ConversionError


def to_standard(layer: Attention) -> Attention:
    """Any variant whose queries, keys and values are linear in the stream -> qk/vo. Exact.

    Tied matrices are copied, fixed ones written out, factors multiplied. The head size is that of
    the wider circuit, and the other one is padded with zeros: `merged` gets heads of size D, which
    `unmerge` makes smaller where the rank allows. Where keys and values have the same number of
    heads, it stays.

    Raises:
      ConversionError: a Score that is not linear or masks the diagonal; under RoPE or QK-norm, also
        query heads that would have to be widened or that are rotated in part.
    """
    spec, score = layer.spec, layer.score
    require_visible_diagonal(layer, 'to_standard')
    if not score.bilinear:
        raise ConversionError(f'{spec.score} is not bilinear in x and y: no W_Q and W_K hold it')
    factors = extract_factors(layer)
    N, G, H = spec.num_heads, factors.w_q_DNH.shape[-1], factors.w_v_DKH.shape[-1]
    size = max(G, H)
    if spec.positions == 'rope' or spec.qk_norm:
        why = 'RoPE rotates' if spec.positions == 'rope' else 'QK-norm normalizes'
        if score.rope_size not in (None, G):
            raise ConversionError(
                f'{spec.score} rotates {score.rope_size} of {G} channels, and qk rotates all'
            )
        if size > G:
            raise ConversionError(
                f'queries of size {G} would be widened to the {H} of the values, and {why} them '
                'over their whole size'
            )
    K = factors.w_k_DKH.shape[1]
    K = K if K == factors.w_v_DKH.shape[1] else N
    ratio = float(score.scale) * size**0.5
    # QK-norm divides the length of the queries out, so the ratio goes into the score scale.
    on_queries, on_scale = (1.0, ratio) if spec.qk_norm else (ratio, 1.0)
    target = empty_layer(
        dataclasses.replace(
            spec,
            score='qk',
            value='vo',
            num_kv_heads=K,
            head_size=size,
            score_scale=spec.score_scale * on_scale,
        ),
        layer,
    )

    def heads(w_DKH: np.ndarray) -> np.ndarray:
        """K heads of the target's size."""
        return _pad(repeat_heads(w_DKH, K), 2, size)

    return fill(
        target,
        layer,
        score={
            'w_q_DNH': on_queries * _pad(factors.w_q_DNH, 2, size),
            'w_k_DKH': heads(factors.w_k_DKH),
            'b_q_NH': on_queries * _pad(factors.b_q_NH, 1, size),
            'b_k_KH': heads(factors.b_k_KH[None])[0],
        },
        value={
            'w_v_DKH': heads(factors.w_v_DKH),
            'w_o_NHD': _pad(factors.w_o_NHD, 1, size),
            'b_v_KH': heads(factors.b_v_KH[None])[0],
            'b_o_D': factors.b_o_D,
        },
    )


def _pad(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Appends zeros along one axis, up to `size`."""
    width = [(0, 0)] * array.ndim
    width[axis] = (0, size - array.shape[axis])
    return np.pad(array, width)

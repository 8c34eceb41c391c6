"""Any linear variant as standard attention, qk/vo."""

import dataclasses

from qkattn.attention.attention import Attention
from qkattn.convert.factors import extract_factors
from qkattn.convert.preconditions import require_unbiased_logits, require_visible_diagonal
from qkattn.convert.target import standard_layer
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
    require_unbiased_logits(layer, 'to_standard')
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
    spec = dataclasses.replace(
        spec,
        score='qk',
        value='vo',
        num_kv_heads=K,
        head_size=size,
        score_scale=spec.score_scale * on_scale,
    )
    factors = factors.with_kv_heads(K).with_head_size(size)
    factors = dataclasses.replace(
        factors, w_q_DNH=on_queries * factors.w_q_DNH, b_q_NH=on_queries * factors.b_q_NH
    )
    return standard_layer(spec, layer, factors)

"""Conversions of whole cells: into standard attention, between numbers of heads, and of vectors."""

import dataclasses

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.parts import (
    blank,
    dtype_of,
    factors,
    fill,
    keep,
    padded,
    repeated,
    require_free_logits,
    require_no_cap_on,
    require_plain_score,
    respecified,
)
from qkattn.errors import ConversionError


def to_standard(layer: Attention) -> Attention:
    """Any cell whose queries, keys and values are linear in the stream -> qk/vo. Exact.

    Tied matrices are copied, fixed ones written out, factors multiplied; heads get the width of
    the wider circuit, the other one zeros behind. `merged` thus becomes heads of width D, of which
    `unmerge` makes smaller ones where the rank allows. Fewer key heads stay fewer where keys and
    values have the same number.

    Raises:
      ConversionError: a Score that is not linear or hides the diagonal; under RoPE or QK-norm, also
        query heads that would have to be widened or that are rotated in part.
    """
    spec, score = layer.spec, layer.score
    require_plain_score(layer, 'to_standard')
    if not score.bilinear:
        raise ConversionError(f'{spec.score} is not bilinear in x and y: no W_Q and W_K hold it')
    parts = factors(layer)
    N, G, H = spec.num_heads, parts.w_q_DNH.shape[-1], parts.w_v_DKH.shape[-1]
    size = max(G, H)
    if spec.positions == 'rope' or spec.qk_norm:
        why = 'RoPE turns' if spec.positions == 'rope' else 'QK-norm measures'
        if score.rope_size not in (None, G):
            raise ConversionError(
                f'{spec.score} rotates {score.rope_size} of {G} channels, and qk rotates all'
            )
        if size > G:
            raise ConversionError(
                f'queries of width {G} would be widened to the {H} of the values, and {why} them '
                'over their whole width'
            )
    K = parts.w_k_DKH.shape[1]
    K = K if K == parts.w_v_DKH.shape[1] else N
    ratio = float(score.scale) * size**0.5
    # Under QK-norm the length of the queries says nothing, so the ratio goes beside it.
    changes = {'score_scale': spec.score_scale * ratio} if spec.qk_norm else {}
    target = blank(
        dataclasses.replace(
            spec, score='qk', value='vo', num_kv_heads=K, head_size=size, **changes
        ),
        layer,
    )
    on_queries = 1.0 if spec.qk_norm else ratio
    fill(
        target.score,
        dtype_of(layer),
        w_q_DNH=on_queries * padded(parts.w_q_DNH, 2, size),
        w_k_DKH=padded(repeated(parts.w_k_DKH, K), 2, size),
        b_q_NH=on_queries * padded(parts.b_q_NH, 1, size),
        b_k_KH=padded(repeated(parts.b_k_KH[None], K)[0], 1, size),
    )
    fill(
        target.value,
        dtype_of(layer),
        w_v_DKH=padded(repeated(parts.w_v_DKH, K), 2, size),
        w_o_NHD=padded(parts.w_o_NHD, 1, size),
        b_v_KH=padded(repeated(parts.b_v_KH[None], K)[0], 1, size),
        b_o_D=parts.b_o_D,
    )
    return target


def fold_double(layer: Attention) -> Attention:
    """Double projections -> one: `double` becomes qk or vo, on the side or sides that have it.

    Exact, with any positions and QK-norm.

    Raises:
      ConversionError: no side is double, or a double Score under a Value that reads the Score.
    """
    spec = layer.spec
    names = {kind: getattr(spec, kind).partition('(')[0] for kind in ('score', 'value')}
    if 'double' not in names.values():
        raise ConversionError(f'{spec.score}/{spec.value} has no double projection to fold')
    parts = factors(layer)
    targets = {'score': 'qk', 'value': 'vo'}
    new = {kind: targets[kind] for kind, name in names.items() if name == 'double'}
    target = blank(dataclasses.replace(spec, **new), layer)
    if 'score' in new:
        if getattr(layer.value, 'shares', ()):
            raise ConversionError(f'{spec.value} reads a matrix of {spec.score}')
        fill(
            target.score,
            dtype_of(layer),
            w_q_DNH=parts.w_q_DNH,
            w_k_DKH=parts.w_k_DKH,
            b_q_NH=parts.b_q_NH,
            b_k_KH=parts.b_k_KH,
        )
    else:
        keep(target.score, layer.score)
    if 'value' in new:
        fill(
            target.value,
            dtype_of(layer),
            w_v_DKH=parts.w_v_DKH,
            w_o_NHD=parts.w_o_NHD,
            b_v_KH=parts.b_v_KH,
            b_o_D=parts.b_o_D,
        )
    else:
        keep(target.value, layer.value)
    return target


def gqa_to_mha(layer: Attention) -> Attention:
    """Shared key and value heads of qk/vo -> one for each query head, by repetition. Exact.

    Any positions, QK-norm, caps: keys and values keep their numbers.

    Raises:
      ConversionError: another cell.
    """
    _require_standard(layer, 'gqa_to_mha')
    N, parts = layer.spec.num_heads, factors(layer)
    target = blank(dataclasses.replace(layer.spec, num_kv_heads=N), layer)
    fill(
        target.score,
        dtype_of(layer),
        w_q_DNH=parts.w_q_DNH,
        b_q_NH=parts.b_q_NH,
        w_k_DKH=repeated(parts.w_k_DKH, N),
        b_k_KH=repeated(parts.b_k_KH[None], N)[0],
    )
    fill(
        target.value,
        dtype_of(layer),
        w_v_DKH=repeated(parts.w_v_DKH, N),
        b_v_KH=repeated(parts.b_v_KH[None], N)[0],
        w_o_NHD=parts.w_o_NHD,
        b_o_D=parts.b_o_D,
    )
    return target


def gqa_to_latent(layer: Attention) -> Attention:
    """qk/vo with K key heads -> latent/latent: W_D = [W_K, W_V] and selectors behind it. Exact.

    The latent has R = 2 K H, so the cache is that of the source. Keys keep their numbers, so
    QK-norm and caps may stay. Meng et al. 2025, arXiv 2502.07864, section 3.

    Raises:
      ConversionError: another cell; RoPE, which would have to act between W_D and W_K; or
        2 K H > d_model, a latent wider than the stream.
    """
    _require_standard(layer, 'gqa_to_latent')
    spec, parts = layer.spec, factors(layer)
    D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
    if spec.positions == 'rope':
        raise ConversionError(
            'gqa_to_latent under RoPE would have to rotate between the latent and W_K, where the '
            'latent is shared by all heads; only extra channels can be rotated there'
        )
    R = 2 * K * H
    if R > D:
        raise ConversionError(
            f'gqa_to_latent needs a latent of 2 * num_kv_heads * head_size = {R}, wider than the '
            f'stream, d_model={D}'
        )
    target = blank(
        respecified(spec, score=f'latent(size={R})', value='latent', num_kv_heads=N), layer
    )
    select_KHNH = np.zeros((K, H, N, H))
    for n in range(N):
        select_KHNH[n * K // N, :, n] = np.eye(H)
    select_RNH = select_KHNH.reshape(K * H, N, H)
    nothing_RNH = np.zeros_like(select_RNH)
    fill(
        target.score,
        dtype_of(layer),
        w_down_DR=np.concatenate([w.reshape(D, -1) for w in (parts.w_k_DKH, parts.w_v_DKH)], 1),
        b_down_R=np.concatenate([parts.b_k_KH.reshape(-1), parts.b_v_KH.reshape(-1)]),
        w_k_RNH=np.concatenate([select_RNH, nothing_RNH]),
        b_k_NH=np.zeros((N, H)),
        w_q_DNH=parts.w_q_DNH,
        b_q_NH=parts.b_q_NH,
    )
    fill(
        target.value,
        dtype_of(layer),
        w_up_v_RNH=np.concatenate([nothing_RNH, select_RNH]),
        b_v_NH=np.zeros((N, H)),
        w_o_NHD=parts.w_o_NHD,
        b_o_D=parts.b_o_D,
    )
    return target


def fold_gains(layer: Attention, gain_D: np.ndarray, bias_D: np.ndarray | None = None) -> Attention:
    """Moves the gain and bias of the norm before self-attention into W_Q, W_K and W_V. Exact.

    layer(z * gain + bias) = result(z): W <- diag(gain) W, b <- b + bias W. The result has biases
    where the norm has one. Any positions, QK-norm, caps.

    Raises:
      ConversionError: another cell than qk/vo. Where the stream itself asks (query_free), the gain
        is the only map of the queries and has nowhere to go.
    """
    _require_standard(layer, 'fold_gains')
    gain_D = np.asarray(gain_D, np.float64)
    bias_D = np.zeros_like(gain_D) if bias_D is None else np.asarray(bias_D, np.float64)
    parts = factors(layer)
    biases = layer.spec.biases or bool(np.abs(bias_D).max() > 0)
    target = blank(dataclasses.replace(layer.spec, biases=biases), layer)
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
        (gain_D[:, None, None] * w, b + np.tensordot(bias_D, w, axes=1))
        for w, b in (
            (parts.w_q_DNH, parts.b_q_NH),
            (parts.w_k_DKH, parts.b_k_KH),
            (parts.w_v_DKH, parts.b_v_KH),
        )
    )
    fill(target.score, dtype_of(layer), w_q_DNH=w_q, b_q_NH=b_q, w_k_DKH=w_k, b_k_KH=b_k)
    fill(
        target.value,
        dtype_of(layer),
        w_v_DKH=w_v,
        b_v_KH=b_v,
        w_o_NHD=parts.w_o_NHD,
        b_o_D=parts.b_o_D,
    )
    return target


def fold_biases(layer: Attention, *, keys: bool = True) -> Attention:
    """qk/vo -> the same with b_K = 0 (only with `keys`) and b_V = 0, which joins b_O. Exact.

    b_V always folds: the probabilities of a head sum to 1 (so not with dropout on them). b_K adds
    the same to all logits of a query, unless something acts between q k^T and the softmax.

    Raises:
      ConversionError: another cell; or, with `keys`, RoPE, QK-norm or a logit cap beside a b_K.
    """
    _require_standard(layer, 'fold_biases')
    parts = factors(layer)
    b_k = parts.b_k_KH
    if keys and np.abs(b_k).max() > 0:
        require_free_logits(layer, 'fold_biases(keys=True)')
        require_no_cap_on(layer, b_k, 'fold_biases(keys=True)')
        b_k = np.zeros_like(b_k)
    target = blank(layer.spec, layer)
    fill(
        target.score,
        dtype_of(layer),
        w_q_DNH=parts.w_q_DNH,
        b_q_NH=parts.b_q_NH,
        w_k_DKH=parts.w_k_DKH,
        b_k_KH=b_k,
    )
    fill(
        target.value,
        dtype_of(layer),
        w_v_DKH=parts.w_v_DKH,
        b_v_KH=np.zeros_like(parts.b_v_KH),
        w_o_NHD=parts.w_o_NHD,
        b_o_D=parts.output_matrices()[1],
    )
    return target


def _require_standard(layer: Attention, who: str) -> None:
    if (layer.spec.score, layer.spec.value) != ('qk', 'vo'):
        raise ConversionError(
            f'{who} starts from qk/vo, not {layer.spec.score}/{layer.spec.value}; '
            'convert with to_standard first'
        )

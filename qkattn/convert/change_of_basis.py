"""W_Q = I by a change of basis of the residual stream, in networks whose basis is free."""

import dataclasses

import numpy as np

from qkattn.errors import ConversionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BareLayer:
    """Attention, then an MLP f(x w_in) w_out, as arrays."""

    w_q_DNH: np.ndarray
    w_k_DKH: np.ndarray
    w_v_DKH: np.ndarray
    w_o_NHD: np.ndarray
    w_in_DF: np.ndarray
    w_out_FD: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class BareNetwork:
    """A transformer without biases, as arrays.

    Attributes:
      embedding_VD: token embeddings; a learned position table changes basis in the same way.
      layers: from the first to the last.
      w_output_DV: maps the stream to the logits.
      norm: before attention and before the MLP: 'none', 'rmsnorm' or 'layernorm', without gains
        (fold them first). There is no final norm.
      attention_skip: x + attention(x) if True, attention(x) if False.
      mlp_skip: x + mlp(x) if True, mlp(x) if False.
    """

    embedding_VD: np.ndarray
    layers: tuple[BareLayer, ...]
    w_output_DV: np.ndarray
    norm: str = 'none'
    attention_skip: bool = True
    mlp_skip: bool = False


def queries_to_identity(network: BareNetwork) -> BareNetwork:
    """The same function with W_Q = I in every layer: the query of head n is slice n of the stream.

    With T = W_Q of a layer, the matrix that writes its input (the embedding, or the w_out of the
    MLP before) becomes W T; W_K, W_V and the layer's w_in become T^-1 W; W_O becomes W_O T.
    Queries, keys and values keep their numbers, so positions and QK-norm may be any. The condition
    number of T amplifies rounding errors. A skip around the MLP carries one basis through all
    layers up to the output, which is exact where all layers have the same W_Q.

    Karbevski & Mijoski 2025, arXiv 2510.23912, theorems 4.1 to 4.3; Graef 2024, arXiv 2404.12362.

    Raises:
      ConversionError: a skip around the MLP and layers with different W_Q; a norm that T does not
        commute with (LayerNorm never, RMSNorm unless T is orthogonal); N H != D; or a W_Q that
        cannot be inverted.
    """
    bases = [
        _query_basis(number, layer, network.norm) for number, layer in enumerate(network.layers)
    ]
    if network.mlp_skip and any(np.abs(T_DD - bases[0]).max() > 0 for T_DD in bases):
        raise ConversionError(
            'a skip around the MLP carries one basis of the stream through all layers, and no '
            'single basis makes the W_Q of all layers the identity where they differ'
        )
    D = len(bases[0])
    last_DD = bases[0] if network.mlp_skip else np.eye(D)
    layers = []
    for layer, T_DD, next_DD in zip(network.layers, bases, [*bases[1:], last_DD], strict=True):
        inverse_DD = np.linalg.inv(T_DD)
        layers.append(
            BareLayer(
                w_q_DNH=np.eye(D).reshape(layer.w_q_DNH.shape),
                w_k_DKH=np.tensordot(inverse_DD, layer.w_k_DKH, axes=1),
                w_v_DKH=np.tensordot(inverse_DD, layer.w_v_DKH, axes=1),
                w_o_NHD=layer.w_o_NHD @ T_DD,
                w_in_DF=inverse_DD @ layer.w_in_DF,
                w_out_FD=layer.w_out_FD @ next_DD,
            )
        )
    return dataclasses.replace(
        network,
        embedding_VD=network.embedding_VD @ bases[0],
        layers=tuple(layers),
        w_output_DV=np.linalg.inv(last_DD) @ network.w_output_DV,
    )


def _query_basis(number: int, layer: BareLayer, norm: str) -> np.ndarray:
    """W_Q of a layer as a change of basis T_DD that the norm allows."""
    D, N, H = layer.w_q_DNH.shape
    if norm == 'layernorm':
        raise ConversionError(
            'LayerNorm subtracts the mean over channels, which depends on the basis of the stream'
        )
    if N * H != D:
        raise ConversionError(
            f'W_Q of layer {number} is {D} x {N * H}, and only a square one is a change of basis'
        )
    T_DD = np.asarray(layer.w_q_DNH, np.float64).reshape(D, D)
    condition = np.linalg.cond(T_DD)
    if not condition < 1e8:  # leaves half of the digits of float64
        raise ConversionError(
            f'W_Q of layer {number} cannot be inverted: its condition number is {condition:.1e}'
        )
    deviation = np.abs(T_DD @ T_DD.T - np.eye(D)).max()
    if norm == 'rmsnorm' and deviation > 1e-10:
        raise ConversionError(
            f'RMSNorm commutes with orthogonal maps only, and W_Q of layer {number} is not '
            f'orthogonal: |W_Q W_Q^T - I| reaches {deviation:.1e}'
        )
    return T_DD

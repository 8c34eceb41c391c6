"""W_Q = I by a change of the basis of the residual stream, in networks that have a free basis."""

import dataclasses

import numpy as np

from qkattn.errors import ConversionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BareLayer:
    """Attention, then an MLP f(x w_in) w_out; all in the basis of the stream."""

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
      embedding_VD: rows that enter the stream (a learned position table is changed like it).
      layers: from the first to the last.
      w_output_DV: from the stream to the logits.
      norm: before attention and before the MLP: 'none', 'rmsnorm' or 'layernorm', without gains
        (fold them first); there is none before the output.
      attention_skip: whether x + attention(x), or attention(x) alone.
      mlp_skip: whether x + mlp(x), or mlp(x) alone.
    """

    embedding_VD: np.ndarray
    layers: tuple[BareLayer, ...]
    w_output_DV: np.ndarray
    norm: str = 'none'
    attention_skip: bool = True
    mlp_skip: bool = False


def queries_to_identity(network: BareNetwork) -> BareNetwork:
    """The same function with W_Q = I in every layer: head n asks with slice n of the stream.

    With T = W_Q of a layer: what writes its input (the embedding, or the MLP before) <- W T;
    W_K, W_V and the MLP's w_in <- T^-1 W; W_O <- W_O T. Queries, keys and values keep their
    numbers, so any positions and QK-norm may stay. The condition number of T amplifies rounding.
    A skip around the MLP carries one basis through all layers, to the output: exact where all share
    one W_Q.
    Karbevski & Mijoski 2025, arXiv 2510.23912, theorems 4.1 to 4.3; Graef 2024, arXiv 2404.12362.

    Raises:
      ConversionError: a skip around the MLP and layers with different W_Q; a norm that T does not
        commute with (LayerNorm never, RMSNorm unless T is orthogonal); N H != D; or a W_Q that
        cannot be inverted.
    """
    bases = [_basis(number, layer, network.norm) for number, layer in enumerate(network.layers)]
    if network.mlp_skip and any(np.abs(T_DD - bases[0]).max() > 0 for T_DD in bases):
        raise ConversionError(
            'a skip around the MLP carries one basis of the stream through all layers, which can '
            'make one W_Q the identity, and the layers have different ones'
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


def _basis(number: int, layer: BareLayer, norm: str) -> np.ndarray:
    """W_Q of a layer as a change of basis T_DD that the norm allows."""
    D, N, H = layer.w_q_DNH.shape
    if norm == 'layernorm':
        raise ConversionError(
            'LayerNorm subtracts the mean over channels, which a change of basis moves elsewhere'
        )
    if N * H != D:
        raise ConversionError(
            f'W_Q of layer {number} is {D} x {N * H}, and only a square one is a change of basis'
        )
    T_DD = np.asarray(layer.w_q_DNH, np.float64).reshape(D, D)
    condition = np.linalg.cond(T_DD)
    if not condition < 1e8:
        raise ConversionError(
            f'W_Q of layer {number} cannot be inverted: its condition number is {condition:.1e}'
        )
    off = np.abs(T_DD @ T_DD.T - np.eye(D)).max()
    if norm == 'rmsnorm' and off > 1e-10:
        raise ConversionError(
            f'RMSNorm commutes with orthogonal maps only, and W_Q of layer {number} is not '
            f'orthogonal: |W_Q W_Q^T - I| reaches {off:.1e}'
        )
    return T_DD

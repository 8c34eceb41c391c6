"""The slow reference: a transformer's forward pass in float64 numpy, one layer after another.

It shares no code with the models: attention is the oracle's, from A[n] and B[n] alone.
"""

import jax
import numpy as np
from scipy.special import erf

from qkattn.model.stack import layer_of
from tests.attention.layers import expected

ACTIVATIONS = {
    'relu': lambda x: np.maximum(x, 0),
    'gelu': lambda x: x * (1 + erf(x / 2**0.5)) / 2,
    'gelu_tanh': lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
}
GATES = {
    'reglu': ACTIVATIONS['relu'],
    'geglu': ACTIVATIONS['gelu'],
    'swiglu': lambda x: x / (1 + np.exp(-x)),
}


def with_noise(model):
    """The model with noise added to every parameter, so that gains and biases count."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: a + np.float32(0.2 * rng.standard_normal(a.shape)), model)


def forward(model, tokens_BT, segments_BT=None, source_BS=None, source_segments_BS=None):
    """Logits_BTV of tokens whose segments number the sequences of a row; 0 is padding."""
    segments_BT = np.ones_like(tokens_BT) if segments_BT is None else segments_BT
    y_BSD = cross_mask_BTS = None
    if source_BS is not None:
        table_VD = model.w_embedding_VD if model.config.shared_embeddings else None
        x_BSD = _embed(model.encoder, source_BS, source_segments_BS, table_VD)
        y_BSD = _run(model.encoder, x_BSD, _same(source_segments_BS, source_segments_BS))
        cross_mask_BTS = _same(segments_BT, source_segments_BS)
    mask_BTS = _same(segments_BT, segments_BT)
    if model.config.kind != 'encoder':
        mask_BTS &= np.tri(tokens_BT.shape[1], dtype=bool)
    x_BTD = _run(model, _embed(model, tokens_BT, segments_BT), mask_BTS, y_BSD, cross_mask_BTS)
    if model.config.tied_embeddings:
        return x_BTD @ _array(model.w_embedding_VD).T
    return x_BTD @ _array(model.w_output_DV)


def _same(segments_BT, segments_BS) -> np.ndarray:
    """mask_BTS, pair by pair. Padding reads something, for a softmax; nobody reads padding."""
    mask_BTS = np.zeros((*segments_BT.shape, segments_BS.shape[1]), bool)
    for b, t, s in np.ndindex(*mask_BTS.shape):
        mask_BTS[b, t, s] = segments_BT[b, t] in (segments_BS[b, s], 0)
    return mask_BTS


def _run(stream, x_BTD, mask_BTS, y_BSD=None, cross_mask_BTS=None) -> np.ndarray:
    """From embedded tokens to what the norm behind the last block leaves."""
    config = stream.config
    pre = stream.config.norm_position == 'pre'

    def branches(block):
        yield block.attention_norm, lambda z: expected(block.attention, z, mask_BTS)
        if y_BSD is not None:
            cross = block.cross_attention
            yield block.cross_norm, lambda z: expected(cross, z, cross_mask_BTS, y_BSD)
        yield block.mlp_norm, lambda z: _mlp(config.activation, block.mlp, z)

    for index in range(config.num_layers):
        for norm, branch in branches(layer_of(stream.blocks, index)):
            if pre:
                x_BTD = x_BTD + branch(_norm(config, norm, x_BTD))
            else:
                x_BTD = _norm(config, norm, x_BTD + branch(x_BTD))
    return _norm(config, stream.final_norm, x_BTD) if pre else x_BTD


def _mlp(activation, mlp, z_BTD) -> np.ndarray:
    hidden_BTF = z_BTD @ _array(mlp.w_in_DF) + _bias(mlp.b_in_F)
    if activation in GATES:
        gate_BTF = z_BTD @ _array(mlp.w_gate_DF) + _bias(mlp.b_gate_F)
        hidden_BTF = GATES[activation](gate_BTF) * hidden_BTF
    else:
        hidden_BTF = ACTIVATIONS[activation](hidden_BTF)
    return hidden_BTF @ _array(mlp.w_out_FD) + _bias(mlp.b_out_D)


def _embed(stream, tokens_BT, segments_BT, table_VD=None) -> np.ndarray:
    """Tokens and their positions in their segments, looked up one by one."""
    config = stream.config
    D = config.d_model
    table_VD = _array(stream.w_embedding_VD if table_VD is None else table_VD)
    x_BTD = np.zeros((*tokens_BT.shape, D))
    for b, t in np.ndindex(*tokens_BT.shape):
        x_BTD[b, t] = table_VD[tokens_BT[b, t]]
        position = (segments_BT[b, :t] == segments_BT[b, t]).sum()
        if config.positions == 'learned':
            x_BTD[b, t] += _array(stream.w_position_TD)[position]
        elif config.positions == 'sinusoidal':
            half = (D + 1) // 2
            std = 0.02 if config.init == 'nanogpt' else D**-0.5
            for d in range(D):
                angle = position / 10_000 ** (d % half / half)
                x_BTD[b, t, d] += (np.sin if d < half else np.cos)(angle) * (
                    2**0.5 * std * config.init_embedding
                )
    return x_BTD * D**0.5 if config.scale_embeddings else x_BTD


def _norm(config, norm, x_BTD):
    if config.norm == 'layernorm':
        x_BTD = x_BTD - x_BTD.mean(-1, keepdims=True)
    unit_BTD = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-5)
    return unit_BTD * (1 if norm.g_D is None else _array(norm.g_D)) + _bias(norm.b_D)


def _array(parameter):
    return np.asarray(parameter[...], np.float64)


def _bias(parameter):
    return 0 if parameter is None else _array(parameter)

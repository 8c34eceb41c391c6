"""The slow reference: a transformer's forward pass in float64 numpy, one layer after another.

It shares no code with the models: attention is the oracle's, from only A[n] and B[n].
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
    """The logits of a model of any kind, in float64: logits_BTV.

    A row may hold several sequences, which do not see each other.

    Args:
        model: A Decoder, Encoder or EncoderDecoder.
        tokens_BT: The tokens for which logits are computed.
        segments_BT: The number of the sequence of each token, 0 for padding. By default, each row
            is one sequence.
        source_BS: The tokens of the encoder, for an EncoderDecoder.
        source_segments_BS: The number of the sequence of each source token. A token attends only
            to source tokens with its own number.
    """
    if segments_BT is None:
        segments_BT = np.ones_like(tokens_BT)

    # The output of the encoder, to which the decoder attends.
    y_BSD = cross_mask_BTS = None
    if source_BS is not None:
        table_VD = model.w_embedding_VD if model.config.shared_embeddings else None
        x_BSD = _embed(model.encoder, source_BS, source_segments_BS, table_VD)
        source_mask_BSS = _same_segment(source_segments_BS, source_segments_BS)
        y_BSD = _run(model.encoder, x_BSD, source_mask_BSS)
        cross_mask_BTS = _same_segment(segments_BT, source_segments_BS)

    # A decoder sees no later tokens.
    mask_BTT = _same_segment(segments_BT, segments_BT)
    if model.config.kind != 'encoder':
        is_causal_TT = np.tri(tokens_BT.shape[1], dtype=bool)
        mask_BTT &= is_causal_TT
    x_BTD = _embed(model, tokens_BT, segments_BT)
    out_BTD = _run(model, x_BTD, mask_BTT, y_BSD, cross_mask_BTS)
    if model.config.tied_embeddings:
        return out_BTD @ _array(model.w_embedding_VD).T
    return out_BTD @ _array(model.w_output_DV)


def _same_segment(segments_BT, segments_BS) -> np.ndarray:
    """mask_BTS of equal segments. Padding sees every key, so that its softmax is finite."""
    mask_BTS = np.zeros((*segments_BT.shape, segments_BS.shape[1]), bool)
    for b, t, s in np.ndindex(*mask_BTS.shape):
        is_padding = segments_BT[b, t] == 0
        mask_BTS[b, t, s] = is_padding or segments_BT[b, t] == segments_BS[b, s]
    return mask_BTS


def _run(stream, x_BTD, mask_BTS, y_BSD=None, cross_mask_BTS=None) -> np.ndarray:
    """The output of all blocks, one after another, with cross-attention to y_BSD if given.

    A block adds its branches to the stream x: attention, cross-attention and MLP. With
    norm_position='pre', the input of each branch is normed, and so is the last output. Otherwise
    the stream is normed after each branch.
    """
    config = stream.config
    is_pre_norm = config.norm_position == 'pre'

    def branches(block):
        """The norm and the function of each branch of a block."""
        yield block.attention_norm, lambda z_BTD: expected(block.attention, z_BTD, mask_BTS)
        if y_BSD is not None:
            cross = block.cross_attention
            yield block.cross_norm, lambda z_BTD: expected(cross, z_BTD, cross_mask_BTS, y_BSD)
        yield block.mlp_norm, lambda z_BTD: _mlp(config.activation, block.mlp, z_BTD)

    for index in range(config.num_layers):
        block = layer_of(stream.blocks, index)
        for norm, branch in branches(block):
            if is_pre_norm:
                x_BTD = x_BTD + branch(_norm(config, norm, x_BTD))
            else:
                x_BTD = _norm(config, norm, x_BTD + branch(x_BTD))
    if is_pre_norm:
        return _norm(config, stream.final_norm, x_BTD)
    return x_BTD


def _mlp(activation, mlp, z_BTD) -> np.ndarray:
    hidden_BTF = z_BTD @ _array(mlp.w_in_DF) + _bias(mlp.b_in_F)
    if activation in GATES:
        gate_BTF = z_BTD @ _array(mlp.w_gate_DF) + _bias(mlp.b_gate_F)
        hidden_BTF = GATES[activation](gate_BTF) * hidden_BTF
    else:
        hidden_BTF = ACTIVATIONS[activation](hidden_BTF)
    return hidden_BTF @ _array(mlp.w_out_FD) + _bias(mlp.b_out_D)


def _embed(stream, tokens_BT, segments_BT, table_VD=None) -> np.ndarray:
    """The stream x_BTD before the first block: embeddings of tokens and of their positions.

    Positions count from 0 in each segment. If `table_VD` is given, its rows are the embeddings of
    tokens instead of the stream's own.
    """
    config = stream.config
    D = config.d_model
    table_VD = _array(stream.w_embedding_VD if table_VD is None else table_VD)
    x_BTD = np.zeros((*tokens_BT.shape, D))
    for b, t in np.ndindex(*tokens_BT.shape):
        x_BTD[b, t] = table_VD[tokens_BT[b, t]]
        is_earlier_in_segment = segments_BT[b, :t] == segments_BT[b, t]
        position = is_earlier_in_segment.sum()
        if config.positions == 'learned':
            x_BTD[b, t] += _array(stream.w_position_TD)[position]
        elif config.positions == 'sinusoidal':
            x_BTD[b, t] += _sinusoids(config, position)
    if config.scale_embeddings:
        x_BTD *= D**0.5
    return x_BTD


def _sinusoids(config, position) -> np.ndarray:
    """The sinusoidal embedding of a position, in D channels (Vaswani et al. 2017).

    The first half of the channels has sines, the second half cosines. The root mean square equals
    the standard deviation of token embeddings, `std * init_embedding`.
    """
    D = config.d_model
    half = (D + 1) // 2
    std = 0.02 if config.init == 'nanogpt' else D**-0.5
    amplitude = 2**0.5 * std * config.init_embedding  # the mean square of sin is 1/2
    sinusoid_D = np.zeros(D)
    for d in range(D):
        angle = position / 10_000 ** (d % half / half)
        sinusoid_D[d] = amplitude * (np.sin(angle) if d < half else np.cos(angle))
    return sinusoid_D


def _norm(config, norm, x_BTD):
    """LayerNorm or RMSNorm, with a gain and a bias if the norm has them."""
    if config.norm == 'layernorm':
        x_BTD = x_BTD - x_BTD.mean(-1, keepdims=True)
    unit_BTD = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-5)
    gain_D = 1 if norm.g_D is None else _array(norm.g_D)
    return unit_BTD * gain_D + _bias(norm.b_D)


def _array(parameter):
    return np.asarray(parameter[...], np.float64)


def _bias(parameter):
    return 0 if parameter is None else _array(parameter)

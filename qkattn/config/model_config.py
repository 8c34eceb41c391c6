"""The settings of a model."""

import dataclasses
from typing import Any, Literal

from qkattn.config.calls import split_variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer.

    Attributes:
      kind: 'decoder' (causal language model), 'encoder' (bidirectional; masked language model or
        labels) or 'encoder_decoder' (translation).
      score, value: the attention variant; names, names with options, or import paths. In an
        encoder-decoder, that of the decoder's self-attention.
      encoder_variant, cross_variant: 'score/value' of the encoder's self-attention and of the
        cross-attention in an encoder-decoder; None is score/value.
      d_model: D, width of the residual stream.
      num_layers: L.
      num_encoder_layers: of an encoder-decoder; None is num_layers.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads; None is num_heads.
      head_size: H; None is d_model / num_heads.
      d_ff: F, width of the MLP; None is 4 d_model.
      context: longest sequence in tokens.
      source_context: longest source of an encoder-decoder, in tokens; None is context.
      vocab_size: V.
      norm: 'layernorm' (Ba et al. 2016) or 'rmsnorm' (Zhang & Sennrich 2019).
      norm_position: 'pre', x + f(norm(x)), with a norm after the last block (Xiong et al. 2020), or
        'post', norm(x + f(x)) (Vaswani et al. 2017).
      activation: of the MLP: 'gelu' (exact), 'gelu_tanh' (its tanh form, as in GPT-2) or 'relu'.
      positions: 'learned' or 'sinusoidal' embeddings added to the tokens', 'rope' or 'alibi' inside
        attention, or 'none'.
      attention_gain: whether the norms before attention have a learned gain, an undecayed diagonal
        factor of W_Q, W_K and W_V; without it, 'query_free' has no trained part of W_Q left. Only
        pre-norm can go without.
      qk_norm, score_scale, logit_cap, window: options of attention, see AttentionSpec.
      biases: biases in projections, MLP and layer norms.
      tied_embeddings: the output matrix is the transposed input embedding.
      shared_embeddings: encoder and decoder of an encoder-decoder read one embedding.
      scale_embeddings: embeddings, positions included, are multiplied by sqrt(D), which gives
        them unit variance (Vaswani et al. 2017, section 3.4).
      init: initial standard deviations: 'fan_in', with which a matrix has outputs as large as its
        inputs (embeddings D^-1/2; see Score and Value for attention), or 'nanogpt': 0.02 for all
        matrices and embeddings (Radford et al. 2019). In both, the last matrix of every branch has
        a factor (2 L)^-1/2, gains start at 1 and biases at 0.
      init_embedding, init_qk, init_vo, init_mlp: factors on the initial standard deviations of the
        embeddings (tokens, positions, output matrix), of the matrices of Scores, of Values, and of
        MLPs. A matrix that a Value shares with its Score is the Score's. Values that are not
        random stay: gains, and the size of the signs in 'collaborative'.
      dropout: rate on embeddings and on every branch of a block.
      attention_dropout: rate on attention probabilities; None is dropout.
      activation_dropout: rate on the hidden layer of the MLP.
      remat: recompute a layer's activations in the backward pass.
      scan_unroll: layers unrolled per iteration of the scan over layers; None unrolls all of them
        below 12 layers (a rolled scan costs speed) and none from 12 on (it saves compile time).
      compute_dtype: 'float32' or 'bfloat16'; parameters stay in float32.
    """

    kind: Literal['decoder', 'encoder', 'encoder_decoder'] = 'decoder'
    score: str = 'qk'
    value: str = 'vo'
    encoder_variant: str | None = None
    cross_variant: str | None = None
    d_model: int = 128
    num_layers: int = 4
    num_encoder_layers: int | None = None
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_size: int | None = None
    d_ff: int | None = None
    context: int = 128
    source_context: int | None = None
    vocab_size: int = 256
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'
    norm_position: Literal['pre', 'post'] = 'pre'
    activation: Literal['gelu', 'gelu_tanh', 'relu'] = 'gelu_tanh'
    positions: Literal['learned', 'sinusoidal', 'rope', 'alibi', 'none'] = 'learned'
    attention_gain: bool = True
    qk_norm: bool = False
    score_scale: float = 1.0
    logit_cap: float | None = None
    window: int | None = None
    biases: bool = False
    tied_embeddings: bool = True
    shared_embeddings: bool = True
    scale_embeddings: bool = False
    init: Literal['fan_in', 'nanogpt'] = 'fan_in'
    init_embedding: float = 1.0
    init_qk: float = 1.0
    init_vo: float = 1.0
    init_mlp: float = 1.0
    dropout: float = 0.0
    attention_dropout: float | None = None
    activation_dropout: float = 0.0
    remat: bool = False
    scan_unroll: int | None = None
    compute_dtype: Literal['float32', 'bfloat16'] = 'float32'

    @property
    def mlp_width(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def num_branches(self) -> int:
        """Residual branches from the embedding to the output: attentions and MLPs."""
        return (3 if self.kind == 'encoder_decoder' else 2) * self.num_layers

    @property
    def probability_dropout(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def drops(self) -> bool:
        """Whether training draws random numbers for dropout of any kind."""
        return bool(self.dropout or self.probability_dropout or self.activation_dropout)

    @property
    def unroll(self) -> int:
        if self.scan_unroll is not None:
            return self.scan_unroll
        return self.num_layers if self.num_layers < 12 else 1

    @property
    def encoder(self) -> 'ModelConfig':
        """The encoder of an encoder-decoder as a model of its own."""
        layers, length = self.num_encoder_layers, self.source_context
        return dataclasses.replace(
            self,
            kind='encoder',
            num_layers=self.num_layers if layers is None else layers,
            context=self.context if length is None else length,
            **_fields(self.encoder_variant),
        )

    @property
    def cross(self) -> 'ModelConfig':
        """The sizes and options of the decoder's attention to the encoder.

        It has no positions inside attention, which mean different things in the two streams.
        """
        positions = self.positions if self.positions not in ('rope', 'alibi') else 'none'
        variant = _fields(self.cross_variant)
        return dataclasses.replace(self, positions=positions, window=None, **variant)


def _fields(variant: str | None) -> dict[str, Any]:
    if variant is None:
        return {}
    score, value = split_variant(variant)
    return {'score': score, 'value': value}

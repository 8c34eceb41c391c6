"""The settings of a model."""

import dataclasses
import functools
from typing import Any, Literal

from qkattn.config.setting import setting
from qkattn.config.variant import Variant, split_pattern
from qkattn.errors import SpecError

# Bounds of a rate.
RATE: dict[str, Any] = {'least': 0, 'below': 1}
# Bounds of a number of heads or layers.
COUNT: dict[str, Any] = {'least': 1, 'most': 2**14}
# Bounds of the width of the residual stream or of a head.
WIDTH: dict[str, Any] = {'least': 1, 'most': 2**17}

# With fewer layers, unrolling them is faster than a scan.
SCANNED_LAYERS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of a transformer."""

    kind: Literal['decoder', 'encoder', 'encoder_decoder'] = setting(
        'decoder', "Causal 'decoder', bidirectional 'encoder', or 'encoder_decoder' (translation)."
    )
    score: str = setting(
        'qk',
        'Score of the attention: a name, with options as in low_rank(rank=8), or an import path.',
        registries=('qkattn.attention.registry:SCORES',),
    )
    value: str = setting(
        'vo',
        'Value of the attention, in the same form as score.',
        registries=('qkattn.attention.registry:VALUES',),
    )
    encoder_variant: str | None = setting(
        None, "'score/value' in the encoder of an encoder-decoder; None is that of the decoder."
    )
    cross_variant: str | None = setting(
        None, "'score/value' of the cross-attention; None is that of the decoder's self-attention."
    )
    pattern: str | None = setting(
        None, "Variants of the layers in turn, as in 'qk/vo,qk/no_v'; None is score/value in all."
    )
    d_model: int = setting(128, 'D, width of the residual stream.', **WIDTH)
    num_layers: int = setting(4, 'L, number of layers.', **COUNT)
    num_encoder_layers: int | None = setting(
        None, 'Layers of the encoder; None is num_layers.', **COUNT
    )
    num_heads: int = setting(4, 'N, query heads.', **COUNT)
    num_kv_heads: int | None = setting(None, 'K, key and value heads; None is num_heads.', **COUNT)
    head_size: int | None = setting(None, 'H, width of a head; None is D / N.', **WIDTH)
    d_ff: int | None = setting(
        None,
        'F, width of the MLP; None is 4 d_model, or 8/3 d_model with a gate.',
        least=1,
        most=2**20,
    )
    context: int = setting(128, 'Longest sequence, in tokens.', least=1)
    source_context: int | None = setting(
        None, 'Longest source, in tokens; None is context.', least=1
    )
    vocab_size: int = setting(256, 'V, size of the vocabulary.', least=1)
    norm: Literal['layernorm', 'rmsnorm'] = setting(
        'layernorm', "'layernorm' (Ba et al. 2016) or 'rmsnorm' (Zhang & Sennrich 2019)."
    )
    norm_position: Literal['pre', 'post'] = setting(
        'pre', "'pre', x + f(norm(x)), or 'post', norm(x + f(x)) (Vaswani et al. 2017)."
    )
    activation: Literal['gelu', 'gelu_tanh', 'relu', 'geglu', 'swiglu', 'reglu'] = setting(
        'gelu_tanh',
        "Of the MLP: 'gelu' (exact), 'gelu_tanh' (as in GPT-2) or 'relu'; 'geglu', 'swiglu' and "
        "'reglu' add a gate matrix (Shazeer 2020).",
    )
    positions: Literal['learned', 'sinusoidal', 'rope', 'alibi', 'none'] = setting(
        'learned', "'learned' or 'sinusoidal' embeddings, 'rope' or 'alibi' in attention, 'none'."
    )
    attention_gain: bool = setting(
        True, 'Norms before attention have an undecayed gain; only pre-norm can go without.'
    )
    qk_norm: bool = setting(False, 'Queries and keys have RMS 1, times a gain (Henry et al. 2020).')
    score_scale: float = setting(
        1.0, "Factor on the logits, in addition to the Score's own scale.", above=0
    )
    logit_cap: float | None = setting(
        None, 'c in c tanh(logit / c) (Gemma 2, 2024); None is off.', above=0, most=1e9
    )
    normalizer: str = setting(
        'softmax',
        'Function of the logits of a query: a name, with options as in sigmoid(bias=-6.0), or an '
        'import path.',
        registries=('qkattn.attention.normalizers:NORMALIZERS',),
    )
    window: int | None = setting(
        None, 'A query attends to positions at distance |t - s| < window; None is all.', least=1
    )
    kernel: Literal['auto', 'einsum', 'blockwise', 'dot_product', 'splash'] = setting(
        'auto',
        "What computes attention: 'einsum', 'blockwise' (memory linear in the context), "
        "'dot_product' (cuDNN on GPUs), 'splash' (TPUs), or 'auto'. They differ in rounding, "
        'and in the draws of attention dropout.',
    )
    biases: bool = setting(False, 'Biases in projections, MLP and layer norms.')
    tied_embeddings: bool = setting(True, 'The output matrix is the transposed input embedding.')
    shared_embeddings: bool = setting(True, 'Encoder and decoder share one embedding.')
    scale_embeddings: bool = setting(False, 'Embeddings times sqrt(D) (Vaswani et al. 2017).')
    init: Literal['fan_in', 'nanogpt'] = setting(
        'fan_in',
        "Initial standard deviations: 'fan_in' (outputs as large as inputs; embeddings D^-1/2) or "
        "'nanogpt' (0.02); the last matrix of a branch has a factor (2 L)^-1/2.",
    )
    init_embedding: float = setting(1.0, 'Factor on the initial deviation of embeddings.', above=0)
    init_qk: float = setting(1.0, 'Factor on the initial deviation of Score matrices.', above=0)
    init_vo: float = setting(1.0, 'Factor on the initial deviation of Value matrices.', above=0)
    init_mlp: float = setting(1.0, 'Factor on the initial deviation of MLP matrices.', above=0)
    dropout: float = setting(0.0, 'Rate on embeddings and on every branch of a block.', **RATE)
    attention_dropout: float | None = setting(
        None, 'Rate on attention probabilities; None is dropout.', **RATE
    )
    activation_dropout: float = setting(0.0, 'Rate on the hidden layer of the MLP.', **RATE)
    remat: Literal['none', 'full', 'dots'] = setting(
        'none', "What the backward pass recomputes: 'none', 'full' or 'dots' (all but products)."
    )
    scan_unroll: int | None = setting(
        None,
        'Layers per step of the scan; None is all below 12 layers without remat, else 1.',
        **COUNT,
    )
    compute_dtype: Literal['float32', 'bfloat16'] = setting(
        'float32', "'float32' or 'bfloat16'; parameters stay in float32."
    )

    @property
    def variant(self) -> Variant:
        """The variant of self-attention; in an encoder-decoder, the decoder's self-attention."""
        return Variant(self.score, self.value)

    @property
    def mlp_width(self) -> int:
        """F, the width of the MLP: `d_ff` or its default."""
        if self.d_ff is not None:
            return self.d_ff
        if self.has_gate:
            # 8/3 d_model, rounded. The gate is a third matrix, so the parameter count is the same.
            return (8 * self.d_model + 1) // 3
        return 4 * self.d_model

    @property
    def has_gate(self) -> bool:
        """Whether the MLP has a gate, such as SwiGLU."""
        return self.activation.endswith('glu')

    @property
    def residual_gain(self) -> float:
        """Factor on the initial deviation of the last matrix of each residual branch.

        The variance of the stream then does not grow with the number of branches.
        """
        branches_per_layer = 3 if self.kind == 'encoder_decoder' else 2
        num_branches = branches_per_layer * self.num_layers
        return num_branches**-0.5

    @property
    def probability_dropout(self) -> float:
        """Dropout rate on attention probabilities: `attention_dropout` or its default."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def drops(self) -> bool:
        """Whether training draws random numbers for dropout of any kind."""
        return bool(self.dropout or self.probability_dropout or self.activation_dropout)

    @property
    def unroll(self) -> int:
        """Layers per step of the scan over layers: `scan_unroll` or its default."""
        if self.scan_unroll is not None:
            return self.scan_unroll
        # Remat saves no memory in unrolled layers: XLA removes the recomputation as redundant.
        if self.remat == 'none' and self.num_layers < SCANNED_LAYERS:
            return self.num_layers
        return 1

    @functools.cached_property
    def cycle(self) -> tuple['ModelConfig', ...]:
        """The settings of each variant in the pattern; layer l has `cycle[l % len(cycle)]`.

        For example, with the pattern 'qk/vo, qk/no_o', layers alternate between two variants.
        Without a pattern, there is one variant.

        Raises:
            SpecError: The pattern has more variants than layers, does not begin with the model's
                variant, or belongs to an encoder-decoder.
        """
        if self.pattern is None:
            return (self,)

        variants = split_pattern(self.pattern)  # such as ['qk/vo', 'qk/no_o']
        setting_text = f'pattern={self.pattern!r}'
        if self.kind == 'encoder_decoder':
            raise SpecError(
                f'{setting_text} is for a decoder or an encoder, not for an encoder_decoder'
            )
        if len(variants) > self.num_layers:
            raise SpecError(
                f'{setting_text} has {len(variants)} variants, more than '
                f'num_layers={self.num_layers}'
            )
        if variants[0] != str(self.variant):
            raise SpecError(
                f'{setting_text} must begin with the variant of the model, {self.variant}'
            )

        configs = []
        for variant in variants:
            score_and_value = _variant_fields(variant)  # {'score': 'qk', 'value': 'no_o'}
            configs.append(dataclasses.replace(self, pattern=None, **score_and_value))
        return tuple(configs)

    @functools.cached_property
    def encoder(self) -> 'ModelConfig':
        """The settings of an encoder-decoder's encoder, as a model of kind 'encoder'."""
        return dataclasses.replace(
            self,
            kind='encoder',
            num_layers=self.num_encoder_layers or self.num_layers,
            context=self.source_context or self.context,
            **_variant_fields(self.encoder_variant),
        )

    @functools.cached_property
    def cross(self) -> 'ModelConfig':
        """The settings of the decoder's cross-attention to the encoder."""
        # Distances between source and target positions mean nothing, so they are not used.
        positions = self.positions
        if positions in ('rope', 'alibi'):
            positions = 'none'
        return dataclasses.replace(
            self, positions=positions, window=None, **_variant_fields(self.cross_variant)
        )


def _variant_fields(variant: str | None) -> dict[str, Any]:
    """Returns a variant as the fields {'score': ..., 'value': ...}; {} for None."""
    if variant is None:
        return {}
    return Variant.parse(variant)._asdict()

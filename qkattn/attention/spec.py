"""The specification of one attention layer."""

import dataclasses
from typing import Literal

from qkattn.config.calls import Variant
from qkattn.errors import SpecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Sizes and options of one attention layer.

    Attributes:
      score: name of a Score, e.g. 'qk', with options as in 'low_rank(rank=8)', or an import path.
      value: name of a Value, likewise.
      d_model: D, width of the residual stream.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads of the circuits that have them; divides N; None is N.
      head_size: H, width of one head; None is D / N.
      biases: whether every projection adds a bias.
      residual_gain: factor on the initial standard deviation of the last matrix of the OV circuit,
        1/sqrt(2 L) in a network of L layers (Radford et al. 2019, section 2.3).
      init: 'fan_in', the standard deviations that Scores and Values document, or 'nanogpt': 0.02
        for every matrix, times residual_gain for the last one of the OV circuit.
      init_qk, init_vo: factors on the initial standard deviations of the matrices of the Score, and
        of those of the Value.
      positions: position encoding inside the layer, 'rope', 'alibi' or 'none'; encodings that are
        added to the stream belong to the model.
      qk_norm: whether queries and keys are divided by their root mean square and multiplied by a
        learned gain (Henry et al. 2020; Dehghani et al. 2023), before they are rotated.
      score_scale: factor on the logits beside the Score's own scale.
      logit_cap: c in c tanh(logit / c) (Gemma 2, 2024); None is off.
      normalizer: name of a Normalizer, which takes the place of softmax, with options as in
        'sigmoid(bias=-6.0)', or an import path.
      window: a query attends to positions at distance |t - s| < window; None is all.
      kernel: what computes probabilities and the mix of values; see `kernels.choice`.
    """

    score: str = 'qk'
    value: str = 'vo'
    d_model: int
    num_heads: int
    num_kv_heads: int = None  # an int in every spec: None is replaced when it is built
    head_size: int = None
    biases: bool = False
    residual_gain: float = 1.0
    init: Literal['fan_in', 'nanogpt'] = 'fan_in'
    init_qk: float = 1.0
    init_vo: float = 1.0
    positions: Literal['none', 'rope', 'alibi'] = 'none'
    qk_norm: bool = False
    score_scale: float = 1.0
    logit_cap: float | None = None
    normalizer: str = 'softmax'
    window: int | None = None
    kernel: str = 'auto'

    def __post_init__(self) -> None:
        for field in ('d_model', 'num_heads', 'num_kv_heads', 'head_size'):
            number = getattr(self, field)
            if number is None and field == 'num_kv_heads':
                object.__setattr__(self, field, number := self.num_heads)
            if number is None and field == 'head_size':
                if self.d_model % self.num_heads:
                    raise SpecError(
                        f'd_model={self.d_model} must be a multiple of '
                        f'num_heads={self.num_heads}, or head_size must be given'
                    )
                object.__setattr__(self, field, number := self.d_model // self.num_heads)
            if not isinstance(number, int) or number < 1:
                raise SpecError(f'{field}={number!r} must be a whole number of at least 1')
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f'num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}'
            )
        if self.positions not in ('none', 'rope', 'alibi'):
            raise SpecError(f'positions={self.positions!r} must be none, rope or alibi')
        if not self.score_scale > 0:
            raise SpecError(f'score_scale={self.score_scale} must be above 0')
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise SpecError(f'logit_cap={self.logit_cap} must be above 0, or None')
        if self.window is not None and self.window < 1:
            raise SpecError(f'window={self.window} must be at least 1, or None')

    @property
    def variant(self) -> Variant:
        return Variant(self.score, self.value)

    @property
    def letters(self) -> dict[str, int]:
        """The sizes by the letters in array names."""
        return {
            'D': self.d_model,
            'E': self.d_model,
            'N': self.num_heads,
            'K': self.num_kv_heads,
            'H': self.head_size,
        }

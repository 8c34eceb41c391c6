"""The specification of an attention layer, and checks of options for Scores and Values."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

from qkattn.config.model_config import WIDTH
from qkattn.config.variant import Variant
from qkattn.errors import SpecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Sizes and options of an attention layer; `ModelConfig` documents fields without comment."""

    score: str = 'qk'
    value: str = 'vo'
    d_model: int
    num_heads: int
    num_kv_heads: int = None  # K, divides N; None becomes N
    head_size: int = None  # H; None becomes D / N
    biases: bool = False
    # Factor on the std of the OV circuit's last matrix: 1/sqrt(2 L) in a model of L layers (Radford
    # et al. 2019, section 2.3).
    residual_gain: float = 1.0
    # 'fan_in' is the std that Scores and Values choose, 'nanogpt' is 0.02 for every matrix.
    init: Literal['fan_in', 'nanogpt'] = 'fan_in'
    init_qk: float = 1.0
    init_vo: float = 1.0
    # Other position encodings are added to the stream, outside of attention.
    positions: Literal['none', 'rope', 'alibi'] = 'none'
    qk_norm: bool = False
    score_scale: float = 1.0
    logit_cap: float | None = None
    normalizer: str = 'softmax'
    window: int | None = None
    kernel: str = 'auto'

    def __post_init__(self) -> None:
        # Check sizes, and set those that are None. A frozen dataclass needs object.__setattr__.
        self._convert_size('d_model')
        self._convert_size('num_heads')

        if self.num_kv_heads is None:
            object.__setattr__(self, 'num_kv_heads', self.num_heads)
        self._convert_size('num_kv_heads')

        if self.head_size is None:
            if self.d_model % self.num_heads:
                raise SpecError(
                    f'd_model={self.d_model} must be a multiple of '
                    f'num_heads={self.num_heads}, or head_size must be given'
                )
            object.__setattr__(self, 'head_size', self.d_model // self.num_heads)
        self._convert_size('head_size')

        if self.window is not None:
            self._convert_size('window', 'a whole number of at least 1, or None')

        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f'num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}'
            )

        if self.positions not in ('none', 'rope', 'alibi'):
            raise SpecError(f'positions={self.positions!r} must be none, rope or alibi')
        if self.init not in ('fan_in', 'nanogpt'):
            raise SpecError(f'init={self.init!r} must be fan_in or nanogpt')

        for field in ('score_scale', 'init_qk', 'init_vo'):
            number = getattr(self, field)
            if not _is_finite(number) or number <= 0:
                raise SpecError(f'{field}={number!r} must be a finite number above 0')
        if not _is_finite(self.residual_gain) or self.residual_gain < 0:
            raise SpecError(
                f'residual_gain={self.residual_gain!r} must be a finite number at least 0'
            )
        cap = self.logit_cap
        if cap is not None and (not _is_finite(cap) or cap <= 0):
            raise SpecError(f'logit_cap={cap!r} must be a finite number above 0, or None')

    def _convert_size(self, field: str, valid: str = 'a whole number of at least 1') -> None:
        """Converts an integer field, such as numpy.int64(8), to int.

        Raises SpecError if the field is not an integer of at least 1; `valid` ends the message.
        """
        size = getattr(self, field)
        if not _is_whole(size) or size < 1:
            raise SpecError(f'{field}={size!r} must be {valid}')
        object.__setattr__(self, field, int(size))

    @property
    def variant(self) -> Variant:
        return Variant(self.score, self.value)

    @property
    def letters(self) -> dict[str, int]:
        """The size of each axis letter in array names; E is a second axis of size D."""
        return {
            'D': self.d_model,
            'E': self.d_model,
            'N': self.num_heads,
            'K': self.num_kv_heads,
            'H': self.head_size,
        }


def _is_whole(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def _is_finite(number: Any) -> bool:
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    return is_number and -math.inf < number < math.inf


# A function (spec, name, option, value) that raises SpecError for an invalid option. For
# 'low_rank(rank=8)', the last three arguments are 'low_rank', 'rank' and 8.
Check = Callable[[AttentionSpec, str, str, Any], None]


def whole(low: int, top: Literal['d_model', 'd_model // 2'] | None = None) -> Check:
    """Returns a check that an option is None or an integer in [low, top].

    For example, `whole(1, 'd_model')` accepts None and 1 to 64 if d_model=64. The default of `top`
    is the largest d_model of any model.
    """

    def check(spec: AttentionSpec, name: str, option: str, value: Any) -> None:
        """Raises SpecError for an invalid value, such as rank=0 in 'low_rank(rank=0)'."""
        if value is None:
            return

        if top is None:
            largest = WIDTH['most']
            largest_text = f'{largest}'
        else:
            largest = spec.d_model if top == 'd_model' else spec.d_model // 2
            largest_text = f'{top}={largest}'

        if not _is_whole(value) or not low <= value <= largest:
            raise SpecError(
                f'{name}({option}={value!r}) must be a whole number from {low} to {largest_text}'
            )

    return check


def one_of(*valid: Any) -> Check:
    """Returns a check that an option has one of these values."""

    def check(spec: AttentionSpec, name: str, option: str, value: Any) -> None:
        for choice in valid:
            has_same_type = type(value) is type(choice)  # because 1 == True
            if has_same_type and value == choice:
                return
        listed = ', '.join(repr(choice) for choice in valid)
        raise SpecError(f'{name}({option}={value!r}) must be one of {listed}')

    return check

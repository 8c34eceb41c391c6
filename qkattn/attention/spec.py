"""The specification of one attention layer, and checks that Scores and Values share."""

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
    """Sizes and options of one attention layer; see `ModelConfig` for fields without comment."""

    score: str = 'qk'
    value: str = 'vo'
    d_model: int
    num_heads: int
    num_kv_heads: int = None  # K, divides N; None is replaced by N when the spec is built
    head_size: int = None  # H; None is replaced by D / N
    biases: bool = False
    # Factor on the initial std of the last matrix of the OV circuit: 1/sqrt(2 L) in a network of L
    # layers (Radford et al. 2019, section 2.3).
    residual_gain: float = 1.0
    # 'fan_in' is the std that Scores and Values document, 'nanogpt' 0.02 for every matrix.
    init: Literal['fan_in', 'nanogpt'] = 'fan_in'
    init_qk: float = 1.0
    init_vo: float = 1.0
    positions: Literal['none', 'rope', 'alibi'] = 'none'  # others are added to the stream
    qk_norm: bool = False
    score_scale: float = 1.0
    logit_cap: float | None = None
    normalizer: str = 'softmax'
    window: int | None = None
    kernel: str = 'auto'

    def __post_init__(self) -> None:
        for field in ('d_model', 'num_heads', 'num_kv_heads', 'head_size', 'window'):
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
            if number is None and field == 'window':
                continue
            if not _is(numbers.Integral, number) or number < 1:
                optional = ', or None' * (field == 'window')
                raise SpecError(
                    f'{field}={number!r} must be a whole number of at least 1{optional}'
                )
            object.__setattr__(self, field, int(number))
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f'num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}'
            )
        if self.positions not in ('none', 'rope', 'alibi'):
            raise SpecError(f'positions={self.positions!r} must be none, rope or alibi')
        if self.init not in ('fan_in', 'nanogpt'):
            raise SpecError(f'init={self.init!r} must be fan_in or nanogpt')
        for field in ('score_scale', 'init_qk', 'init_vo', 'residual_gain', 'logit_cap'):
            number, gain, cap = getattr(self, field), field == 'residual_gain', field == 'logit_cap'
            in_range = _is(numbers.Real, number) and (0 < number < math.inf or gain and number == 0)
            if not in_range and not (cap and number is None):
                valid = ('at least 0' if gain else 'above 0') + ', or None' * cap
                raise SpecError(f'{field}={number!r} must be a finite number {valid}')

    @property
    def variant(self) -> Variant:
        return Variant(self.score, self.value)

    @property
    def letters(self) -> dict[str, int]:
        """The sizes by the letters in array names."""
        D, N, K, H = self.d_model, self.num_heads, self.num_kv_heads, self.head_size
        return {'D': D, 'E': D, 'N': N, 'K': K, 'H': H}


def _is(kind: type, number: Any) -> bool:
    return isinstance(number, kind) and not isinstance(number, bool)


# Raises SpecError unless (spec, name, option, value) fit together.
Check = Callable[[AttentionSpec, str, str, Any], None]


def whole(low: int, top: str | None = None) -> Check:
    """An option that is None or an int from `low` to 'd_model', 'd_model // 2' or the widest."""

    def check(spec: AttentionSpec, name: str, option: str, number: Any) -> None:
        widths = {None: WIDTH['most'], 'd_model': spec.d_model, 'd_model // 2': spec.d_model // 2}
        high = widths[top]
        if number is not None and not (_is(numbers.Integral, number) and low <= number <= high):
            limit = f'{top}={high}' if top else high
            valid = f'a whole number from {low} to {limit}'
            raise SpecError(f'{name}({option}={number!r}) must be {valid}')

    return check


def one_of(*valid: Any) -> Check:
    """An option with one of these values; 1 does not count as True."""

    def check(spec: AttentionSpec, name: str, option: str, value: Any) -> None:
        if not any(value == known and type(value) is type(known) for known in valid):
            listed = ', '.join(map(repr, valid))
            raise SpecError(f'{name}({option}={value!r}) must be one of {listed}')

    return check


def fixed_channels(heads: str) -> Check:
    """An option that is None or H different indices below D for each of the heads in a field."""

    def check(spec: AttentionSpec, name: str, option: str, fixed: Any) -> None:
        D, H, count = spec.d_model, spec.head_size, getattr(spec, heads)

        def fits(channels: Any) -> bool:
            whole = isinstance(channels, list | tuple) and {*map(type, channels)} == {int}
            return whole and len({*channels} & {*range(D)}) == len(channels) == H

        listed = isinstance(fixed, list | tuple)
        # A head that is wider than the stream is refused by `check`, with or without the option.
        if fixed is not None and H <= D and not (listed and [*map(fits, fixed)] == [True] * count):
            raise SpecError(
                f'{name}({option}={fixed!r}) must hold, for each of {heads}={count} heads, '
                f'head_size={H} different {option} below d_model={D}'
            )

    return check

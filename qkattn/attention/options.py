"""Checks of options and sizes that several variants share."""

from collections.abc import Sequence
from typing import Any

from qkattn.attention.spec import AttentionSpec
from qkattn.errors import SpecError


def require_whole(
    name: str, option: str, number: Any, low: int, high: int | None = None, top: str = ''
) -> None:
    """Raises SpecError unless `number` is an int from `low` to `high`.

    Args:
      name: the Score or Value.
      high: the largest valid number; None is no limit.
      top: what `high` is called in the message, e.g. 'd_model'.
    """
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or number < low or (high is not None and number > high):
        valid = f'of at least {low}' if high is None else f'from {low} to {top}={high}'
        raise SpecError(f'{name}({option}={number!r}) must be a whole number {valid}')


def require_one_of(name: str, option: str, value: Any, valid: Sequence[Any]) -> None:
    """Raises SpecError unless `value` is one of `valid`; 1 does not count as True."""
    if not any(value is known or (isinstance(value, str) and value == known) for known in valid):
        raise SpecError(
            f'{name}({option}={value!r}) must be one of {", ".join(repr(known) for known in valid)}'
        )


def require_slices(spec: AttentionSpec, name: str) -> None:
    """Raises SpecError unless the heads are slices of the stream, N H = D."""
    if spec.num_heads * spec.head_size != spec.d_model:
        raise SpecError(
            f'{name} uses slices of the stream as heads, so num_heads * head_size must equal '
            f'd_model={spec.d_model}, not {spec.num_heads} * {spec.head_size}'
        )


def require_fixed(
    name: str,
    option: str,
    fixed: Sequence[Sequence[int]] | None,
    spec: AttentionSpec,
    heads: str = 'num_heads',
) -> None:
    """Raises SpecError unless `fixed` is None or holds H different indices below D for each head.

    Args:
      option: what is fixed, 'rows' or 'columns'.
      heads: the field with the number of heads.
    """
    D, H, count = spec.d_model, spec.head_size, getattr(spec, heads)
    if fixed is None:
        return
    whole = [sorted(set(one) & set(range(D))) for one in fixed]
    if whole != [sorted(one) for one in fixed] or [len(one) for one in fixed] != [H] * count:
        raise SpecError(
            f'{name}({option}={fixed!r}) must hold, for each of {heads}={count} heads, '
            f'head_size={H} different {option} below d_model={D}'
        )

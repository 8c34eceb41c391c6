"""Checks of sizes and options that several variants share."""

from collections.abc import Sequence
from typing import Any

from qkattn.attention.spec import AttentionSpec
from qkattn.errors import SpecError


def require_whole(who: str, option: str, number: Any, low: int, high: int | None, top: str) -> None:
    """Raises unless `number` is an int from low to high (None is no limit), which `top` names."""
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or number < low or (high is not None and number > high):
        valid = f'of at least {low}' if high is None else f'from {low} to {top}={high}'
        raise SpecError(f'{who}({option}={number!r}) must be a whole number {valid}')


def require_one_of(who: str, option: str, word: Any, words: Sequence[Any]) -> None:
    """Raises unless `word` is one of `words`, type included: 1 is not True."""
    if not any(word is known or (isinstance(word, str) and word == known) for known in words):
        raise SpecError(
            f'{who}({option}={word!r}) must be one of {", ".join(repr(known) for known in words)}'
        )


def require_slices(spec: AttentionSpec, who: str) -> None:
    """Raises unless the heads are slices of the stream, N H = D."""
    if spec.num_heads * spec.head_size != spec.d_model:
        raise SpecError(
            f'{who} uses slices of the stream as heads, so num_heads * head_size must equal '
            f'd_model={spec.d_model}, not {spec.num_heads} * {spec.head_size}'
        )

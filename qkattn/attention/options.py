"""What several Scores need: checks of their options and products of projections with biases."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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


def composed(inner_DR: jax.Array, w_RNH: jax.Array, b_NH: nnx.Param | None) -> jax.Array:
    """The homogeneous matrix of x -> (x inner) W + b, where `inner_DR` is homogeneous itself."""
    both_DNH = jnp.tensordot(inner_DR, w_RNH[...], axes=1)
    return both_DNH if b_NH is None else both_DNH.at[-1].add(b_NH[...])

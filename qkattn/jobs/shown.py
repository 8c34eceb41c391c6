"""Texts as a terminal shows them: visible, and cut to the room they have."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tqdm


def loss_text(loss: Any, *, brief: bool = False, unit: bool = False) -> str:
    """The loss with four decimals; over several trials its range, and how many are not finite.

    `brief` is in fewer words, and with three decimals where there is a range; `unit` adds that of
    the numbers.
    """
    values = np.asarray(loss, np.float64).ravel()
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 'not finite'
    low, high = finite.min(), finite.max()
    if values.size == 1:
        text = f'{low:.4f}'
    else:
        text = f'{low:.3f}-{high:.3f}' if brief else f'{low:.4f} to {high:.4f}'
    text += ' nats/token' * unit
    diverged, word = values.size - finite.size, 'diverged' if brief else 'trials not finite'
    return f'{text} ({diverged} of {values.size} {word})' if diverged else text


def time_left(seconds: float, untimed: Mapping[str, int]) -> tuple[str, str]:
    """Briefly and in full; `untimed`: how many things to come, by noun, are not in `seconds`."""
    text = f'{tqdm.tqdm.format_interval(seconds)} left'
    counts = [f'{number} {noun}{"s" * (number != 1)}' for noun, number in untimed.items()]
    return (f'over {text}', f'{text} plus {" and ".join(counts)}') if counts else (text, text)


# What a terminal obeys instead of showing it: control codes and changes of the reading direction.
_OBEYED = re.compile(r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]')


def visible(text: str) -> str:
    """`text` on one line, with an escape such as \\x1b for each character that a terminal obeys."""
    return _OBEYED.sub(lambda match: match[0].encode('unicode_escape').decode(), text)


def short(text: str, limit: int) -> str:
    """`text`, its middle left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = max(0, limit - 1) // 2
    return f'{text[: limit - 1 - half]}…{text[len(text) - half :]}'

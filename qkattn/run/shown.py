"""Texts that are cut to the room they have."""

from typing import Any

import numpy as np


def loss_text(loss: Any, *, brief: bool = False) -> str:
    """The loss with four decimals; over several trials its range, and how many are not finite.

    `brief` is in fewer words, and with three decimals where there is a range.
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
    diverged, word = values.size - finite.size, 'diverged' if brief else 'trials not finite'
    return f'{text} ({diverged} of {values.size} {word})' if diverged else text


def short(text: str, limit: int) -> str:
    """`text`, its middle left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = max(0, limit - 1) // 2
    return f'{text[: limit - 1 - half]}…{text[len(text) - half :]}'

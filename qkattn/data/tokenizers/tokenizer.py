"""Tokenizers: text to token ids and back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Maps text to token ids and back.

    Attributes:
      name: part of the cache path and of every result; two tokenizers that map any text
        differently have different names.
      vocab_size: ids are in [0, vocab_size).
      separator: the id that follows each document; `encode` never returns it.
    """

    name: str
    vocab_size: int
    separator: int

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of `text`, one-dimensional, in the narrowest unsigned dtype that holds them."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """Bytes of text that `ids` stand for; a separator counts as one byte."""


class ByteTokenizer:
    """One token per byte of UTF-8; byte 0 separates documents."""

    name = 'bytes'
    vocab_size = 256
    separator = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        """uint8 ids, one per byte.

        Raises:
          ValueError: if the text holds byte 0, which would read as the end of a document.
        """
        data = text.encode() if isinstance(text, str) else text
        position = data.find(0)
        if position >= 0:
            raise ValueError(
                f'text holds byte 0 at byte {position}, which separates documents; text for the '
                'byte tokenizer must be free of it.'
            )
        return np.frombuffer(data, np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(np.asarray(ids, np.uint8)).decode(errors='replace')

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        return int(np.size(ids))

"""One token per Unicode character of the training text."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from qkattn.storage.records import parse_json

UNKNOWN = '\N{REPLACEMENT CHARACTER}'
SEPARATOR = '\0'


def valid_text(text: str | bytes) -> str:
    """The text as a str that can be written as UTF-8.

    Raises:
      ValueError: where it is not valid UTF-8; names the byte offset.
    """
    if isinstance(text, str):
        return _with_utf8(text)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f'text is not valid UTF-8 at byte {error.start} ({error.reason}); this tokenizer reads '
            'UTF-8 only.'
        ) from error


def _with_utf8(text: str) -> str:
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        offset = len(text[: error.start].encode())
        raise ValueError(
            f'text holds half a surrogate pair, {text[error.start]!r}, at byte {offset}, which has '
            'no UTF-8; this tokenizer reads what UTF-8 can write.'
        ) from error


class CharacterTokenizer:
    """One id per code point of the training text, in order; then the unknown; then the separator.

    All characters that the training text lacks share one id, which decodes to U+FFFD and counts as
    one byte, the least a character can have, so that unknown characters never improve bits per
    byte. A separator decodes to U+0000.
    """

    def __init__(self, characters: str):
        """Args: characters: distinct, in the order of their ids."""
        self._characters = characters
        digest = hashlib.sha256(characters.encode()).hexdigest()
        self.name = f'characters-{digest[:12]}'
        self.vocab_size = len(characters) + 2
        self.unknown = len(characters)
        self.separator = len(characters) + 1
        codes_V = np.array([ord(c) for c in characters + UNKNOWN + SEPARATOR], '<u4')
        ids_by_code = np.full(0x110000, self.unknown, np.min_scalar_type(self.vocab_size - 1))
        ids_by_code[codes_V[:-2]] = np.arange(len(characters))
        self._codes_V, self._ids_by_code = codes_V, ids_by_code
        self._num_bytes_V = np.array([len(c.encode()) for c in characters] + [1, 1])

    @classmethod
    def train(cls, texts: Iterable[bytes]) -> Self:
        """The tokenizer of the characters of `texts`.

        Raises:
          ValueError: if a text is not valid UTF-8.
        """
        characters: set[str] = set()
        for text in texts:
            characters.update(valid_text(text))
        return cls(''.join(sorted(characters)))

    @classmethod
    def load(cls, model: bytes) -> Self:
        """Restores the tokenizer from the bytes that `model` returned."""
        return cls(parse_json(model)['characters'])

    def model(self) -> bytes:
        """The tokenizer as JSON."""
        return json.dumps({'characters': self._characters}).encode() + b'\n'

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids, one per character.

        Raises:
          ValueError: if the text is not valid UTF-8; names the byte offset.
        """
        return self._ids_by_code[np.frombuffer(valid_text(text).encode('utf-32-le'), '<u4')]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._codes_V[np.asarray(ids, np.int64)].tobytes().decode('utf-32-le')

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """Bytes of UTF-8; an unknown character and a separator count as one each."""
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())

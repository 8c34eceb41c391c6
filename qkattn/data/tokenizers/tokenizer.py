"""Text to token ids and back: the interface, tokenizers of bytes and characters, ids alone."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

import numpy as np

from qkattn.errors import ConfigError
from qkattn.storage.records import parse_json

Ids = Sequence[int] | np.ndarray


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
        """Token ids of `text`, one-dimensional, in the narrowest unsigned dtype that holds them.

        Raises:
          ValueError: text that it cannot encode; names the byte offset.
        """

    def decode(self, ids: Ids) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""

    def num_bytes(self, ids: Ids) -> int:
        """Bytes of text that `ids` stand for; a separator counts as one byte."""


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8; byte 0 separates documents, so that text must be free of it."""

    name = 'bytes'
    vocab_size = 256
    separator = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        if (position := data.find(0)) >= 0:
            raise ValueError(
                f'text holds byte 0 at byte {position}, which separates documents; text for the '
                'byte tokenizer must be free of it.'
            )
        return np.frombuffer(data, np.uint8)

    def decode(self, ids: Ids) -> str:
        return bytes(np.asarray(ids, np.uint8)).decode(errors='replace')

    def num_bytes(self, ids: Ids) -> int:
        return int(np.size(ids))


class IdTokenizer(Tokenizer):
    """Ids without a text, for token shards that others made; the defaults are those of GPT-2.

    It trains a model, but neither reads nor writes text, and knows no bytes.

    Attributes:
      separator: the id between documents; `vocab_size`, an id that never occurs, where there is
        none.
    """

    def __init__(self, *, vocab_size: int = 50257, separator: int | None = 50256):
        """Args: separator: None where documents are not separated.

        Raises:
          ConfigError: a separator that is not in [0, vocab_size).
        """
        if separator is not None and not 0 <= separator < vocab_size:
            raise ConfigError(
                f"data.tokenizer='ids': separator={separator!r} must be in [0, "
                f'vocab_size={vocab_size!r}), or None.'
            )
        self.vocab_size = vocab_size
        self.separator = vocab_size if separator is None else separator
        self.name = f'ids-{vocab_size}-{"none" if separator is None else separator}'

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "data.tokenizer='ids' has no text, only ids; give --prompt_tokens, or set "
            'data.tokenizer to the tokenizer.json of the vocabulary'
        )

    decode = num_bytes = encode


class CharacterTokenizer(Tokenizer):
    """One id per code point of the training text, in order; then the unknown; then the separator.

    All characters that the training text lacks share one id, which decodes to U+FFFD and counts as
    one byte, the least a character can have, so that unknown characters never improve bits per
    byte. A separator decodes to U+0000.
    """

    def __init__(self, characters: str):
        """Args: characters: distinct, in the order of their ids."""
        self._characters = characters
        self.name = f'characters-{hashlib.sha256(characters.encode()).hexdigest()[:12]}'
        self.vocab_size = len(characters) + 2
        self.unknown, self.separator = len(characters), len(characters) + 1
        self._codes_V = np.array([*map(ord, characters), 0xFFFD, 0], '<u4')
        self._ids_by_code = np.full(0x110000, self.unknown, np.min_scalar_type(self.separator))
        self._ids_by_code[self._codes_V[:-2]] = np.arange(len(characters))
        self._num_bytes_V = np.array([len(c.encode()) for c in characters] + [1, 1])

    @classmethod
    def train(cls, texts: Iterable[bytes]) -> Self:
        """The tokenizer of the characters of `texts`; ValueError if one is not valid UTF-8."""
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
        return self._ids_by_code[np.frombuffer(valid_text(text).encode('utf-32-le'), '<u4')]

    def decode(self, ids: Ids) -> str:
        return self._codes_V[np.asarray(ids, np.int64)].tobytes().decode('utf-32-le')

    def num_bytes(self, ids: Ids) -> int:
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


def valid_text(text: str | bytes) -> str:
    """The text as a str that can be written as UTF-8.

    Raises:
      ValueError: where it is not valid UTF-8; names the byte offset.
    """
    try:
        if isinstance(text, bytes):
            return text.decode()
        text.encode()
        return text
    except UnicodeDecodeError as error:
        reason = f'is not valid UTF-8 at byte {error.start} ({error.reason})'
    except UnicodeEncodeError as error:
        offset = len(str(text)[: error.start].encode())
        reason = f'holds half a surrogate pair, {text[error.start]!r}, at byte {offset}'
    raise ValueError(f'text {reason}; this tokenizer reads UTF-8 only.')

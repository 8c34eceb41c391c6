"""Text to token ids and back: the interface, and tokenizers of bytes and characters."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

import numpy as np

from qkattn.storage.records import parse_json

# The code point of an unknown character.
REPLACEMENT = 0xFFFD
# The number of Unicode code points.
NUM_CODES = 0x110000

Ids = Sequence[int] | np.ndarray


class Tokenizer(Protocol):
    """Maps text to token ids and back.

    Tokenizers with the same name must map all texts in the same way, because caches and results
    identify a tokenizer by its name.
    """

    name: str
    vocab_size: int  # ids are in [0, vocab_size)
    # The id after each document, which `encode` never returns. None if token files of other tools
    # do not tell the id.
    separator: int | None

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the token ids, of shape [num_tokens] and the narrowest unsigned dtype.

        Raises:
            ValueError: The text cannot be encoded.
        """

    def decode(self, ids: Ids) -> str:
        """Returns the text of ids, with U+FFFD for bytes that are not valid UTF-8."""

    def num_bytes(self, ids: Ids) -> int:
        """Returns the number of bytes of the text of ids, where a separator counts as one byte."""


class ByteTokenizer(Tokenizer):
    """One token for each byte of UTF-8. Byte 0 is the separator, so texts must not contain it."""

    name = 'bytes'
    vocab_size = 256
    separator = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        position = data.find(0)
        if position >= 0:
            raise ValueError(
                f"text holds byte 0 at byte {position}, which data.tokenizer='bytes' reserves for "
                'the ends of documents'
            )
        return np.frombuffer(data, np.uint8)

    def decode(self, ids: Ids) -> str:
        return bytes(np.asarray(ids, np.uint8)).decode(errors='replace')

    def num_bytes(self, ids: Ids) -> int:
        return int(np.size(ids))


class CharacterTokenizer(Tokenizer):
    """One id for each character of the training text, in the order of code points.

    All other characters share an additional id, which decodes to U+FFFD. Unknown characters count
    as one byte, so that they cannot improve bits per byte. The last id is the separator, which
    decodes to U+0000.
    """

    def __init__(self, characters: str):
        """Takes the distinct characters, in the order of their ids."""
        self._characters = characters
        digest = hashlib.sha256(characters.encode()).hexdigest()[:12]
        self.name = f'characters-{digest}'
        # Two ids follow the characters.
        self.unknown = len(characters)
        self.separator = len(characters) + 1
        self.vocab_size = len(characters) + 2

        # The code point of each id: the characters, `unknown` and `separator`.
        codes = [ord(character) for character in characters]
        self._codes_V = np.array([*codes, REPLACEMENT, 0], '<u4')
        # The id of each code point.
        dtype = np.min_scalar_type(self.separator)
        self._ids_by_code = np.full(NUM_CODES, self.unknown, dtype)
        self._ids_by_code[codes] = np.arange(len(characters))
        # The number of bytes of each id: the characters, `unknown` and `separator`.
        num_bytes = [len(character.encode()) for character in characters]
        self._num_bytes_V = np.array([*num_bytes, 1, 1])

    @classmethod
    def train(cls, texts: Iterable[bytes]) -> Self:
        """Collects the characters of texts; raises ValueError for invalid UTF-8."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text.decode())
        return cls(''.join(sorted(characters)))

    @classmethod
    def load(cls, model: bytes) -> Self:
        """Restores the tokenizer from the bytes that `model` returned."""
        return cls(parse_json(model)['characters'])

    def model(self) -> bytes:
        """Returns the tokenizer as JSON."""
        return json.dumps({'characters': self._characters}).encode() + b'\n'

    def encode(self, text: str | bytes) -> np.ndarray:
        codes = np.frombuffer(text_of(text).encode('utf-32-le'), '<u4')
        return self._ids_by_code[codes]

    def decode(self, ids: Ids) -> str:
        codes = self._codes_V[np.asarray(ids, np.int64)]
        return codes.tobytes().decode('utf-32-le')

    def num_bytes(self, ids: Ids) -> int:
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


class IdTokenizer(Tokenizer):
    """Ids of an unknown vocabulary, whose text is the numbers themselves: '464 3290 318'."""

    def __init__(self, vocab_size: int, separator: int | None):
        self.name = f'ids-{vocab_size}'
        self.vocab_size = vocab_size
        self.separator = separator

    def encode(self, text: str | bytes) -> np.ndarray:
        ids = [int(word) for word in text_of(text).split()]
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f'id {token_id} is outside of 0 .. {self.vocab_size - 1}')
        return np.array(ids, np.min_scalar_type(self.vocab_size - 1))

    def decode(self, ids: Ids) -> str:
        return ' '.join(str(token_id) for token_id in np.asarray(ids).tolist())

    def num_bytes(self, ids: Ids) -> int:
        raise ValueError('the bytes of ids are unknown without their vocabulary')


def text_of(text: str | bytes) -> str:
    """Returns a text as a str; raises UnicodeDecodeError if the bytes are not UTF-8."""
    return text.decode() if isinstance(text, bytes) else text

"""Text to token ids and back: the interface, and tokenizers of bytes and characters."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

import numpy as np

from qkattn.storage.records import parse_json

# The code point that stands for an unknown character.
REPLACEMENT = 0xFFFD
# The number of code points of Unicode.
NUM_CODES = 0x110000

Ids = Sequence[int] | np.ndarray


class Tokenizer(Protocol):
    """Maps text to token ids and back.

    Its name is part of cache paths and results: tokenizers that map any text differently have
    different names.
    """

    name: str
    vocab_size: int  # ids are in [0, vocab_size)
    # The id after each document, which `encode` never returns. None only for token files of other
    # tools that do not say which id it is.
    separator: int | None

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the token ids [num_tokens] in the narrowest unsigned dtype.

        Raises ValueError if the text cannot be encoded.
        """

    def decode(self, ids: Ids) -> str:
        """Returns the text of ids; bytes that are not valid UTF-8 become U+FFFD."""

    def num_bytes(self, ids: Ids) -> int:
        """Returns how many bytes of text ids stand for; a separator counts as one byte."""


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8. Byte 0 separates documents, so texts must not contain it."""

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
    """One id per character of the training text, in the order of code points, and two more ids.

    The next id is shared by all characters that the training text lacks. It decodes to U+FFFD and
    counts as one byte. No character has fewer bytes, so unknown characters cannot improve bits per
    byte. The last id is the separator, which decodes to U+0000.
    """

    def __init__(self, characters: str):
        """Takes the distinct characters, in the order of their ids."""
        self._characters = characters
        self.name = f'characters-{hashlib.sha256(characters.encode()).hexdigest()[:12]}'
        self.vocab_size = len(characters) + 2
        self.unknown = len(characters)
        self.separator = len(characters) + 1

        # To decode, the code point of each id, in the type of UTF-32. The last two ids, `unknown`
        # and `separator`, decode to the replacement character and to U+0000.
        codes = [ord(character) for character in characters]
        self._codes_V = np.array([*codes, REPLACEMENT, 0], '<u4')
        # To encode, the id of each code point.
        dtype = np.min_scalar_type(self.separator)
        self._ids_by_code = np.full(NUM_CODES, self.unknown, dtype)
        self._ids_by_code[codes] = np.arange(len(characters))
        # The bytes of UTF-8 that each id stands for. The last two ids count as one byte each.
        num_bytes = [len(character.encode()) for character in characters]
        self._num_bytes_V = np.array([*num_bytes, 1, 1])

    @classmethod
    def train(cls, texts: Iterable[bytes]) -> Self:
        """Makes the tokenizer of the characters of texts; raises ValueError for invalid UTF-8."""
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
    """Ids of an unknown vocabulary. Their text is the numbers themselves: '464 3290 318'."""

    def __init__(self, vocab_size: int, separator: int | None):
        self.name = f'ids-{vocab_size}'
        self.vocab_size = vocab_size
        self.separator = separator

    def encode(self, text: str | bytes) -> np.ndarray:
        ids = [int(word) for word in text_of(text).split()]
        for number in ids:
            if not 0 <= number < self.vocab_size:
                raise ValueError(f'id {number} is outside of 0 .. {self.vocab_size - 1}')
        return np.array(ids, np.min_scalar_type(self.vocab_size - 1))

    def decode(self, ids: Ids) -> str:
        return ' '.join(str(number) for number in np.asarray(ids).tolist())

    def num_bytes(self, ids: Ids) -> int:
        raise ValueError('the bytes of ids are unknown without their vocabulary')


def text_of(text: str | bytes) -> str:
    """Returns a text as a str; raises UnicodeDecodeError, a ValueError, if it is not UTF-8."""
    return text.decode() if isinstance(text, bytes) else text

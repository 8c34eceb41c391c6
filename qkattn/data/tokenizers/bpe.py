"""Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), lossless."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from qkattn.data.tokenizers.characters import SEPARATOR, valid_text
from qkattn.errors import ConfigError

# The library allocates memory for the requested size before it reads any text.
MAX_SIZE = 2**20
MIN_SIZE = 257
# Lines that are encoded at a time; an encoded line takes about 100 times its bytes.
LINES = 10_000


class BPETokenizer:
    """Sub-words of bytes, learned with the Hugging Face `tokenizers` library.

    Ids: 0 is the separator, 1 to 256 are the bytes, then the learned sub-words in the order of
    their merges. No sub-word spans two lines or two words. Every text comes back byte for byte.
    """

    def __init__(self, model: bytes):
        """Args: model: a tokenizer.json that `train` made."""
        self._model = model
        self._tokenizer = Tokenizer.from_buffer(model)
        # The separator is never read from text; U+0000 in text is encoded as the byte 0.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.name = f'byte-bpe{self.vocab_size}-{hashlib.sha256(model).hexdigest()[:12]}'
        self.separator = self._tokenizer.token_to_id(SEPARATOR)
        # The library writes each byte of a sub-word as one character.
        pieces = map(self._tokenizer.id_to_token, range(self.vocab_size))
        self._num_bytes_V = np.array([len(piece) for piece in pieces])
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int) -> Self:
        """Learns a vocabulary of `size` ids; the same texts give the same vocabulary.

        Raises:
          ConfigError: a size below 257 or above what the texts support; empty texts.
          ValueError: a text that is not valid UTF-8.
        """
        if not MIN_SIZE <= size <= MAX_SIZE:
            raise ConfigError(
                f'data.tokenizer_size={size} must be at least {MIN_SIZE}, for the bytes and the '
                f'separator, and at most {MAX_SIZE}.'
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=1,
            special_tokens=[AddedToken(SEPARATOR, special=True, normalized=False)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        num_lines = 0

        def lines() -> Iterator[str]:
            nonlocal num_lines
            for text in texts:
                for line in _lines(valid_text(text)):
                    num_lines += 1
                    yield line

        tokenizer.train_from_iterator(lines(), trainer)
        if not num_lines:
            raise ConfigError("data.tokenizer='bpe' cannot be trained: the training text is empty.")
        if tokenizer.get_vocab_size() < size:
            raise ConfigError(
                f'data.tokenizer_size={size} is more than the training text supports; it must be '
                f'at most {tokenizer.get_vocab_size()}.'
            )
        return cls(tokenizer.to_str().encode())

    @classmethod
    def load(cls, model: bytes) -> Self:
        """Restores the tokenizer from the bytes that `model` returned."""
        return cls(model)

    def model(self) -> bytes:
        """The tokenizer.json of the library."""
        return self._model

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of the sub-words.

        Raises:
          ValueError: if the text is not valid UTF-8; names the byte offset.
        """
        lines = _lines(valid_text(text))
        ids = [np.empty(0, self._dtype)]
        for start in range(0, len(lines), LINES):
            encodings = self._tokenizer.encode_batch_fast(lines[start : start + LINES])
            ids += [np.array(encoding.ids, self._dtype) for encoding in encodings]
        return np.concatenate(ids)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; a separator becomes U+0000, bytes that are not valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """Bytes of the sub-words; a separator counts as one."""
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


def _lines(text: str) -> list[str]:
    """The lines with their ends; several times faster to encode than the whole text.

    The ids are the same, because learning from lines merges nothing with a newline before it.
    """
    *lines, last = text.split('\n')
    return [line + '\n' for line in lines] + ([last] if last else [])

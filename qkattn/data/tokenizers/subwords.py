"""Sub-words of the Hugging Face `tokenizers` library: learned, or read from a tokenizer.json."""

import hashlib
from collections.abc import Iterable
from typing import Self

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from qkattn.data.corpora.corpus import readable
from qkattn.data.tokenizers.tokenizer import Ids, Tokenizer, text_of
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, read_whole

SEPARATOR = '\0'  # in text, U+0000 is encoded as the byte 0
# The library allocates memory for the requested size before it reads any text.
MIN_SIZE, MAX_SIZE = 257, 2**20
LINES = 10_000  # encoded at a time; an encoded line takes about 100 times its bytes


class Subwords(Tokenizer):
    """A vocabulary of the library; special tokens are neither added to a text nor read from it."""

    def __init__(self, model: bytes):
        self._model = model
        self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
        self._tokenizer.encode_special_tokens = True  # as the text that they are
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._sha256 = hashlib.sha256(model).hexdigest()[:12]

    @classmethod
    def load(cls, model: bytes) -> Self:
        """Restores the tokenizer from the bytes that `model` returned."""
        return cls(model)

    def model(self) -> bytes:
        """The tokenizer.json."""
        return self._model


class BPETokenizer(Subwords):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), lossless.

    Ids: 0 is the separator, which decodes to U+0000, 1 to 256 are the bytes, then the learned
    sub-words in the order of their merges. No sub-word spans two lines or two words.
    """

    def __init__(self, model: bytes):
        super().__init__(model)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.name = f'byte-bpe{self.vocab_size}-{self._sha256}'
        self.separator = self._tokenizer.token_to_id(SEPARATOR)
        # The library writes each byte of a sub-word as one character.
        pieces = map(self._tokenizer.id_to_token, range(self.vocab_size))
        self._num_bytes_V = np.array([len(piece) for piece in pieces])
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int) -> Self:
        """Learns a vocabulary of `size` ids; the same texts give the same vocabulary."""
        if not MIN_SIZE <= size <= MAX_SIZE:
            raise ConfigError(f'data.tokenizer_size={size} must be in [{MIN_SIZE}, {MAX_SIZE}].')
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=1,
            special_tokens=[AddedToken(SEPARATOR, special=True, normalized=False)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        lines = (line for text in texts for line in _lines(text.decode()))
        tokenizer.train_from_iterator(lines, trainer)
        if (most := tokenizer.get_vocab_size()) < size:
            raise ConfigError(f'data.tokenizer_size={size} must be at most {most} for this text.')
        return cls(tokenizer.to_str().encode())

    def encode(self, text: str | bytes) -> np.ndarray:
        lines = _lines(text_of(text))
        ids = [np.empty(0, self._dtype)]
        for start in range(0, len(lines), LINES):
            encodings = self._tokenizer.encode_batch_fast(lines[start : start + LINES])
            ids += [np.array(encoding.ids, self._dtype) for encoding in encodings]
        return np.concatenate(ids)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def num_bytes(self, ids: Ids) -> int:
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


def _lines(text: str) -> list[str]:
    """The lines with their ends, which encode to the ids of the whole text several times faster.

    The ids are equal because learning from lines merges nothing with a newline before it.
    """
    *lines, last = text.split('\n')
    return [line + '\n' for line in lines] + ([last] if last else [])


class FileTokenizer(Subwords):
    """The vocabulary of a file, and one more id, the separator, which decodes to U+0000.

    Special tokens count no bytes. Its name holds the sha256 of the file. Documents are encoded
    whole, which takes about 100 times their bytes.
    """

    def __init__(self, model: bytes):
        super().__init__(model)
        self.name = f'file-{self._sha256}'
        self.separator = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.vocab_size = self.separator + 1
        self._dtype = np.min_scalar_type(self.separator)

    @classmethod
    def open(cls, path: str) -> Self:
        """The tokenizer of a file; ConfigError if it cannot be read, or is not of the library."""
        advice = 'give a tokenizer.json of the Hugging Face tokenizers library'
        with readable(f'data.tokenizer={path!r}', advice, Exception):  # which the library raises
            return cls(read_whole(as_path(path)))

    def encode(self, text: str | bytes) -> np.ndarray:
        encoding = self._tokenizer.encode(text_of(text), add_special_tokens=False)
        return np.array(encoding.ids, self._dtype)

    def decode(self, ids: Ids) -> str:
        return SEPARATOR.join(self._texts(ids))

    def num_bytes(self, ids: Ids) -> int:
        texts = self._texts(ids, skip_special_tokens=True)
        return sum(len(text.encode()) for text in texts) + len(texts) - 1

    def _texts(self, ids: Ids, skip_special_tokens: bool = False) -> list[str]:
        ids = np.asarray(ids, np.int64)
        parts = np.split(ids, np.flatnonzero(ids == self.separator))
        texts = [part[part != self.separator].tolist() for part in parts]
        return self._tokenizer.decode_batch(texts, skip_special_tokens=skip_special_tokens)

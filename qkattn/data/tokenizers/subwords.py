"""Sub-words of the Hugging Face `tokenizers` library: learned, or read from a tokenizer.json."""

import hashlib
from collections.abc import Iterable
from typing import Self

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from qkattn.data.tokenizers.tokenizer import Ids, Tokenizer, valid_text
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded

# In text, U+0000 is encoded as the byte 0.
SEPARATOR = '\0'
# The library allocates memory for the requested size before it reads any text.
MIN_SIZE, MAX_SIZE = 257, 2**20
# Lines that are encoded at a time; an encoded line takes about 100 times its bytes.
LINES = 10_000
# The token between documents in vocabularies of GPT-2 and Llama 3.
DOCUMENT_ENDS = ('<|endoftext|>', '<|begin_of_text|>')


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), lossless.

    Ids: 0 is the separator, 1 to 256 are the bytes, then the learned sub-words in the order of
    their merges. No sub-word spans two lines or two words. Every text comes back byte for byte.
    A separator decodes to U+0000.
    """

    def __init__(self, model: bytes):
        """Args: model: a tokenizer.json that `train` made."""
        self._model = model
        self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
        self._tokenizer.encode_special_tokens = True  # special tokens are not read from text
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
          ConfigError: a size below 257 or above what the texts support.
          ValueError: a text that is not valid UTF-8.
        """
        if not MIN_SIZE <= size <= MAX_SIZE:
            raise ConfigError(
                f'data.tokenizer_size={size} must be at least {MIN_SIZE}, for the bytes and the '
                f'separator, and at most {MAX_SIZE}.'
            )
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
        lines = (line for text in texts for line in _lines(valid_text(text)))
        tokenizer.train_from_iterator(lines, trainer)
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
        lines = _lines(valid_text(text))
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
    """The lines with their ends; several times faster to encode than the whole text.

    The ids are the same, because learning from lines merges nothing with a newline before it.
    """
    *lines, last = text.split('\n')
    return [line + '\n' for line in lines] + ([last] if last else [])


class FileTokenizer(Tokenizer):
    """The vocabulary of a file, and one more id, the separator, which decodes to U+0000.

    Special tokens are neither added to a text nor read from it, and count no bytes. Its name holds
    the sha256 of the file. Documents are encoded whole, which takes about 100 times their bytes.
    """

    def __init__(self, path: str, content: bytes | None = None):
        """Reads the file, unless its content is given.

        Raises:
          ConfigError: it cannot be read, or is not of the library.
        """
        library = 'a tokenizer.json of the Hugging Face tokenizers library'
        try:
            content = expanded(path).read_bytes() if content is None else content
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise ConfigError(
                f'data.tokenizer={path!r} cannot be read ({error.strerror}); it must be {library}.'
            ) from error
        except Exception as error:  # the library raises this class itself
            reason = ' '.join(str(error).split())
            raise ConfigError(f'data.tokenizer={path!r} is not {library} ({reason}).') from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # special tokens are not read from text
        self._content = content
        self.name = f'file-{hashlib.sha256(content).hexdigest()[:12]}'
        self.separator = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.vocab_size = self.separator + 1
        self._dtype = np.min_scalar_type(self.separator)

    @classmethod
    def of_shards(cls, path: str) -> Self:
        """The vocabulary of shards that others made: documents end with a token of the file."""
        tokenizer = cls(path)
        for end in map(tokenizer._tokenizer.token_to_id, DOCUMENT_ENDS):
            if end is not None:
                tokenizer.vocab_size, tokenizer.separator = tokenizer.separator, end
                tokenizer.name = f'{tokenizer.name}-{end}'
                break
        return tokenizer

    @classmethod
    def load(cls, model: bytes) -> Self:
        """Restores the tokenizer from the bytes that `model` returned."""
        return cls('tokenizer.json', model)

    def model(self) -> bytes:
        """The file."""
        return self._content

    def encode(self, text: str | bytes) -> np.ndarray:
        encoding = self._tokenizer.encode(valid_text(text), add_special_tokens=False)
        return np.array(encoding.ids, self._dtype)

    def decode(self, ids: Ids) -> str:
        return SEPARATOR.join(self._texts(ids))

    def num_bytes(self, ids: Ids) -> int:
        texts = self._texts(ids, skip_special_tokens=True)
        return sum(len(text.encode()) for text in texts) + len(texts) - 1

    def _texts(self, ids: Ids, skip_special_tokens: bool = False) -> list[str]:
        ids = np.asarray(ids, np.int64)
        parts = np.split(ids, np.flatnonzero(ids == self.separator))
        return [
            self._tokenizer.decode(
                part[part != self.separator].tolist(), skip_special_tokens=skip_special_tokens
            )
            for part in parts
        ]

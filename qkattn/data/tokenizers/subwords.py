"""Sub-words of the Hugging Face `tokenizers` library: learned, or read from a tokenizer.json."""

import functools
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
from qkattn.storage.records import parse_json

SEPARATOR = '\0'  # in text, U+0000 is encoded as the byte 0
# The separator and all bytes.
MIN_SIZE = 257
# The library allocates memory for the requested size before it reads any text.
MAX_SIZE = 2**20
# How files write the special token that ends a text, the most common first.
END_OF_TEXT = ('<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '<|eos|>', '[EOS]', '<EOS>')
LINES = 10_000  # encoded at a time; an encoded line takes about 100 times its bytes


class Subwords(Tokenizer):
    """A vocabulary of the library; special tokens are neither added to a text nor read from it.

    ValueError for ids from MAX_SIZE on: tables of a vocabulary have a place for every id below its
    largest, however few there are.
    """

    def __init__(self, model: bytes):
        self._model = model
        self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
        self._num_ids = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if self._num_ids > MAX_SIZE:
            raise ValueError(f'it has the id {self._num_ids - 1}; ids must be below {MAX_SIZE}')
        # A special token in a text, such as '</s>', is encoded as the text that it is.
        self._tokenizer.encode_special_tokens = True
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
        num_bytes = [len(self._tokenizer.id_to_token(i)) for i in range(self.vocab_size)]
        self._num_bytes_V = np.array(num_bytes)
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int) -> Self:
        """Learns a vocabulary of `size` ids; the same texts give the same vocabulary.

        ConfigError for a size out of bounds, or that the texts are too short for.
        """
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
        largest = tokenizer.get_vocab_size()
        if largest < size:
            raise ConfigError(
                f'data.tokenizer_size={size} must be at most {largest} for this text.'
            )
        return cls(tokenizer.to_str().encode())

    def encode(self, text: str | bytes) -> np.ndarray:
        lines = _lines(text_of(text))
        ids_by_line = [np.empty(0, self._dtype)]
        for start in range(0, len(lines), LINES):
            encodings = self._tokenizer.encode_batch_fast(lines[start : start + LINES])
            for encoding in encodings:
                ids_by_line.append(np.array(encoding.ids, self._dtype))
        return np.concatenate(ids_by_line)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def num_bytes(self, ids: Ids) -> int:
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


def _lines(text: str) -> list[str]:
    """The lines of a text with their ends: 'a\\n', 'b' for 'a\\nb'.

    Encoded line by line, a text has the same ids as in one piece, several times faster: as a
    vocabulary is learned from lines, nothing is merged with a newline before it.
    """
    lines = text.split('\n')
    last = lines.pop()
    lines = [line + '\n' for line in lines]
    if last:  # it has no end
        lines.append(last)
    return lines


class FileTokenizer(Subwords):
    """The vocabulary of a file; its end-of-text id is the separator, which decodes to U+0000.

    A file without such an id, or whose id is also read from text, gets one more id as separator.
    Special tokens count no bytes. The name holds the sha256 of the file and, where the separator is
    an id of the file, that id. Documents are encoded whole, which takes about 100 times their
    bytes.
    """

    def __init__(self, model: bytes):
        super().__init__(model)
        end_of_text = self._end_of_text()
        if end_of_text is None:
            self._add_separator()
        else:
            self.name = f'{self.name_with_added_separator}-end{end_of_text}'
            self.separator = end_of_text
            self.vocab_size = self._num_ids
            self._dtype = np.min_scalar_type(self.vocab_size - 1)

    @property
    def name_with_added_separator(self) -> str:
        """The name of a tokenizer whose separator is one more id than the file has."""
        return f'file-{self._sha256}'

    def with_added_separator(self) -> Self:
        """The same vocabulary with one more id, the separator, whatever the file marks."""
        tokenizer = type(self)(self._model)
        tokenizer._add_separator()
        return tokenizer

    def _add_separator(self) -> None:
        self.name = self.name_with_added_separator
        self.separator = self._num_ids
        self.vocab_size = self._num_ids + 1
        self._dtype = np.min_scalar_type(self.separator)

    def _end_of_text(self) -> int | None:
        """The id of the special token that ends texts; None where there is none to be used.

        It is the token with one of the usual names, or else the only special token. A separator may
        not be read from text, so neither the token of unknown text nor a special token that its own
        spelling is encoded to is used.
        """
        id_of_special = {}
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special:
                id_of_special[token.content] = token_id
        candidates = [content for content in END_OF_TEXT if content in id_of_special]
        if not candidates and len(id_of_special) == 1:
            candidates = list(id_of_special)
        if not candidates:
            return None
        content = candidates[0]
        end_of_text = id_of_special[content]
        ids_of_spelling = self._tokenizer.encode(content, add_special_tokens=False).ids
        if content == self._unknown() or end_of_text in ids_of_spelling:
            return None
        return end_of_text

    @functools.cached_property
    def unknown(self) -> int | None:
        """The id of text outside of the vocabulary; None where the file has none."""
        token = self._unknown()
        return None if token is None else self._tokenizer.token_to_id(token)

    def _unknown(self) -> str | None:
        """The token that stands for text outside of the vocabulary, if there is one."""
        model = parse_json(self._model)['model']
        unknown_id = model.get('unk_id')  # of a unigram model, whose vocabulary is [token, score]
        if unknown_id is None:
            return model.get('unk_token')
        token, _ = model['vocab'][unknown_id]
        return token

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
        """The texts between separators, one more than there are separators."""
        ids = np.asarray(ids, np.int64)
        parts = np.split(ids, np.flatnonzero(ids == self.separator))
        # Each part but the first begins with its separator.
        ids_of_texts = [part[part != self.separator].tolist() for part in parts]
        return self._tokenizer.decode_batch(ids_of_texts, skip_special_tokens=skip_special_tokens)

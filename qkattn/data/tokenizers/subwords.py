"""Sub-word tokenizers of the Hugging Face library `tokenizers`, learned or read from a file."""

import functools
import hashlib
from collections.abc import Iterable
from typing import Self

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from qkattn.data.corpora.corpus import explain_read_errors
from qkattn.data.tokenizers import pieces
from qkattn.data.tokenizers.tokenizer import Ids, Tokenizer, text_of
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, read_whole
from qkattn.storage.records import parse_json

# The token of the separator. A character U+0000 in a text is not encoded to it, but as a byte.
SEPARATOR = '\0'
# The smallest vocabulary: the separator and all bytes.
MIN_SIZE = 257
# The library allocates memory for the requested size before it reads any text.
MAX_SIZE = 2**20
# The special tokens that usually end a text, the most common first.
END_OF_TEXT = ('<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '<|eos|>', '[EOS]', '<EOS>')
# How many lines are encoded at a time. While it is encoded, a line takes about 100 times its bytes.
LINES = 10_000


class Subwords(Tokenizer):
    """A vocabulary of the library. It neither adds special tokens to a text nor reads them from it.

    Raises ValueError for a vocabulary with an id of MAX_SIZE or more. Tables have an entry for
    every id up to the largest, even if most of these ids are not used.
    """

    def __init__(self, model: bytes):
        """Loads the bytes of a tokenizer.json.

        Raises:
          ValueError: the vocabulary has an id of MAX_SIZE or more.
        """
        self._model = model
        self._sha256 = hashlib.sha256(model).hexdigest()[:12]
        self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
        largest_id = max(self._tokenizer.get_vocab().values(), default=-1)
        if largest_id >= MAX_SIZE:
            raise ValueError(f'it has the id {largest_id}; ids must be below {MAX_SIZE}')
        self._num_ids = largest_id + 1
        # Despite its name, True makes '</s>' in a text plain characters, not a special token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def load(cls, model: bytes) -> Self:
        """Restores the tokenizer from the bytes that `model` returned."""
        return cls(model)

    def model(self) -> bytes:
        """Returns the content of the tokenizer.json."""
        return self._model


class BPETokenizer(Subwords):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019), lossless.

    Id 0 is the separator, which decodes to U+0000. Ids 1 to 256 are the bytes. The learned
    sub-words follow in the order of their merges. No sub-word spans two lines or two words.
    """

    def __init__(self, model: bytes):
        super().__init__(model)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.name = f'byte-bpe{self.vocab_size}-{self._sha256}'
        self.separator = self._tokenizer.token_to_id(SEPARATOR)
        # The library writes each byte of a sub-word as one character.
        tokens = [self._tokenizer.id_to_token(token_id) for token_id in range(self.vocab_size)]
        self._num_bytes_V = np.array([len(token) for token in tokens])
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int) -> Self:
        """Learns a vocabulary of `size` ids; the same texts give the same vocabulary.

        Raises ConfigError if the size is out of bounds, or the texts are too short for it.
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
        """Encodes a text line by line, LINES lines at a time; see `_lines`."""
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
    """Splits a text into lines, which keep their newline: 'a\\nb' gives ['a\\n', 'b'].

    Texts are encoded line by line, which is several times faster than in one piece. The ids are the
    same, because vocabularies are learned from lines, so that no sub-word goes beyond a newline.
    Only '\\n' ends a line; `str.splitlines` would also split at other characters.
    """
    *complete_lines, last_line = text.split('\n')
    lines = [line + '\n' for line in complete_lines]
    if last_line:
        lines.append(last_line)
    return lines


class FileTokenizer(Subwords):
    """The vocabulary of a tokenizer.json.

    The separator is the file's end-of-text id. If there is no such id, or text can be encoded to
    it, the separator is an additional id after those of the file. It decodes to U+0000.

    Special tokens count no bytes. The name has the sha256 of the file and, if the separator is an
    id of the file, that id. Long documents are encoded a piece at a time.
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
        """The name of this vocabulary with an additional id as separator."""
        return f'file-{self._sha256}'

    def with_added_separator(self) -> Self:
        """Returns this vocabulary with an additional id as separator, even if it has its own."""
        tokenizer = type(self)(self._model)
        tokenizer._add_separator()
        return tokenizer

    def _add_separator(self) -> None:
        self.name = self.name_with_added_separator
        self.separator = self._num_ids
        self.vocab_size = self._num_ids + 1
        self._dtype = np.min_scalar_type(self.separator)

    def _end_of_text(self) -> int | None:
        """Returns the id of the special token that ends texts; None if there is no usable one.

        - If the file has special tokens of END_OF_TEXT, it is the first of them in that order.
        - If the file has none of them, but only one special token, it is that one.

        The token becomes the separator between documents. So it is not usable if the ids of a text
        can include it.
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
        if content == self._unknown():
            return None  # text outside of the vocabulary is encoded to it
        ids_of_spelling = self._tokenizer.encode(content, add_special_tokens=False).ids
        if end_of_text in ids_of_spelling:
            return None  # a text with the characters '</s>', for example, is encoded to it
        return end_of_text

    @functools.cached_property
    def unknown(self) -> int | None:
        """The id of text outside of the vocabulary; None if the file has no such id."""
        token = self._unknown()
        return None if token is None else self._tokenizer.token_to_id(token)

    def _unknown(self) -> str | None:
        """Returns the token that stands for text outside of the vocabulary, if there is one."""
        model = parse_json(self._model)['model']
        # Only unigram models have this field. Their vocabulary is a list of [token, score].
        unknown_id = model.get('unk_id')
        if unknown_id is None:
            return model.get('unk_token')
        token, _ = model['vocab'][unknown_id]
        return token

    @classmethod
    def open(cls, path: str) -> Self:
        """Opens a file; raises ConfigError if it is not a tokenizer.json of the library."""
        advice = 'give a tokenizer.json of the Hugging Face tokenizers library'
        # The library raises a plain Exception for a file that it cannot parse.
        with explain_read_errors(f'data.tokenizer={path!r}', advice, Exception):
            return cls(read_whole(as_path(path)))

    def encode(self, text: str | bytes) -> np.ndarray:
        return pieces.encode(self._tokenizer, text_of(text)).astype(self._dtype)

    def decode(self, ids: Ids) -> str:
        return SEPARATOR.join(self._texts(ids))

    def num_bytes(self, ids: Ids) -> int:
        # Each separator counts as one byte. There is one separator fewer than texts.
        texts = self._texts(ids, skip_special_tokens=True)
        return sum(len(text.encode()) for text in texts) + len(texts) - 1

    def _texts(self, ids: Ids, skip_special_tokens: bool = False) -> list[str]:
        """Decodes the texts between separators; n separators make n + 1 texts."""
        ids = np.asarray(ids, np.int64)
        # Cut before each separator. Then each part but the first begins with one, which is removed.
        parts = np.split(ids, np.flatnonzero(ids == self.separator))
        ids_of_texts = [part[part != self.separator].tolist() for part in parts]
        return self._tokenizer.decode_batch(ids_of_texts, skip_special_tokens=skip_special_tokens)

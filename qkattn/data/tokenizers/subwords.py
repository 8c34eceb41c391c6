"""Sub-word tokenizers of the Hugging Face library `tokenizers`, learned or read from a file."""

import functools
import hashlib
from collections.abc import Iterable, Iterator
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

# The separator as a special token. The character U+0000 of a text has another token.
SEPARATOR = '\0'
# The smallest vocabulary: the separator and all bytes.
MIN_SIZE = 257
# The largest vocabulary. The library allocates memory for all ids.
MAX_SIZE = 2**20
# The usual special tokens at the end of a text, the most common first.
END_OF_TEXT = ('<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '<|eos|>', '[EOS]', '<EOS>')
# Lines that are encoded at a time. The library takes about 100 bytes of memory per byte.
LINES = 10_000


class Subwords(Tokenizer):
    """A vocabulary of the library. Special tokens in a text are encoded as plain text."""

    def __init__(self, model: bytes):
        """Loads the content of a tokenizer.json.

        Raises:
            ValueError: The vocabulary has an id of MAX_SIZE or more.
        """
        self._model = model
        self._sha256 = hashlib.sha256(model).hexdigest()[:12]
        self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
        largest_id = max(self._tokenizer.get_vocab().values(), default=-1)
        if largest_id >= MAX_SIZE:
            raise ValueError(f'it has the id {largest_id}; ids must be below {MAX_SIZE}')
        self._num_ids = largest_id + 1
        # Despite the name, True encodes '</s>' in a text as plain characters.
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

    Id 0 is the separator, which decodes to U+0000. Ids 1 to 256 are the bytes. Learned sub-words
    follow in the order of their merges. A sub-word never spans two lines or two words.
    """

    def __init__(self, model: bytes):
        super().__init__(model)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.name = f'byte-bpe{self.vocab_size}-{self._sha256}'
        self.separator = self._tokenizer.token_to_id(SEPARATOR)
        # The library represents each byte of a token by one character.
        tokens = [self._tokenizer.id_to_token(token_id) for token_id in range(self.vocab_size)]
        self._num_bytes_V = np.array([len(token) for token in tokens])
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int) -> Self:
        """Learns a vocabulary of `size` ids; the same texts give the same vocabulary.

        Raises:
            ConfigError: The size is out of bounds or too large for the texts.
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

        def lines() -> Iterator[str]:
            for text in texts:
                yield from _lines(text.decode())

        tokenizer.train_from_iterator(lines(), trainer)
        actual_size = tokenizer.get_vocab_size()
        if actual_size < size:
            raise ConfigError(
                f'data.tokenizer_size={size} must be at most {actual_size} for this text.'
            )
        return cls(tokenizer.to_str().encode())

    def encode(self, text: str | bytes) -> np.ndarray:
        # Encoding single lines is faster and gives the same ids, as no token spans two lines.
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
    """Splits a text into lines, which keep their newline: 'a\\nb' -> ['a\\n', 'b']."""
    # `str.splitlines` would also split at other characters than '\n'.
    *complete_lines, last_line = text.split('\n')
    lines = [line + '\n' for line in complete_lines]
    if last_line:
        lines.append(last_line)
    return lines


class FileTokenizer(Subwords):
    """The vocabulary of a tokenizer.json.

    The separator is the end-of-text id of the file if it has one that no text is encoded to.
    Otherwise the separator is an additional id after the ids of the file. Separators decode to
    U+0000. Other special tokens count as 0 bytes.
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
        """The tokenizer's name if the separator is an additional id."""
        return f'file-{self._sha256}'

    def with_added_separator(self) -> Self:
        """Returns a tokenizer with the same vocabulary and an additional id as separator."""
        tokenizer = type(self)(self._model)
        tokenizer._add_separator()
        return tokenizer

    def _add_separator(self) -> None:
        self.name = self.name_with_added_separator
        self.separator = self._num_ids
        self.vocab_size = self._num_ids + 1
        self._dtype = np.min_scalar_type(self.separator)

    def _end_of_text(self) -> int | None:
        """Returns the end-of-text id of the file; None if there is none or texts may contain it.

        The token is the first one of END_OF_TEXT in the file, or the only special token.
        """
        special_ids = {}  # by token
        for token_id, added_token in self._tokenizer.get_added_tokens_decoder().items():
            if added_token.special:
                special_ids[added_token.content] = token_id
        candidates = [token for token in END_OF_TEXT if token in special_ids]
        if not candidates and len(special_ids) == 1:
            candidates = list(special_ids)
        if not candidates:
            return None

        end_of_text = candidates[0]
        end_of_text_id = special_ids[end_of_text]
        if end_of_text == self._unknown_token():
            return None
        # The characters of the token, such as '</s>', may occur in a text.
        ids_of_characters = self._tokenizer.encode(end_of_text, add_special_tokens=False).ids
        if end_of_text_id in ids_of_characters:
            return None
        return end_of_text_id

    @functools.cached_property
    def unknown(self) -> int | None:
        """The id of text outside of the vocabulary; None if the file has no such id."""
        token = self._unknown_token()
        return None if token is None else self._tokenizer.token_to_id(token)

    def _unknown_token(self) -> str | None:
        """Returns the token for text outside of the vocabulary, if there is one."""
        model = parse_json(self._model)['model']
        unknown_id = model.get('unk_id')
        if unknown_id is None:
            return model.get('unk_token')
        # The model is a unigram model, whose vocabulary has pairs of a token and its score.
        token, _ = model['vocab'][unknown_id]
        return token

    @classmethod
    def open(cls, path: str) -> Self:
        """Opens a tokenizer.json; raises ConfigError if the library cannot read it."""
        advice = 'give a tokenizer.json of the Hugging Face tokenizers library'
        # The library raises a plain Exception for a file that it cannot parse.
        with explain_read_errors(f'data.tokenizer={path!r}', advice, Exception):
            return cls(read_whole(as_path(path)))

    def encode(self, text: str | bytes) -> np.ndarray:
        text = text_of(text)
        try:
            ids = pieces.encode(self._tokenizer, text)
        except Exception as error:  # the library raises a plain Exception
            raise ValueError(str(error)) from error
        return ids.astype(self._dtype)

    def decode(self, ids: Ids) -> str:
        return SEPARATOR.join(self._texts(ids))

    def num_bytes(self, ids: Ids) -> int:
        texts = self._texts(ids, skip_special_tokens=True)
        num_text_bytes = sum(len(text.encode()) for text in texts)
        num_separators = len(texts) - 1  # each counts as one byte
        return num_text_bytes + num_separators

    def _texts(self, ids: Ids, skip_special_tokens: bool = False) -> list[str]:
        """Decodes the texts before, between and after separators."""
        ids = np.asarray(ids, np.int64)
        separator_indices = np.flatnonzero(ids == self.separator)
        # Each part except the first begins with a separator, which is then removed.
        parts = np.split(ids, separator_indices)
        ids_by_text = [part[part != self.separator].tolist() for part in parts]
        return self._tokenizer.decode_batch(ids_by_text, skip_special_tokens=skip_special_tokens)

"""Encodings of the tiktoken library, such as `data.tokenizer='tiktoken:gpt2'`."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from qkattn.config.imports import NOT_MODULES, load_extra
from qkattn.data.tokenizers.subwords import MAX_SIZE, SEPARATOR
from qkattn.data.tokenizers.tokenizer import Ids, Tokenizer, text_of
from qkattn.errors import ConfigError

# The prefix of encodings in data.tokenizer: 'tiktoken:'.
PREFIX = f'{NOT_MODULES["tokenizer"][0]}:'
# The special token at the end of a text.
END_OF_TEXT = '<|endoftext|>'


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken. Special tokens in a text are encoded as plain text.

    The separator is the end-of-text id of the encoding if it has one. Otherwise the separator is an
    additional id after the ids of the encoding. Separators decode to U+0000. Other special tokens
    count as 0 bytes.
    """

    def __init__(self, encoding: Any):
        """Takes a `tiktoken.Encoding`; raises ValueError for an id of MAX_SIZE or more."""
        if encoding.n_vocab > MAX_SIZE:
            raise ValueError(f'it has the id {encoding.n_vocab - 1}; ids must be below {MAX_SIZE}')
        self._encoding = encoding
        has_end_of_text = END_OF_TEXT in encoding.special_tokens_set
        if has_end_of_text:
            self.vocab_size = encoding.n_vocab
            self.separator = encoding.encode_single_token(END_OF_TEXT)
        else:
            self.vocab_size = encoding.n_vocab + 1
            self.separator = encoding.n_vocab
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

        # The name has a digest of the vocabulary and of the regular expression that splits texts.
        tokens = [_token_bytes(encoding, token_id) for token_id in range(encoding.n_vocab)]
        digest = hashlib.sha256(encoding._pat_str.encode())
        for token_id, token in enumerate(tokens):
            digest.update(b'%d:%b\n' % (token_id, token))
        self.name = f'tiktoken-{encoding.name}-{digest.hexdigest()[:12]}'

        # The bytes that each id decodes to.
        self._bytes = tokens
        if not has_end_of_text:
            self._bytes.append(b'')
        self._bytes[self.separator] = SEPARATOR.encode()

        # The number of bytes that each id counts as.
        num_bytes = [len(token) for token in self._bytes]
        for special_token in encoding.special_tokens_set:
            num_bytes[encoding.encode_single_token(special_token)] = 0
        num_bytes[self.separator] = 1
        self._num_bytes_V = np.array(num_bytes)

    @classmethod
    def open(cls, kind: str) -> Self:
        """Opens an encoding by its name, such as 'tiktoken:gpt2', without downloading files.

        Raises:
            ConfigError: The library is not installed, does not know the name, or does not have the
                files of the encoding in its cache.
        """
        library = load_extra('tiktoken', extra='tiktoken')
        name = kind.removeprefix(PREFIX)
        valid_names = library.list_encoding_names()
        if name not in valid_names:
            raise ConfigError(
                f'data.tokenizer={kind!r} is no encoding of tiktoken; valid are '
                f'{", ".join(PREFIX + valid for valid in valid_names)}'
            )
        try:
            with _without_downloads(kind, name):
                return cls(library.get_encoding(name))
        except ConfigError:  # has a message of its own
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f'data.tokenizer={kind!r} cannot be read: {error}') from error

    def encode(self, text: str | bytes) -> np.ndarray:
        text = text_of(text)
        text.encode()  # raises UnicodeEncodeError, where the library would replace characters
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self._dtype)

    def decode(self, ids: Ids) -> str:
        tokens = [self._bytes[token_id] for token_id in np.asarray(ids).tolist()]
        return b''.join(tokens).decode(errors='replace')

    def num_bytes(self, ids: Ids) -> int:
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


def _token_bytes(encoding: Any, token_id: int) -> bytes:
    """Returns the bytes of a token; b'' for an unused id."""
    try:
        return encoding.decode_single_token_bytes(token_id)
    except KeyError:
        return b''


@contextlib.contextmanager
def _without_downloads(kind: str, name: str) -> Iterator[None]:
    """A context in which ConfigError is raised for files that tiktoken would download.

    The context replaces `tiktoken.load.read_file`, which reads files that are not in the cache.
    """
    reader: Any = load_extra('tiktoken.load', extra='tiktoken')
    original_read_file = reader.read_file

    def read_local_file(address: str) -> bytes:
        is_url = '://' in address
        if is_url:
            raise ConfigError(
                f"data.tokenizer={kind!r} needs {address}, which is not in tiktoken's cache; fetch "
                f'it once with python -c "import tiktoken; tiktoken.get_encoding({name!r})", or '
                'copy the cache of another machine and set TIKTOKEN_CACHE_DIR to it'
            )
        return original_read_file(address)

    reader.read_file = read_local_file
    try:
        yield
    finally:
        reader.read_file = original_read_file

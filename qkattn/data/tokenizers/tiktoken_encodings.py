"""Encodings of the library tiktoken, such as that of GPT-2: `data.tokenizer='tiktoken:gpt2'`."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from qkattn.config.imports import NOT_MODULES, load_extra
from qkattn.data.tokenizers.subwords import MAX_SIZE, SEPARATOR
from qkattn.data.tokenizers.tokenizer import Ids, Tokenizer, text_of
from qkattn.errors import ConfigError

# What the names of encodings begin with in data.tokenizer.
PREFIX = f'{NOT_MODULES["tokenizer"][0]}:'
# The special token that ends texts.
END_OF_TEXT = '<|endoftext|>'


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken. Special tokens are neither added to a text nor read from it.

    The separator is the end-of-text id, or an additional id after those of the encoding if it has
    none. It decodes to U+0000. Other special tokens count no bytes.

    The name has a digest of the vocabulary and of the pattern by which texts are split.
    """

    def __init__(self, encoding: Any):
        """Takes a `tiktoken.Encoding`; raises ValueError for an id of MAX_SIZE or more."""
        if encoding.n_vocab > MAX_SIZE:
            raise ValueError(f'it has the id {encoding.n_vocab - 1}; ids must be below {MAX_SIZE}')
        self._encoding = encoding
        self.vocab_size = encoding.n_vocab
        # Without an end-of-text token, the separator is one more id.
        if END_OF_TEXT in encoding.special_tokens_set:
            self.separator = encoding.encode_single_token(END_OF_TEXT)
        else:
            self.separator = encoding.n_vocab
            self.vocab_size += 1
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

        tokens = [_token_bytes(encoding, token_id) for token_id in range(encoding.n_vocab)]
        # Encodings with the same tokens may still split texts differently. So the digest includes
        # the pattern by which texts are split, which the library has only as a private attribute.
        digest = hashlib.sha256(encoding._pat_str.encode())
        for token_id, token in enumerate(tokens):
            digest.update(b'%d:%b\n' % (token_id, token))
        self.name = f'tiktoken-{encoding.name}-{digest.hexdigest()[:12]}'

        # The bytes that each id decodes to.
        self._bytes = tokens
        if self.separator == encoding.n_vocab:
            self._bytes.append(b'')
        self._bytes[self.separator] = SEPARATOR.encode()

        # How many bytes of text each id counts as: 1 for the separator, 0 for other special tokens.
        num_bytes = [len(token) for token in self._bytes]
        for token in encoding.special_tokens_set:
            num_bytes[encoding.encode_single_token(token)] = 0
        num_bytes[self.separator] = 1
        self._num_bytes_V = np.array(num_bytes)

    @classmethod
    def open(cls, kind: str) -> Self:
        """Opens the encoding that data.tokenizer names, as in 'tiktoken:gpt2'; downloads nothing.

        Raises ConfigError if the library is not installed, does not know the name, or does not have
        the files of the encoding in its cache.
        """
        library = load_extra('tiktoken', 'tiktoken')
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
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f'data.tokenizer={kind!r} cannot be read: {error}') from error

    def encode(self, text: str | bytes) -> np.ndarray:
        text = text_of(text)
        text.encode()  # raises UnicodeEncodeError for what the library would replace
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self._dtype)

    def decode(self, ids: Ids) -> str:
        tokens = [self._bytes[token_id] for token_id in np.asarray(ids).tolist()]
        return b''.join(tokens).decode(errors='replace')

    def num_bytes(self, ids: Ids) -> int:
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


def _token_bytes(encoding: Any, token_id: int) -> bytes:
    """Returns the bytes of a token; b'' for an id that no token has."""
    try:
        return encoding.decode_single_token_bytes(token_id)
    except KeyError:
        return b''


@contextlib.contextmanager
def _without_downloads(kind: str, name: str) -> Iterator[None]:
    """Inside of this context, a file that tiktoken would download raises ConfigError.

    The library has no such switch: it calls `tiktoken.load.read_file` for a file that is not in its
    cache, and `get_encoding` is the only way to learn which files an encoding has.
    """
    reader: Any = load_extra('tiktoken.load', 'tiktoken')
    read_file = reader.read_file

    def read_local_file(address: str) -> bytes:
        if '://' in address:
            raise ConfigError(
                f"data.tokenizer={kind!r} needs {address}, which is not in tiktoken's cache; fetch "
                f'it once with python -c "import tiktoken; tiktoken.get_encoding({name!r})", or '
                'copy the cache of another machine and set TIKTOKEN_CACHE_DIR to it'
            )
        return read_file(address)

    reader.read_file = read_local_file
    try:
        yield
    finally:
        reader.read_file = read_file

"""Tokenizers of the Hugging Face `tokenizers` library, read from a tokenizer.json."""

import hashlib
from collections.abc import Sequence
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from qkattn.data.tokenizers.characters import valid_text
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded

# The token between documents in vocabularies of GPT-2 and Llama 3.
DOCUMENT_ENDS = ('<|endoftext|>', '<|begin_of_text|>')


class FileTokenizer:
    """The vocabulary of a file, and one more id, the separator.

    Special tokens are neither added to a text nor read from it. Its name holds the sha256 of the
    file. Documents are encoded whole, which takes about 100 times their bytes.
    """

    def __init__(self, path: str, content: bytes | None = None):
        """Reads the file, unless its content is given.

        Raises:
          ConfigError: it cannot be read, or is not of the library.
        """
        try:
            content = expanded(path).read_bytes() if content is None else content
        except OSError as error:
            raise ConfigError(
                f'data.tokenizer={path!r} cannot be read ({error.strerror}); it must be a '
                'tokenizer.json of the Hugging Face tokenizers library.'
            ) from error
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises this class itself
            reason = ' '.join(str(error).split())
            raise ConfigError(
                f'data.tokenizer={path!r} is not a tokenizer.json of the Hugging Face tokenizers '
                f'library ({reason}).'
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._content = content
        self.name = f'file-{hashlib.sha256(content).hexdigest()[:12]}'
        self.separator = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.vocab_size = self.separator + 1
        self._dtype = np.min_scalar_type(self.separator)

    @classmethod
    def of_shards(cls, path: str) -> Self:
        """The vocabulary of shards that others made: documents end with a token of the file."""
        tokenizer = cls(path)
        known = (tokenizer._tokenizer.token_to_id(token) for token in DOCUMENT_ENDS)
        end = next((token for token in known if token is not None), None)
        if end is not None:
            tokenizer.vocab_size, tokenizer.separator = tokenizer.separator, end
            tokenizer.name = f'{tokenizer.name}-{end}'
        return tokenizer

    @classmethod
    def load(cls, model: bytes) -> Self:
        """Restores the tokenizer from the bytes that `model` returned."""
        return cls('tokenizer.json', model)

    def model(self) -> bytes:
        """The file."""
        return self._content

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of the tokens.

        Raises:
          ValueError: if the text is not valid UTF-8; names the byte offset.
        """
        encoding = self._tokenizer.encode(valid_text(text), add_special_tokens=False)
        return np.array(encoding.ids, self._dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text as the library decodes it; a separator becomes U+0000."""
        return '\0'.join(self._texts(ids))

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """Bytes of the decoded text, without special tokens; a separator counts as one."""
        texts = self._texts(ids, skip_special_tokens=True)
        return sum(len(text.encode()) for text in texts) + len(texts) - 1

    def _texts(
        self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False
    ) -> list[str]:
        ids = np.asarray(ids, np.int64)
        parts = np.split(ids, np.flatnonzero(ids == self.separator))
        own = [part[part != self.separator].tolist() for part in parts]
        return [
            self._tokenizer.decode(part, skip_special_tokens=skip_special_tokens) for part in own
        ]

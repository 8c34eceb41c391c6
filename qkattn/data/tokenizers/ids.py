"""The vocabulary of token ids whose text is not at hand: its size alone."""

from collections.abc import Sequence

import numpy as np

from qkattn.errors import ConfigError


class IdTokenizer:
    """Ids without a text, for token shards that others made; the defaults are those of GPT-2.

    It trains a model, but neither reads nor writes text, and knows no bytes.

    Attributes:
      separator: the id between documents; `vocab_size`, an id that never occurs, where there is
        none.
    """

    def __init__(self, *, vocab_size: int = 50257, separator: int | None = 50256):
        """Args: separator: None where documents are not separated.

        Raises:
          ConfigError: a separator that is not in [0, vocab_size).
        """
        if separator is not None and not 0 <= separator < vocab_size:
            raise ConfigError(
                f"data.tokenizer='ids': separator={separator!r} must be in [0, "
                f'vocab_size={vocab_size!r}), or None.'
            )
        self.vocab_size = vocab_size
        self.separator = vocab_size if separator is None else separator
        self.name = f'ids-{vocab_size}-{"none" if separator is None else separator}'

    def encode(self, text: str | bytes) -> np.ndarray:
        raise _no_text()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        raise _no_text()

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        raise _no_text()


def _no_text() -> ConfigError:
    return ConfigError(
        "data.tokenizer='ids' has no text, only ids; give --prompt_tokens, or set data.tokenizer "
        'to the tokenizer.json of the vocabulary'
    )

"""What training reads: fixed-shape examples by number, whatever the task."""

from typing import Any, Protocol

import numpy as np

from qkattn.config import ModelConfig
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError

Batch = dict[str, np.ndarray]
# Length and type of a row's arrays by the names of a Batch.
ArrayShapes = dict[str, tuple[int, np.dtype]]


class Rows(Protocol):
    """A dataset, made ready for a task and a model's lengths.

    Attributes:
      splits: 'train', 'validation' and, where the data has one, 'test'.
      vocab_size: ids are in [0, vocab_size).
    """

    splits: tuple[str, ...]
    vocab_size: int

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        """The arrays that `read` returns, known from the model alone."""

    def count(self, split: str) -> int:
        """Rows in a split; of 'train', the rows of an epoch.

        Raises:
          ConfigError: an unknown split, or one without a single row.
        """

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """The rows of these numbers, always in the same shapes.

        Args:
          draws_B2: uint64; a row's randomness, if it has any, comes from its pair of numbers only:
            the seed, and the place in the endless training sequence (or the row in an evaluation).

        Returns:
          tokens_BT and targets_BT, int32; loss_weights_BT, float32, 0 where nothing is to be
          predicted; and the model's other inputs by the names of its arguments.
        """

    def identity(self) -> dict[str, Any]:
        """What a result has to carry to say which data it is about; JSON."""

    def bytes_per_token(self, split: str) -> float | None:
        """Bytes of text that a target stands for, on average; None where bytes mean nothing."""

    def unigram_nats(self, split: str) -> float | None:
        """Loss per target of the best model that knows nothing but frequencies, if known."""


def token_shapes(model: ModelConfig) -> ArrayShapes:
    """The arrays of rows whose only input is tokens_BT."""
    T, integer = model.context, np.dtype(np.int32)
    return {
        'tokens_BT': (T, integer),
        'targets_BT': (T, integer),
        'loss_weights_BT': (T, np.dtype(np.float32)),
    }


class TextRows:
    """What windows of a text have in common, whichever of its tokens are to be predicted."""

    array_shapes = staticmethod(token_shapes)

    def __init__(self, dataset: TokenDataset, length: int):
        if length < 1:
            raise ConfigError(f'model.context={length!r} is too small; it must be at least 1.')
        self.dataset, self.length = dataset, length
        self.splits = dataset.splits
        self.vocab_size = dataset.vocab_size

    def identity(self) -> dict[str, Any]:
        return self.dataset.identity()

    def bytes_per_token(self, split: str) -> float:
        return self.dataset.bytes_per_token(split)

    def unigram_nats(self, split: str) -> float:
        return self.dataset.info(split).unigram_nats_per_token


class LanguageRows(TextRows):
    """Windows of text, each token predicted from those before it in its window.

    Window w of a split holds tokens [w*length, (w+1)*length]: length + 1 tokens, of which the last
    is the first of window w + 1, so every token but the first of the split is a target exactly
    once. The fewer than `length` targets that fill no window are left out.

    With `shift`, training windows begin `offset` tokens later, 0 <= offset < length, drawn anew for
    every (seed, epoch), and there is one window less.
    """

    def __init__(self, dataset: TokenDataset, length: int, *, shift: bool = False):
        super().__init__(dataset, length)
        self.shift = shift

    def count(self, split: str) -> int:
        num_tokens = len(self.dataset.split(split))
        shifted = self.shift and split == 'train'
        needed = 2 * self.length if shifted else self.length + 1
        if num_tokens < needed:
            raise ConfigError(
                f'model.context={self.length!r} is too long for split {split!r} of dataset '
                f'{self.dataset.name!r} with {num_tokens} tokens; it must be at most '
                f'{max(num_tokens // 2 if shifted else num_tokens - 1, 0)}.'
            )
        return (num_tokens - needed) // self.length + 1

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        first_B = rows_B * self.length
        if self.shift and split == 'train':
            epochs_B = draws_B2[:, 1] // self.count(split)
            offsets = {
                (seed, epoch): np.random.default_rng((seed, epoch)).integers(self.length)
                for seed, epoch in {*zip(draws_B2[:, 0].tolist(), epochs_B.tolist(), strict=True)}
            }
            keys = zip(draws_B2[:, 0].tolist(), epochs_B.tolist(), strict=True)
            first_B = first_B + np.array([offsets[key] for key in keys])
        positions_BT1 = first_B[:, None] + np.arange(self.length + 1)
        tokens_BT1 = np.asarray(self.dataset.split(split))[positions_BT1].astype(np.int32)
        return {
            'tokens_BT': tokens_BT1[:, :-1],
            'targets_BT': tokens_BT1[:, 1:],
            'loss_weights_BT': np.ones((len(rows_B), self.length), np.float32),
        }

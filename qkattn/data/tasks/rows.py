"""The interface between tasks and training: fixed-shape examples by number."""

from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from qkattn.config import Config, ModelConfig

Batch = dict[str, np.ndarray]
ArrayShapes = dict[str, tuple[int, np.dtype]]  # length and dtype of each array of a row
DataForm = Literal[
    'text in one language', 'a translation set', 'a causal probe', 'a labelling probe'
]

INT = np.dtype(np.int32)
FLOAT = np.dtype(np.float32)


class Rows(Protocol):
    """A task: a dataset, cut into rows for a kind of model."""

    kind: ClassVar[str]  # the model.kind that it trains
    data: ClassVar[DataForm]  # that it reads
    splits: tuple[str, ...]  # 'train', 'validation' and, where the data has one, 'test'
    vocab_size: int  # ids are in [0, vocab_size)

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        """Length and dtype of the arrays of one row, by name; needs no data."""
        T = model.context
        return {'tokens_BT': (T, INT), 'targets_BT': (T, INT), 'loss_weights_BT': (T, FLOAT)}

    @classmethod
    def open(cls, config: Config) -> Self:
        """The rows of a configuration; ConfigError if its data cannot be opened or does not fit."""

    def count(self, split: str) -> int:
        """Rows in a split, of 'train' those of an epoch; ConfigError if there are none."""

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads rows by number, as arrays [B, length] of `array_shapes`.

        These are tokens_BT and targets_BT; loss_weights_BT, 0 where nothing is predicted; and the
        model's other inputs by the names of its arguments. All randomness of a row comes from its
        pair of uint64 `draws_B2`: the seed, and the position in the endless training sequence (in
        an evaluation, 0 and the row).
        """

    def documents(self, split: str) -> tuple[list[str], np.ndarray] | None:
        """Names of the split's documents, and the index of each row's; None if independent."""
        return None

    def identity(self) -> dict[str, Any]:
        """Identifies the data in results and checkpoints; JSON."""

    def bytes_per_token(self, split: str) -> float | None:
        """Mean bytes of text per target; None where rows are not text."""
        return None

    def unigram_nats(self, split: str) -> float | None:
        """Loss per target of the best model that knows only frequencies, if known."""
        return None


def token_batch(
    tokens_BT: np.ndarray, targets_BT: np.ndarray, loss_weights_BT: np.ndarray
) -> Batch:
    """A batch of rows whose only input is tokens."""
    return {
        'tokens_BT': np.asarray(tokens_BT, INT),
        'targets_BT': np.asarray(targets_BT, INT),
        'loss_weights_BT': np.asarray(loss_weights_BT, FLOAT),
    }


def uniform(draws_B2: np.ndarray, shape: tuple[int, ...], part: int = 0) -> np.ndarray:
    """Numbers in [0, 1), an array of `shape` from each pair of draws; parts are independent."""
    u = np.empty((len(draws_B2), *shape))
    for draws_2, u_row in zip(np.asarray(draws_B2, np.uint64), u, strict=True):
        # A counter's high word sets the parts 2^192 draws apart.
        generator = np.random.Philox(key=draws_2, counter=part << 192)
        np.random.Generator(generator).random(out=u_row)
    return u

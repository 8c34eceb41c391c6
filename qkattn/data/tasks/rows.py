"""The interface between tasks and training: examples of a fixed shape, read by their number."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.metrics import PREFIXES, Metric, Sums

Batch = dict[str, np.ndarray]
# The length and dtype of each array of a row.
ArrayShapes = dict[str, tuple[int, np.dtype]]
DataForm = Literal[
    'text in one language', 'a translation set', 'a causal probe', 'a labelling probe'
]

INT = np.dtype(np.int32)
FLOAT = np.dtype(np.float32)


class Rows(Protocol):
    """A task: a dataset that is cut into rows, the examples of one kind of model."""

    # The model.kind that the task trains.
    kind: ClassVar[str]
    # The form of data that the task reads.
    data: ClassVar[DataForm]
    # Metrics that `end_metrics` measures and that `qkattn.metrics` does not have.
    metrics: ClassVar[tuple[Metric, ...]] = ()
    # 'train', 'validation' and, if the data have one, 'test'.
    splits: tuple[str, ...]
    # Token ids are in [0, vocab_size).
    vocab_size: int

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        """Returns the length and dtype of the arrays of one row, by name, without reading data."""
        T = model.context
        return {'tokens_BT': (T, INT), 'targets_BT': (T, INT), 'loss_weights_BT': (T, FLOAT)}

    @classmethod
    def open(cls, config: Config) -> Self:
        """Opens the rows of a configuration.

        Raises ConfigError if the data cannot be opened or do not fit the model.
        """

    def count(self, split: str) -> int:
        """Returns the number of rows of a split; for 'train' those of one epoch.

        Raises ConfigError if there are none.
        """

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads B rows by index.

        Args:
          split: one of `splits`.
          rows_B: row indices in the split.
          draws_B2: the random seed of each row, two uint64. Training passes (trial seed, position
            in the training sequence over all epochs). Evaluation passes (0, row index).

        Returns:
          Arrays [B, ...] by name: tokens_BT, targets_BT, loss_weights_BT and other arguments of the
          model. `array_shapes` describes one row. Positions without a target have loss weight 0.
        """

    def documents(self, split: str) -> tuple[list[str], np.ndarray] | None:
        """Returns the names of a split's documents, and the index of the document of each row.

        Returns None if the task has no documents, so that its rows are independent.
        """
        return None

    def identity(self) -> dict[str, Any]:
        """Returns what identifies the data in results and checkpoints, as JSON."""

    def bytes_per_token(self, split: str) -> float | None:
        """Returns the mean bytes of text per target; None if rows are not text."""
        return None

    def unigram_nats(self, split: str) -> float | None:
        """Returns the loss per target of the best model that knows only token frequencies.

        Returns None if that is unknown.
        """
        return None

    def end_metrics(
        self, trained: 'TrainedTrials', finished_X: np.ndarray
    ) -> Mapping[str, Sequence[Any] | np.ndarray]:
        """Measures the X trials of a run when training ends, in addition to the evaluations.

        Returns values [X] by field of a result, such as 'val_bleu'. A field is that of a metric, or
        one of the details of a metric. Values of trials for which `finished_X` is false are not
        used; their results have None.
        """
        return {}

    def yardsticks(self, config: Config) -> 'Yardsticks':
        """Measures on the data what the models of a configuration have to beat.

        By default, this is the loss of a model that knows only token frequencies. If that is
        unknown, it is the loss of a uniform prediction.
        """
        losses = {}
        for split in self.splits[1:]:  # the first one is 'train'
            chance = self.unigram_nats(split)
            if chance is None:
                chance = float(np.log(self.vocab_size))
            losses[PREFIXES[split]] = {'chance': chance}  # by 'val' or 'test'
        return Yardsticks(task='probe', losses=losses)

    def context_losses(self, losses_by_position: 'LossesByPosition') -> Mapping[str, np.ndarray]:
        """Measures losses [X], in nats/token, that show whether trained models use their context.

        Returns them by field of yardsticks.json: 'early' and 'late' are losses early and late in
        the context; 'shuffled' is the loss of translations with the sources of other sentences.
        """
        return {}


# The loss of X trials summed over rows, [X, T], and the summed weights of the targets, [T].
LossesByPosition = Callable[[Rows], tuple[np.ndarray, np.ndarray]]


class TrainedTrials(Protocol):
    """What a task needs of the X trained trials of a run to measure them."""

    config: Config

    def sums(self, read: Callable[..., Iterable[Batch]]) -> Sums:
        """Computes `qkattn.metrics.row_sums` of R rows; returns arrays [R, X, ...] by metric.

        `read(batch_size=..., part=...)` returns the batches of the rows, with the arguments of
        `qkattn.data.pipeline.eval_batches`.
        """

    def translate(self, x: int, tokenizer: Tokenizer, sources: Sequence[np.ndarray]) -> list[str]:
        """Translates sources (token ids without separators) with the model of trial x."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """What models of a task have to beat, measured on the data alone."""

    # 'language', 'masked', 'translation' or 'probe'; it decides what a report shows.
    task: str
    # The number of training tokens that were counted, if any were.
    tokens: int | None = None
    # Losses in nats/token by prefix of a split ('val' or 'test') and name of the yardstick.
    losses: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    # BLEU by prefix of a split; None for tasks other than translation.
    bleu: Mapping[str, float] | None = None


def token_batch(
    tokens_BT: np.ndarray, targets_BT: np.ndarray, loss_weights_BT: np.ndarray
) -> Batch:
    """Returns a batch of rows whose only input is tokens, in the dtypes of `array_shapes`."""
    return {
        'tokens_BT': np.asarray(tokens_BT, INT),
        'targets_BT': np.asarray(targets_BT, INT),
        'loss_weights_BT': np.asarray(loss_weights_BT, FLOAT),
    }


def uniform(draws_B2: np.ndarray, shape: tuple[int, ...], stream: int = 0) -> np.ndarray:
    """Draws random numbers in [0, 1) for B rows: an array [B, *shape].

    Args:
      draws_B2: two uint64 for each row, the seed of its numbers.
      shape: the shape of the numbers of a row.
      stream: 0, 1, ...; the numbers of different streams are independent of each other.
    """
    u = np.empty((len(draws_B2), *shape))
    for draws_2, u_row in zip(np.asarray(draws_B2, np.uint64), u, strict=True):
        # Philox has a counter of 256 bits, which numbers its draws. Streams begin 2^192 draws
        # apart, so they never overlap.
        generator = np.random.Philox(key=draws_2, counter=stream << 192)
        np.random.Generator(generator).random(out=u_row)
    return u

"""The interface between tasks and training: examples of a fixed shape, read by index."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.metrics import PREFIXES, Metric, Sums

Batch = dict[str, np.ndarray]
# The length and dtype of each array of a row, by name.
ArrayShapes = dict[str, tuple[int, np.dtype]]
DataForm = Literal[
    'text in one language', 'a translation set', 'a causal probe', 'a labelling probe'
]

INT = np.dtype(np.int32)
FLOAT = np.dtype(np.float32)


class Rows(Protocol):
    """A task: a dataset of rows, each an example of fixed shape."""

    # The model.kind that the task trains.
    kind: ClassVar[str]
    # The form of data that the task reads.
    data: ClassVar[DataForm]
    # Metrics that `end_metrics` returns in addition to those in `qkattn.metrics`.
    metrics: ClassVar[tuple[Metric, ...]] = ()
    # 'train', 'validation' and optionally 'test'.
    splits: tuple[str, ...]
    # Token ids are in [0, vocab_size).
    vocab_size: int

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        """Returns the length and dtype of each array of a row."""
        T = model.context
        return {'tokens_BT': (T, INT), 'targets_BT': (T, INT), 'loss_weights_BT': (T, FLOAT)}

    @classmethod
    def open(cls, config: Config) -> Self:
        """Opens the rows of a configuration.

        Raises:
            ConfigError: The data cannot be opened or do not fit the model.
        """

    def count(self, split: str) -> int:
        """Returns the number of rows in a split; for 'train', in one epoch.

        Raises:
            ConfigError: The split has no rows.
        """

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads B rows by index.

        Args:
            split: One of `splits`.
            rows_B: Row indices in the split.
            draws_B2: The random seed of each row, two uint64. Training passes (trial seed, position
                in the training sequence over all epochs). Evaluation passes (0, row index).

        Returns:
            Arrays [B, ...] by name: tokens_BT, targets_BT, loss_weights_BT and other arguments of
            the model. `array_shapes` describes one row. Positions without a target have loss weight
            0.
        """

    def documents(self, split: str) -> tuple[list[str], np.ndarray] | None:
        """Returns the document names of a split, and the index of each row's document.

        Returns None if the task has no documents. Its rows are then independent.
        """
        return None

    def identity(self) -> dict[str, Any]:
        """Returns JSON that identifies the data in results and checkpoints."""

    def bytes_per_token(self, split: str) -> float | None:
        """Returns the mean bytes of text per target, or None if rows are not text."""
        return None

    def unigram_nats(self, split: str) -> float | None:
        """Returns the loss of predicting token frequencies, in nats/token; None if unknown."""
        return None

    def end_metrics(
        self, trained: 'TrainedTrials', finished_X: np.ndarray
    ) -> Mapping[str, Sequence[Any] | np.ndarray]:
        """Computes the metrics that are measured only at the end of training.

        Args:
            trained: The X trials of a run.
            finished_X: Which trials are finished. Values of other trials are not used.

        Returns:
            Values [X] by field of a result. A field is a prefixed metric or one of its details,
            such as 'val_bleu'.
        """
        return {}

    def yardsticks(self, config: Config) -> 'Yardsticks':
        """Computes baselines for the models of a configuration.

        The default baseline predicts token frequencies. If these are unknown, it predicts all
        tokens with equal probability.
        """
        losses = {}
        for split in self.splits[1:]:  # the first split is train
            chance = self.unigram_nats(split)
            if chance is None:
                chance = float(np.log(self.vocab_size))
            prefix = PREFIXES[split]  # 'val' or 'test'
            losses[prefix] = {'chance': chance}
        return Yardsticks(task='probe', losses=losses)

    def context_losses(self, losses_by_position: 'LossesByPosition') -> Mapping[str, np.ndarray]:
        """Measures losses that show whether X trained models use their context.

        Args:
            losses_by_position: Evaluates the trials on rows.

        Returns:
            Losses [X] in nats/token: 'early' and 'late' in the context, or 'shuffled' for
            translation with the sources of other sentences.
        """
        return {}


# A function that evaluates X trials on rows. It returns losses [X, T] and loss weights [T], both
# summed over rows.
LossesByPosition = Callable[[Rows], tuple[np.ndarray, np.ndarray]]


class TrainedTrials(Protocol):
    """The X trained trials of a run, as tasks see them to measure metrics."""

    config: Config

    def sums(self, read: Callable[..., Iterable[Batch]]) -> Sums:
        """Sums the metrics of each row over its targets.

        Args:
            read: Returns the batches of R rows; called with the arguments `batch_size` and `part`
                of `qkattn.data.pipeline.eval_batches`.

        Returns:
            Arrays [R, X, ...] by metric; see `qkattn.metrics.row_sums`.
        """

    def translate(self, x: int, tokenizer: Tokenizer, sources: Sequence[np.ndarray]) -> list[str]:
        """Translates sources, token ids without separators, with the model of trial x."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """Baselines that models of a task should beat."""

    # 'language', 'masked', 'translation' or 'probe'; decides what a report shows.
    task: str
    # The number of training tokens that the baselines count, if any.
    tokens: int | None = None
    # Losses in nats/token by split ('val' or 'test') and baseline.
    losses: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    # BLEU by split; None for tasks other than translation.
    bleu: Mapping[str, float] | None = None


def token_batch(
    tokens_BT: np.ndarray, targets_BT: np.ndarray, loss_weights_BT: np.ndarray
) -> Batch:
    """Makes a batch whose only input is tokens, in the dtypes of `Rows.array_shapes`.

    Raises:
        TypeError: Ids are not whole numbers.
    """
    for name, ids_BT in {'tokens_BT': tokens_BT, 'targets_BT': targets_BT}.items():
        if not are_whole(ids_BT):
            dtype = np.asarray(ids_BT).dtype
            raise TypeError(f'{name} holds {dtype}; it must be of an integer type')
    return {
        'tokens_BT': np.asarray(tokens_BT, INT),
        'targets_BT': np.asarray(targets_BT, INT),
        'loss_weights_BT': np.asarray(loss_weights_BT, FLOAT),
    }


def are_whole(ids: np.ndarray) -> bool:
    """Returns whether an array is of an integer type, or of bools, which stand for 0 and 1."""
    return np.asarray(ids).dtype.kind in 'iub'  # signed, unsigned, bool


def uniform(draws_B2: np.ndarray, shape: tuple[int, ...], stream: int = 0) -> np.ndarray:
    """Draws uniform random numbers in [0, 1) for B rows.

    Args:
        draws_B2: The random seed of each row, two uint64.
        shape: The shape of a row's numbers.
        stream: 0, 1, ...; different streams are independent.

    Returns:
        An array [B, *shape].
    """
    u = np.empty((len(draws_B2), *shape))
    seeds_B2 = np.asarray(draws_B2, np.uint64)
    for seed_2, u_of_row in zip(seeds_B2, u, strict=True):
        # Streams are 2^192 draws apart, so they never overlap.
        bit_generator = np.random.Philox(key=seed_2, counter=stream << 192)
        np.random.Generator(bit_generator).random(out=u_of_row)  # writes into `u`
    return u

"""The interface between tasks and training: fixed-shape examples by number."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.metrics import PREFIXES, Metric, Sums

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
    data: ClassVar[DataForm]  # the form of data that it reads
    # What `end_metrics` measures beside the metrics of `qkattn.metrics`.
    metrics: ClassVar[tuple[Metric, ...]] = ()
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

    def end_metrics(
        self, trained: 'TrainedTrials', finished_X: np.ndarray
    ) -> Mapping[str, Sequence[Any] | np.ndarray]:
        """Measures the X trials of a run when training ends, beside the evaluations.

        Returns values [X] by field of a result, such as 'val_bleu': the field of a metric, or one
        of its details. A trial that is not finished, `finished_X`, needs no value: its result has
        None.
        """
        return {}

    def yardsticks(self, config: Config) -> 'Yardsticks':
        """Measures on the data of a configuration what its models have to beat.

        By default the loss of a guess by frequencies, or of all tokens alike where these are
        unknown.
        """
        losses = {}
        for split in self.splits[1:]:
            chance = self.unigram_nats(split)
            if chance is None:
                chance = float(np.log(self.vocab_size))
            losses[PREFIXES[split]] = {'chance': chance}
        return Yardsticks(task='probe', losses=losses)

    def context_losses(self, losses_by_position: 'LossesByPosition') -> Mapping[str, np.ndarray]:
        """Losses [X] of trained models, nats/token, that show whether they use their context.

        By field of yardsticks.json: 'early' and 'late' in the context, or 'shuffled', with the
        sources of other sentences.
        """
        return {}


# The loss of X trials summed over rows, [X, T], and the summed weights of the targets, [T].
LossesByPosition = Callable[[Rows], tuple[np.ndarray, np.ndarray]]


class TrainedTrials(Protocol):
    """The X trained trials of a run, as far as a task measures them."""

    config: Config

    def sums(self, read: Callable[..., Iterable[Batch]]) -> Sums:
        """`qkattn.metrics.row_sums` of R rows, [R, X, ...] by metric.

        `read(batch_size=..., part=...)` reads the batches, as `qkattn.data.pipeline.eval_batches`
        does once its rows and split are set.
        """

    def translate(self, x: int, tokenizer: Tokenizer, sources: Sequence[np.ndarray]) -> list[str]:
        """Translations by trial x of sources, token ids without separators."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """What models of a task have to beat, measured on the data alone."""

    task: str  # reports show measurements of 'language', 'masked', 'translation' and 'probe'
    tokens: int | None = None  # training tokens that were counted, if any
    # Nats/token by prefix of a split ('val', 'test') and name.
    losses: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    bleu: Mapping[str, float] | None = None  # by prefix of a split; None but for a translation


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
    """Random numbers in [0, 1), [B, *shape], that depend on the draws of their row alone.

    Numbers of different parts of one row are independent.
    """
    u = np.empty((len(draws_B2), *shape))
    for draws_2, u_row in zip(np.asarray(draws_B2, np.uint64), u, strict=True):
        # A counter's high word sets the parts 2^192 draws apart.
        generator = np.random.Philox(key=draws_2, counter=part << 192)
        np.random.Generator(generator).random(out=u_row)
    return u

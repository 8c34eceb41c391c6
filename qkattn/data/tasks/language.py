"""Tasks of text: the next tokens, or hidden tokens, of windows of text are predicted."""

import copy
from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.corpora.corpus_registry import refuse_unused
from qkattn.data.load import load_text
from qkattn.data.tasks.counts import neighbour_yardsticks, ngram_yardsticks
from qkattn.data.tasks.repeats import induction
from qkattn.data.tasks.rows import (
    FLOAT,
    INT,
    ArrayShapes,
    Batch,
    DataForm,
    LossesByPosition,
    Rows,
    TrainedTrials,
    Yardsticks,
    token_batch,
    uniform,
)
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError

# How many tokens are a short context: the loss of the EARLY-th target of a row is measured.
EARLY = 4


class TextRows(Rows):
    """Windows of `length` tokens of a text; subclasses choose which of them are predicted."""

    data: ClassVar[DataForm] = 'text in one language'

    def __init__(self, dataset: TokenDataset, length: int):
        self.dataset = dataset
        self.length = length
        self.splits = dataset.splits
        self.vocab_size = dataset.vocab_size

    def on_dataset(self, dataset: TokenDataset) -> Self:
        """Returns the same task on the tokens of another dataset, in ids of the same meaning."""
        rows = copy.copy(self)
        rows.dataset = dataset.in_ids_of(self.dataset.tokenizer)
        rows.splits = dataset.splits
        return rows

    def _check_length(self, split: str, longest: int) -> None:
        """Raises ConfigError if a window is longer than `longest` tokens."""
        if self.length > longest:
            raise ConfigError(
                f'model.context={self.length} is too long for split {split!r} of '
                f'{self.dataset.name}; it must be at most {max(longest, 0)}.'
            )

    def documents(self, split: str) -> tuple[list[str], np.ndarray]:
        """Assigns each row to the document of the token in its middle."""
        first_R = np.arange(self.count(split)) * self.length
        middle_R = first_R + (self.length + 1) // 2
        # The index of a token's document is the number of documents that end before the token.
        ends = self.dataset.document_ends(split)
        document_R = np.searchsorted(ends, middle_R, side='right')
        return self.dataset.document_names(split), document_R

    def identity(self) -> dict[str, Any]:
        return self.dataset.identity()

    def bytes_per_token(self, split: str) -> float | None:
        return self.dataset.bytes_per_token(split)

    def unigram_nats(self, split: str) -> float | None:
        return self.dataset.unigram_nats(split)


class LanguageRows(TextRows):
    """Windows of text. Each token is predicted from the tokens before it in its window.

    Window w of a split holds the tokens from `w * length` to `(w + 1) * length`, both included. Its
    last token is also the first token of window w + 1. So every token except the first one of a
    split is a target exactly once. Targets at the end of a split that do not fill a window are left
    out.

    With `shift`, training windows begin `offset` tokens later, and there is one window less. The
    offset, 0 <= offset < length, is drawn once for each (seed, epoch).
    """

    kind: ClassVar[str] = 'decoder'

    @classmethod
    def open(cls, config: Config) -> Self:
        data = config.data
        length = config.model.context
        refuse_unused(data, ('mask_rate', 'drop_long'), 'a decoder')
        return cls(load_text(data), length, shift=data.shift_windows)

    def __init__(self, dataset: TokenDataset, length: int, *, shift: bool = False):
        super().__init__(dataset, length)
        self.shift = shift

    def on_dataset(self, dataset: TokenDataset) -> Self:
        """Returns the same task on another dataset, whose training windows are not shifted."""
        rows = super().on_dataset(dataset)
        rows.shift = False
        return rows

    def count(self, split: str) -> int:
        num_tokens = len(self.dataset.split(split))
        if self.shift and split == 'train':
            self._check_length(split, num_tokens // 2)
            return num_tokens // self.length - 1
        self._check_length(split, num_tokens - 1)
        return (num_tokens - 1) // self.length

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads windows by number; every token of a window is a target."""
        first_B = rows_B * self.length
        if self.shift and split == 'train':
            first_B = first_B + self._offsets_B(draws_B2)
        # Windows have T + 1 tokens, because the last target is not an input.
        tokens_BT1 = self.dataset.windows(split, first_B, self.length + 1)
        weights_BT = np.ones((len(rows_B), self.length), FLOAT)
        return token_batch(tokens_BT1[:, :-1], tokens_BT1[:, 1:], weights_BT)

    def _offsets_B(self, draws_B2: np.ndarray) -> np.ndarray:
        """Returns the offsets of training windows; rows of one (seed, epoch) have the same."""
        seeds_B = draws_B2[:, 0]
        epochs_B = draws_B2[:, 1] // self.count('train')
        keys = list(zip(seeds_B.tolist(), epochs_B.tolist(), strict=True))
        offset_by_key = {}
        for key in set(keys):
            offset_by_key[key] = np.random.default_rng(key).integers(self.length)
        return np.array([offset_by_key[key] for key in keys])

    def end_metrics(self, trained: TrainedTrials, finished_X: np.ndarray) -> dict[str, np.ndarray]:
        return induction(self, trained)

    def yardsticks(self, config: Config) -> Yardsticks:
        return ngram_yardsticks(self, config)

    def context_losses(self, losses_by_position: LossesByPosition) -> dict[str, np.ndarray]:
        """Measures the loss after a short context, 'early', and after a long one, 'late'.

        'early' is the loss at the EARLY-th position. 'late' is the mean loss over the second half
        of the positions. Both are arrays [X], in nats/token. Returns {} if the rows are too short
        to compare them.
        """
        half = self.length // 2
        if half < EARLY:
            return {}
        # Evaluate the X trials on these rows. At each position, the losses and the weights of the
        # targets are summed over rows.
        nats_XT, weights_T = losses_by_position(self)
        return {
            'early': nats_XT[:, EARLY - 1] / weights_T[EARLY - 1],
            'late': nats_XT[:, half:].sum(1) / weights_T[half:].sum(),
        }


class DocumentRows(LanguageRows):
    """Windows of text as in LanguageRows, in which a token attends to its own document only.

    Segments number the documents of a window from 1. A separator is the last target of a document.
    As an input, it is the first token of the next document. With '|' for the separator, the inputs
    'a b | c' have the segments 1 1 2 2 and the positions 0 1 0 1.
    """

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        return Rows.array_shapes(model) | {'segments_BT': (model.context, INT)}

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        batch = super().read(split, rows_B, draws_B2)
        begins_document_BT = batch['tokens_BT'] == self.dataset.tokenizer.separator
        # Segments begin with 1, because 0 is padding.
        batch['segments_BT'] = 1 + begins_document_BT.cumsum(axis=1, dtype=INT)
        return batch


class MaskedRows(TextRows):
    """Windows of text in which an encoder restores hidden tokens (Devlin et al. 2019, 3.1).

    Window w of a split holds the tokens from `w * length` up to, not including, `(w + 1) * length`.
    Tokens at the end of a split that do not fill a window are left out.

    In each row, max(1, round(mask_rate * length)) positions are drawn without replacement. Only
    these are targets. A target becomes the mask with probability 0.8, and a random token other than
    the separator with probability 0.1. Otherwise it stays. In training, a row that is read again is
    masked differently; in an evaluation, it is always masked in the same way.
    """

    kind: ClassVar[str] = 'encoder'

    @classmethod
    def open(cls, config: Config) -> Self:
        not_taken = ('shift_windows', 'drop_long', 'cross_documents')
        refuse_unused(config.data, not_taken, 'an encoder')
        return cls(load_text(config.data), config.model.context, config.data.mask_rate)

    def __init__(self, dataset: TokenDataset, length: int, mask_rate: float = 0.15):
        super().__init__(dataset, length)
        self.mask_rate = mask_rate
        self.num_masked = max(1, round(mask_rate * length))
        self.mask = dataset.vocab_size  # the id of a hidden token, after the tokenizer's
        self.vocab_size = dataset.vocab_size + 1

    def count(self, split: str) -> int:
        num_tokens = len(self.dataset.split(split))
        self._check_length(split, num_tokens)
        return num_tokens // self.length

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads windows by number, and hides tokens in them at random."""
        targets_BT = self.dataset.windows(split, np.asarray(rows_B) * self.length, self.length)

        # Each position has three random numbers in [0, 1).
        u_B3T = uniform(draws_B2, (3, self.length))
        u_order_BT = u_B3T[:, 0]
        u_action_BT = u_B3T[:, 1]
        u_token_BT = u_B3T[:, 2]

        # The targets are the positions with the smallest numbers. This draws them without
        # replacement.
        order_BT = np.argsort(u_order_BT, axis=1)
        target_positions = order_BT[:, : self.num_masked]
        is_target_BT = np.zeros(targets_BT.shape, bool)
        np.put_along_axis(is_target_BT, target_positions, True, axis=1)

        # Of the targets, 80 % become the mask, and 10 % a random token. The others stay.
        is_masked_BT = is_target_BT & (u_action_BT < 0.8)
        is_random_BT = is_target_BT & (u_action_BT >= 0.8) & (u_action_BT < 0.9)
        tokens_BT = np.where(is_masked_BT, self.mask, targets_BT)
        tokens_BT = np.where(is_random_BT, self._random_tokens(u_token_BT), tokens_BT)
        return token_batch(tokens_BT, targets_BT, is_target_BT)

    def _random_tokens(self, u_BT: np.ndarray) -> np.ndarray:
        """Converts uniform numbers in [0, 1) to ids, uniform over all tokens but the separator."""
        vocab_size = self.dataset.vocab_size
        separator = self.dataset.tokenizer.separator
        if separator is None:
            return (u_BT * vocab_size).astype(np.int32)
        ids_BT = (u_BT * (vocab_size - 1)).astype(np.int32)
        # The ids from the separator's on move up by one, so that none is the separator.
        return ids_BT + (ids_BT >= separator)

    def identity(self) -> dict[str, Any]:
        return self.dataset.identity() | {'masking': {'version': 1, 'rate': self.mask_rate}}

    def yardsticks(self, config: Config) -> Yardsticks:
        return neighbour_yardsticks(self, config, self.mask)

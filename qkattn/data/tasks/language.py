"""Windows of text, of which next tokens or hidden tokens are predicted."""

from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config
from qkattn.data.corpora.corpus_registry import refuse_unused
from qkattn.data.load import load_text
from qkattn.data.tasks.counts import neighbour_yardsticks, ngram_yardsticks
from qkattn.data.tasks.repeats import induction
from qkattn.data.tasks.rows import (
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

EARLY = 4  # the position, counted from 1, whose loss stands for a short context


class TextRows(Rows):
    """Windows of `length` tokens of a text; subclasses choose which of them are predicted."""

    data: ClassVar[DataForm] = 'text in one language'

    def __init__(self, dataset: TokenDataset, length: int):
        self.dataset = dataset
        self.length = length
        self.splits = dataset.splits
        self.vocab_size = dataset.vocab_size

    def _check_length(self, split: str, longest: int) -> None:
        """Raises ConfigError where a window is longer than this number of tokens."""
        if self.length > longest:
            raise ConfigError(
                f'model.context={self.length} is too long for split {split!r} of '
                f'{self.dataset.name}; it must be at most {max(longest, 0)}.'
            )

    def documents(self, split: str) -> tuple[list[str], np.ndarray]:
        """A row belongs to the document of the token in its middle."""
        middle_R = np.arange(self.count(split)) * self.length + (self.length + 1) // 2
        ends = self.dataset.document_ends(split)
        return self.dataset.document_names(split), np.searchsorted(ends, middle_R, side='right')

    def identity(self) -> dict[str, Any]:
        return self.dataset.identity()

    def bytes_per_token(self, split: str) -> float | None:
        return self.dataset.bytes_per_token(split)

    def unigram_nats(self, split: str) -> float | None:
        return self.dataset.unigram_nats(split)


class LanguageRows(TextRows):
    """Windows of text, each token predicted from those before it in its window.

    Window w of a split holds tokens [w*length, (w+1)*length]: length + 1 tokens, of which the last
    is the first of window w + 1, so every token but the first of the split is a target exactly
    once. The fewer than `length` targets that fill no window are left out.

    With `shift`, training windows begin `offset` tokens later, 0 <= offset < length, drawn anew for
    every (seed, epoch), and there is one window fewer.
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

    def count(self, split: str) -> int:
        num_tokens = len(self.dataset.split(split))
        if self.shift and split == 'train':
            self._check_length(split, num_tokens // 2)
            return num_tokens // self.length - 1
        self._check_length(split, num_tokens - 1)
        return (num_tokens - 1) // self.length

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        first_B = rows_B * self.length
        if self.shift and split == 'train':
            first_B = first_B + self._offsets_B(draws_B2)
        # One token more, [B, T + 1]: the last is a target alone.
        tokens_BT1 = self.dataset.windows(split, first_B, self.length + 1)
        weights_BT = np.ones((len(rows_B), self.length))
        return token_batch(tokens_BT1[:, :-1], tokens_BT1[:, 1:], weights_BT)

    def _offsets_B(self, draws_B2: np.ndarray) -> np.ndarray:
        """The offsets of training windows, one random number for every (seed, epoch)."""
        seeds_B = draws_B2[:, 0]
        epochs_B = draws_B2[:, 1] // self.count('train')
        keys = list(zip(seeds_B.tolist(), epochs_B.tolist(), strict=True))
        offsets = {key: np.random.default_rng(key).integers(self.length) for key in set(keys)}
        return np.array([offsets[key] for key in keys])

    def end_metrics(self, trained: TrainedTrials, finished_X: np.ndarray) -> dict[str, np.ndarray]:
        return induction(self, trained)

    def yardsticks(self, config: Config) -> Yardsticks:
        return ngram_yardsticks(self, config)

    def context_losses(self, losses_by_position: LossesByPosition) -> dict[str, np.ndarray]:
        """The losses at position EARLY and over the last half of the context."""
        half = self.length // 2
        if half < EARLY:
            return {}
        nats_XT, weights_T = losses_by_position(self)
        return {
            'early': nats_XT[:, EARLY - 1] / weights_T[EARLY - 1],
            'late': nats_XT[:, half:].sum(1) / weights_T[half:].sum(),
        }


class MaskedRows(TextRows):
    """Windows of text of which an encoder restores the hidden tokens (Devlin et al. 2019, 3.1).

    Window w of a split holds tokens [w*length, (w+1)*length); the fewer than `length` tokens at the
    end of a split are left out. Of each row max(1, round(mask_rate * length)) positions are drawn
    without replacement, separators like any other token; they alone are targets. A drawn token
    becomes the mask with probability 0.8 and a random token with probability 0.1 (any but the
    separator, so possibly itself); otherwise it stays. A row that is read again is masked
    differently in training, and always the same in an evaluation.
    """

    kind: ClassVar[str] = 'encoder'

    @classmethod
    def open(cls, config: Config) -> Self:
        refuse_unused(config.data, ('shift_windows', 'drop_long'), 'an encoder')
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
        targets_BT = self.dataset.windows(split, np.asarray(rows_B) * self.length, self.length)
        u_B3T = uniform(draws_B2, (3, self.length))
        position_BT = u_B3T[:, 0]
        action_BT = u_B3T[:, 1]
        token_BT = u_B3T[:, 2]
        # The positions of the smallest of independent numbers are a draw without replacement.
        order_BT = np.argsort(position_BT, axis=1)
        is_target_BT = np.zeros(targets_BT.shape, bool)
        np.put_along_axis(is_target_BT, order_BT[:, : self.num_masked], True, axis=1)
        separator = self.dataset.tokenizer.separator
        if separator is None:
            random_BT = (token_BT * self.dataset.vocab_size).astype(np.int32)
        else:
            # A random id but the separator's: ids from that on move up by one.
            random_BT = (token_BT * (self.dataset.vocab_size - 1)).astype(np.int32)
            random_BT += random_BT >= separator
        hidden_BT = np.where(action_BT < 0.8, self.mask, random_BT)
        is_replaced_BT = is_target_BT & (action_BT < 0.9)
        tokens_BT = np.where(is_replaced_BT, hidden_BT, targets_BT)
        return token_batch(tokens_BT, targets_BT, is_target_BT)

    def identity(self) -> dict[str, Any]:
        return self.dataset.identity() | {'masking': {'version': 1, 'rate': self.mask_rate}}

    def yardsticks(self, config: Config) -> Yardsticks:
        return neighbour_yardsticks(self, config, self.mask)

"""Language modeling tasks: predict the next tokens, or masked tokens, of windows of text."""

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

# The number of context tokens in the loss after a short context.
EARLY = 4


class TextRows(Rows):
    """Windows of `length` tokens of a text; subclasses choose the targets."""

    data: ClassVar[DataForm] = 'text in one language'

    def __init__(self, dataset: TokenDataset, length: int):
        self.dataset = dataset
        self.length = length
        self.window_size = length  # tokens that a row is read from
        self.splits = dataset.splits
        self.vocab_size = dataset.vocab_size

    def on_dataset(self, dataset: TokenDataset) -> Self:
        """Returns the same task on another dataset, whose ids must have the same meaning."""
        rows = copy.copy(self)
        rows.dataset = dataset.in_ids_of(self.dataset.tokenizer)
        rows.splits = dataset.splits
        return rows

    def _check_length(self, split: str, max_length: int) -> None:
        """Raises ConfigError if windows are longer than `max_length` tokens."""
        if self.length > max_length:
            raise ConfigError(
                f'model.context={self.length} is too long for split {split!r} of '
                f'{self.dataset.name}; it must be at most {max(max_length, 0)}.'
            )

    def documents(self, split: str) -> tuple[list[str], np.ndarray]:
        """Assigns each row to the document of its middle token."""
        begin_R = np.arange(self.count(split)) * self.length
        middle_R = begin_R + self.window_size // 2
        # The index of a document is the number of documents that have ended before.
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
    """Windows of text for next-token prediction.

    Window w holds the tokens [w * length, (w + 1) * length] of a split. Windows overlap by one
    token, so every token but the first is a target once. An incomplete last window is left out.

    With `shift`, all training windows of an epoch begin `offset` tokens later, and there is one
    window less. The offset is drawn from [0, length) for each (seed, epoch).
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
        self.window_size = length + 1  # the last target is not an input
        self.shift = shift

    def on_dataset(self, dataset: TokenDataset) -> Self:
        """Returns the same task on another dataset, without shifted windows."""
        rows = super().on_dataset(dataset)
        rows.shift = False
        return rows

    def count(self, split: str) -> int:
        num_tokens = len(self.dataset.split(split))
        if self.shift and split == 'train':
            # One window is left out, so that windows may begin up to `length - 1` tokens later.
            self._check_length(split, max_length=num_tokens // 2)
            return num_tokens // self.length - 1
        # The last token is only a target.
        self._check_length(split, max_length=num_tokens - 1)
        return (num_tokens - 1) // self.length

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads windows by index; every position has a target."""
        begin_B = rows_B * self.length
        if self.shift and split == 'train':
            begin_B = begin_B + self._offsets_B(draws_B2)
        tokens_BT1 = self.dataset.windows(split, begin_B, self.window_size)
        return token_batch(
            tokens_BT=tokens_BT1[:, :-1],
            targets_BT=tokens_BT1[:, 1:],
            loss_weights_BT=np.ones((len(rows_B), self.length), FLOAT),
        )

    def _offsets_B(self, draws_B2: np.ndarray) -> np.ndarray:
        """Returns the offsets of training windows, one for each (seed, epoch)."""
        seed_B = draws_B2[:, 0]
        position_B = draws_B2[:, 1]  # in the training sequence over all epochs
        epoch_B = position_B // self.count('train')
        seeds_and_epochs = list(zip(seed_B.tolist(), epoch_B.tolist(), strict=True))
        offsets = {}
        for seed_and_epoch in set(seeds_and_epochs):
            rng = np.random.default_rng(seed_and_epoch)
            offsets[seed_and_epoch] = rng.integers(self.length)
        return np.array([offsets[seed_and_epoch] for seed_and_epoch in seeds_and_epochs])

    def end_metrics(self, trained: TrainedTrials, finished_X: np.ndarray) -> dict[str, np.ndarray]:
        return induction(self, trained)

    def yardsticks(self, config: Config) -> Yardsticks:
        return ngram_yardsticks(self, config)

    def context_losses(self, losses_by_position: LossesByPosition) -> dict[str, np.ndarray]:
        """Measures the losses of X trials after short and long contexts.

        Returns:
            Losses [X] in nats/token: 'early' at position EARLY, 'late' over the second half of all
            positions. {} if rows are too short.
        """
        half = self.length // 2
        if half < EARLY:
            return {}
        # Losses of all trials and loss weights at each position, summed over rows.
        nats_XT, weights_T = losses_by_position(self)
        early = EARLY - 1  # positions are numbered from 0
        return {
            'early': nats_XT[:, early] / weights_T[early],
            'late': nats_XT[:, half:].sum(axis=1) / weights_T[half:].sum(),
        }


class DocumentRows(LanguageRows):
    """LanguageRows in which a token attends only to its own document.

    Segments number the documents of a window. As an input, a separator begins the next document.
    For example, the inputs 'a b | c' with the separator '|' have the segments 1 1 2 2.
    """

    @classmethod
    def open(cls, config: Config) -> Self:
        """Opens the rows; raises ConfigError if the separator of documents is unknown."""
        rows = super().open(config)
        if rows.dataset.tokenizer.separator is None:
            raise ConfigError(
                'data.cross_documents=False needs the id that separates documents, which these '
                "tokens do not tell; name it, as in data.documents='id=50256', or name their "
                'tokenizer in data.tokenizer'
            )
        return rows

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        return Rows.array_shapes(model) | {'segments_BT': (model.context, INT)}

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        batch = super().read(split, rows_B, draws_B2)
        begins_document_BT = batch['tokens_BT'] == self.dataset.tokenizer.separator
        # Segment 0 is padding.
        batch['segments_BT'] = 1 + begins_document_BT.cumsum(axis=1, dtype=INT)
        return batch


class MaskedRows(TextRows):
    """Windows of text for masked language modeling (Devlin et al. 2019, section 3.1).

    Window w holds the tokens [w * length, (w + 1) * length) of a split. An incomplete last window
    is left out.

    Each row has max(1, round(mask_rate * length)) random targets. The input at a target is the mask
    token (probability 0.8), a random token (0.1) or the target itself (0.1). Random tokens are
    never the separator. Evaluations always mask a row in the same way, and training epochs do not.
    """

    kind: ClassVar[str] = 'encoder'

    @classmethod
    def open(cls, config: Config) -> Self:
        not_taken = ('shift_windows', 'drop_long', 'cross_documents')
        refuse_unused(config.data, not_taken, 'an encoder')
        dataset = load_text(config.data)
        return cls(dataset, length=config.model.context, mask_rate=config.data.mask_rate)

    def __init__(self, dataset: TokenDataset, length: int, mask_rate: float = 0.15):
        super().__init__(dataset, length)
        self.mask_rate = mask_rate
        self.num_masked = max(1, round(mask_rate * length))
        self.mask = dataset.vocab_size  # the mask token is the first id after the tokenizer's
        self.vocab_size = dataset.vocab_size + 1

    def count(self, split: str) -> int:
        num_tokens = len(self.dataset.split(split))
        self._check_length(split, max_length=num_tokens)
        return num_tokens // self.length

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads windows by index, and masks random tokens."""
        begin_B = np.asarray(rows_B) * self.length
        text_BT = self.dataset.windows(split, begin_B, self.length)

        # Three uniform numbers in [0, 1) for each position.
        u_B3T = uniform(draws_B2, shape=(3, self.length))
        u_order_BT = u_B3T[:, 0]
        u_action_BT = u_B3T[:, 1]
        u_token_BT = u_B3T[:, 2]

        # Draw targets without replacement.
        random_order_BT = np.argsort(u_order_BT, axis=1)
        target_positions = random_order_BT[:, : self.num_masked]
        is_target_BT = np.zeros(text_BT.shape, bool)
        np.put_along_axis(is_target_BT, target_positions, True, axis=1)

        # Mask 80 % of the targets, replace 10 % with random tokens, and keep 10 %.
        is_masked_BT = is_target_BT & (u_action_BT < 0.8)
        is_random_BT = is_target_BT & (u_action_BT >= 0.8) & (u_action_BT < 0.9)
        tokens_BT = np.where(is_masked_BT, self.mask, text_BT)
        tokens_BT = np.where(is_random_BT, self._random_tokens(u_token_BT), tokens_BT)
        return token_batch(tokens_BT, targets_BT=text_BT, loss_weights_BT=is_target_BT)

    def _random_tokens(self, u_BT: np.ndarray) -> np.ndarray:
        """Converts uniform numbers in [0, 1) to uniform ids, excluding the separator."""
        vocab_size = self.dataset.vocab_size
        separator = self.dataset.tokenizer.separator
        if separator is None:
            return (u_BT * vocab_size).astype(np.int32)
        # Number the other ids from 0. From the separator on, an id is its number plus 1.
        number_BT = (u_BT * (vocab_size - 1)).astype(np.int32)
        return number_BT + (number_BT >= separator)

    def identity(self) -> dict[str, Any]:
        return self.dataset.identity() | {'masking': {'version': 1, 'rate': self.mask_rate}}

    def yardsticks(self, config: Config) -> Yardsticks:
        return neighbour_yardsticks(self, config, self.mask)

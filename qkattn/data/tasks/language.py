"""Language modelling: windows of text, each token predicted from those before it."""

import abc
from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.load import load_text
from qkattn.data.tasks.rows import ArrayShapes, Batch, DataForm, token_shapes
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError


class TextRows(abc.ABC):
    """Windows of `length` tokens of a text; subclasses choose which of them are predicted."""

    data: ClassVar[DataForm] = 'text in one language'

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        return token_shapes(model)

    def __init__(self, dataset: TokenDataset, length: int):
        if length < 1:
            raise ConfigError(f'model.context={length!r} is too small; it must be at least 1.')
        self.dataset, self.length = dataset, length
        self.splits = dataset.splits
        self.vocab_size = dataset.vocab_size

    @abc.abstractmethod
    def count(self, split: str) -> int:
        """See `Rows`."""

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
        return cls(load_text(data), config.model.context, shift=data.shift_windows)

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
        tokens_BT1 = self.dataset.windows(split, first_B, self.length + 1)
        return {
            'tokens_BT': tokens_BT1[:, :-1],
            'targets_BT': tokens_BT1[:, 1:],
            'loss_weights_BT': np.ones((len(rows_B), self.length), np.float32),
        }

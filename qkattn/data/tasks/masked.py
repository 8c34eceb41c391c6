"""Masked language modelling: hidden tokens are restored from both sides."""

from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config
from qkattn.data.load import load_text
from qkattn.data.tasks.language import TextRows
from qkattn.data.tasks.rows import Batch
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError


class MaskedRows(TextRows):
    """Windows of text of which an encoder restores the hidden tokens (Devlin et al. 2019, 3.1).

    Window w of a split holds tokens [w*length, (w+1)*length); the fewer than `length` tokens at the
    end of a split are left out. Of each row max(1, round(mask_rate * length)) positions are drawn
    without replacement, separators like any other token; they alone are targets. A drawn token
    becomes the mask with probability 0.8 and a random token with probability 0.1 (any but the
    separator, so possibly itself); otherwise it stays. A row that is read again is masked
    differently in training, and always the same in an evaluation.

    Attributes:
      mask: the id of a hidden token, the one after the tokenizer's.

    Raises:
      ConfigError: a mask_rate or a length out of range.
    """

    kind: ClassVar[str] = 'encoder'

    @classmethod
    def open(cls, config: Config) -> Self:
        return cls(load_text(config.data), config.model.context, config.data.mask_rate)

    def __init__(self, dataset: TokenDataset, length: int, mask_rate: float = 0.15):
        super().__init__(dataset, length)
        if not 0 < mask_rate < 1:
            raise ConfigError(
                f'data.mask_rate={mask_rate!r} is out of range; it must lie between 0 and 1.'
            )
        self.mask_rate = mask_rate
        self.num_masked = max(1, round(mask_rate * length))
        self.mask = dataset.vocab_size
        self.vocab_size = dataset.vocab_size + 1

    def count(self, split: str) -> int:
        num_tokens = len(self.dataset.split(split))
        if num_tokens < self.length:
            raise ConfigError(
                f'model.context={self.length!r} is too long for split {split!r} of dataset '
                f'{self.dataset.name!r} with {num_tokens} tokens; it must be at most {num_tokens}.'
            )
        return num_tokens // self.length

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        targets_BT = self.dataset.windows(split, np.asarray(rows_B) * self.length, self.length)
        u_B3T = np.empty((len(targets_BT), 3, self.length))
        for draws_2, u_3T in zip(draws_B2.astype(np.uint64), u_B3T, strict=True):
            np.random.Generator(np.random.Philox(key=draws_2)).random(out=u_3T)
        # The positions of the smallest of independent numbers are a draw without replacement.
        order_BT = np.argsort(u_B3T[:, 0], axis=1)
        chosen_BT = np.zeros(targets_BT.shape, bool)
        np.put_along_axis(chosen_BT, order_BT[:, : self.num_masked], True, axis=1)
        replaced_BT = chosen_BT & (u_B3T[:, 1] < 0.9)
        hidden_BT = np.where(u_B3T[:, 1] < 0.8, self.mask, self._random_tokens(u_B3T[:, 2]))
        return {
            'tokens_BT': np.where(replaced_BT, hidden_BT, targets_BT).astype(np.int32),
            'targets_BT': targets_BT,
            'loss_weights_BT': chosen_BT.astype(np.float32),
        }

    def _random_tokens(self, u_BT: np.ndarray) -> np.ndarray:
        tokens_BT = (u_BT * (self.dataset.vocab_size - 1)).astype(np.int32)
        return tokens_BT + (tokens_BT >= self.dataset.tokenizer.separator)

    def identity(self) -> dict[str, Any]:
        return self.dataset.identity() | {'masking': {'version': 1, 'rate': self.mask_rate}}

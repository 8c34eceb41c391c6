"""Token shards as a dataset."""

import functools
from collections.abc import Iterator, Mapping

import numpy as np

from qkattn.data.shards.shard_files import ShardTokens
from qkattn.data.tokenizers.tokenizer import IdTokenizer, Tokenizer
from qkattn.data.tokens import SplitInfo, TokenDataset, entropy
from qkattn.errors import ConfigError


class ShardDataset(TokenDataset):
    """A dataset whose splits are `ShardTokens`; what an index does not say is counted when asked.

    Args as of `TokenDataset`; of a split's info, what is None is unknown.
    """

    def __init__(
        self,
        name: str,
        version: str,
        tokenizer: Tokenizer,
        splits: Mapping[str, tuple[ShardTokens, SplitInfo]],
        carved: Mapping[str, float] | None = None,
    ):
        super().__init__(name, version, tokenizer, splits, carved)
        self._counted = functools.cache(self._count)
        self._mean_bytes = functools.cache(self._bytes)

    def windows(self, split: str, first_B: np.ndarray, size: int) -> np.ndarray:
        tokens_BT = self.split(split).windows(first_B, size)
        if tokens_BT.size and (highest := int(tokens_BT.max())) >= self.vocab_size:
            raise ConfigError(
                f'split {split!r} of {self.name} holds the id {highest}, but its tokenizer '
                f'{self.tokenizer.name} has {self.vocab_size}; set data.tokenizer to '
                "'ids(vocab_size=N)', or fetch the shards again if they are damaged."
            )
        return tokens_BT

    def document_ends(self, split: str) -> np.ndarray:
        return self._counted(split)[0]

    def unigram_nats(self, split: str) -> float | None:
        known = self.info(split).unigram_nats_per_token
        return self._counted(split)[1] if known is None else known

    def bytes_per_token(self, split: str) -> float | None:
        if self.info(split).num_bytes is not None:
            return super().bytes_per_token(split)
        return None if isinstance(self.tokenizer, IdTokenizer) else self._mean_bytes(split)

    def _count(self, split: str) -> tuple[np.ndarray, float]:
        """The ends of the documents, and the entropy of the token frequencies."""
        counts_V, ends, at = np.zeros(self.vocab_size, np.int64), [np.empty(0, np.int64)], 0
        for ids in self.split(split).blocks():
            counts_V += np.bincount(ids, minlength=self.vocab_size)[: self.vocab_size]
            ends.append(np.flatnonzero(ids == self.tokenizer.separator) + at + 1)
            at += len(ids)
        # A document whose separator is missing ends with the split.
        open_end = [] if ends[-1].size and ends[-1][-1] == at else [at]
        return np.concatenate([*ends, np.array(open_end, np.int64)]), entropy(counts_V)

    def _bytes(self, split: str) -> float:
        num_bytes = sum(map(self.tokenizer.num_bytes, documents_of(self, split)))
        return num_bytes / len(self.split(split))


def documents_of(dataset: TokenDataset, split: str) -> Iterator[np.ndarray]:
    """The ids of each document with its separator."""
    start = 0
    for end in dataset.document_ends(split).tolist():
        yield dataset.windows(split, np.array([start]), end - start)[0]
        start = end

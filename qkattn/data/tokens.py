"""A tokenized corpus: the token ids of its splits, and their counts."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from qkattn.data.shard_files import Files, Shard, ShardTokens
from qkattn.data.tokenizers.tokenizer import IdTokenizer, Tokenizer
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """A split: where its tokens are, and its counts, None where nobody has counted.

    Attributes:
      num_documents: documents, each followed by a separator.
      document_names: of the documents of an evaluation split, where the corpus has names.
      num_tokens: token ids, separators included.
      num_bytes: bytes of text that the tokens stand for, one per separator.
      unigram_nats_per_token: entropy of the token frequencies.
      fingerprint: sha256 of all tokens, however they are cut into shards.
    """

    num_documents: int | None = None
    document_names: tuple[str, ...] | None = None
    num_tokens: int
    num_bytes: int | None = None
    unigram_nats_per_token: float | None = None
    fingerprint: str
    shards: tuple[Shard, ...]


class TokenDataset:
    """Token ids of the splits of one corpus; counts that are missing are made when asked for.

    Attributes:
      name: e.g. 'stdlib'.
      version: of the text, e.g. 'py3.11.7-1.0.0'.
      tokenizer: turns ids back into text and counts their bytes.
      vocab_size: ids are in [0, vocab_size).
      files: those of its shards.
      splits: their names, 'train' first.
      carved: the splits that were carved from train, and which part of it each is.
    """

    def __init__(
        self,
        name: str,
        version: str,
        tokenizer: Tokenizer,
        files: Files,
        splits: Mapping[str, SplitInfo],
        carved: Mapping[str, float] | None = None,
    ):
        self.name, self.version = name, version
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.files, self.splits, self.carved = files, tuple(splits), dict(carved or {})
        self._infos = dict(splits)
        self._tokens = {split: ShardTokens(files, info.shards) for split, info in splits.items()}
        self._counted = functools.cache(self._count)
        self._counted_bytes = functools.cache(self._count_bytes)

    def info(self, split: str) -> SplitInfo:
        """Shards and counts of a split; ConfigError for an unknown one."""
        if split not in self._infos:
            raise ConfigError(
                f'split={split!r} is not in dataset {self.name!r}; valid: '
                f'{", ".join(map(repr, self.splits))}.'
            )
        return self._infos[split]

    def split(self, split: str) -> ShardTokens:
        """Token ids of a split."""
        self.info(split)  # refuses an unknown one
        return self._tokens[split]

    def windows(self, split: str, first_B: np.ndarray, size: int) -> np.ndarray:
        """Rows of `size` consecutive tokens from these positions on, int32 [B, size].

        Raises:
          ConfigError: an id that is not in the vocabulary.
        """
        tokens_BT = self.split(split).windows(first_B, size)
        if tokens_BT.size and (highest := int(tokens_BT.max())) >= self.vocab_size:
            raise ConfigError(
                f'split {split!r} of {self.name} holds the id {highest}, but its tokenizer '
                f'{self.tokenizer.name} has {self.vocab_size}; set data.tokenizer to '
                "'ids(vocab_size=N)', or fetch the shards again if they are damaged."
            )
        return tokens_BT

    def document_ends(self, split: str) -> np.ndarray:
        """The position after each document's separator, ascending."""
        return self._counted(split)[0]

    def document_names(self, split: str) -> list[str]:
        """Names of a split's documents in order; their numbers where the corpus names none."""
        names = self.info(split).document_names
        return list(names or map(str, range(len(self.document_ends(split)))))

    def identity(self) -> dict[str, Any]:
        """Identifies the data in results and checkpoints; JSON."""
        fingerprints = {split: info.fingerprint for split, info in self._infos.items()}
        identity = {'name': self.name, 'version': self.version, 'tokenizer': self.tokenizer.name}
        carved = {'carved': self.carved} if self.carved else {}
        return {**identity, 'fingerprints': dict(sorted(fingerprints.items())), **carved}

    def unigram_nats(self, split: str) -> float:
        """Entropy of the token frequencies of a split, in nats per token."""
        known = self.info(split).unigram_nats_per_token
        return self._counted(split)[1] if known is None else known

    def bytes_per_token(self, split: str) -> float | None:
        """Bytes of text per token of a split, on average; None where ids have no text."""
        num_bytes, num_tokens = self.info(split).num_bytes, self.info(split).num_tokens
        if num_bytes is None and isinstance(self.tokenizer, IdTokenizer):
            return None
        return (self._counted_bytes(split) if num_bytes is None else num_bytes) / num_tokens

    def _count(self, split: str) -> tuple[np.ndarray, float]:
        """The ends of the documents, and the entropy of the token frequencies."""
        counts_V, ends, position = np.zeros(self.vocab_size, np.int64), [np.empty(0, np.int64)], 0
        for ids in self.split(split).blocks():
            counts_V += np.bincount(ids, minlength=self.vocab_size)[: self.vocab_size]
            ends.append(np.flatnonzero(ids == self.tokenizer.separator) + position + 1)
            position += len(ids)
        # A document whose separator is missing ends with the split.
        open_end = [] if position in (0, *ends[-1][-1:]) else [position]
        return np.concatenate([*ends, np.array(open_end, np.int64)]), entropy(counts_V)

    def _count_bytes(self, split: str) -> int:
        bounds = itertools.pairwise([0, *self.document_ends(split).tolist()])
        documents = (self.windows(split, np.array([a]), b - a)[0] for a, b in bounds)
        return sum(map(self.tokenizer.num_bytes, documents))


class PairDataset:
    """Tokenized parallel text: sentence i of a split is document i on both sides.

    Attributes:
      source, target: the two sides, tokenized alike.
      splits: those that both sides have.

    Raises:
      ConfigError: sides with different tokenizers or unequally many sentences.
    """

    def __init__(self, source: TokenDataset, target: TokenDataset):
        if source.tokenizer.name != target.tokenizer.name:
            raise ConfigError(
                f'source {source.name!r} and target {target.name!r} have the tokenizers '
                f'{source.tokenizer.name!r} and {target.tokenizer.name!r}; both sides of parallel '
                'text need the same one.'
            )
        self.source, self.target = source, target
        self.splits = tuple(split for split in source.splits if split in target.splits)
        self.vocab_size, self.separator = source.vocab_size, source.tokenizer.separator
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for split in self.splits:
            ends = source.document_ends(split), target.document_ends(split)
            if len(ends[0]) != len(ends[1]):
                raise ConfigError(
                    f'split {split!r} has {len(ends[0])} sentences in source {source.name!r} but '
                    f'{len(ends[1])} in target {target.name!r}; line i of one must translate line '
                    'i of the other.'
                )
            self._bounds[split] = np.append(0, ends[0]), np.append(0, ends[1])

    def bounds(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Source and target bounds [pairs + 1]: pair i is tokens [bounds[i], bounds[i + 1]).

        The last of these tokens is the separator.

        Raises:
          ConfigError: an unknown split.
        """
        if split not in self._bounds:
            raise ConfigError(
                f'split={split!r} is not in parallel text {self.source.name!r}; valid: '
                f'{", ".join(map(repr, self.splits))}.'
            )
        return self._bounds[split]

    def tokens(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """All source and all target tokens of a split."""
        return np.asarray(self.source.split(split)), np.asarray(self.target.split(split))

    def sentences(self, split: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """All source and all target sentences in file order, without separators."""
        source, target = (
            [ids[a:b] for a, b in zip(bounds[:-1], bounds[1:] - 1, strict=True)]
            for ids, bounds in zip(self.tokens(split), self.bounds(split), strict=True)
        )
        return source, target

    def identity(self) -> dict[str, Any]:
        """Identifies the data in results and checkpoints; JSON."""
        return {'source': self.source.identity(), 'target': self.target.identity()}


def entropy(counts_V: np.ndarray) -> float:
    """Entropy of the frequencies of ids, in nats per token."""
    frequencies = counts_V[counts_V > 0] / max(counts_V.sum(), 1)
    return -float(np.sum(frequencies * np.log(frequencies)))

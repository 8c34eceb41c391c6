"""Tokenized corpora: the token ids of their splits, and the counts of each split."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.errors import ConfigError

BLOCK = 1 << 22  # ids that are read at a time where a split is read through


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """Counts of a split."""

    num_documents: int
    document_names: tuple[str, ...] | None = None  # if the corpus has names; not of 'train'
    num_tokens: int  # with the separator that follows each document
    # Of text that the tokens stand for, one per separator; None where the vocabulary is unknown.
    num_bytes: int | None
    unigram_nats_per_token: float  # entropy of the token frequencies
    fingerprint: str  # sha256 of all tokens


class TokenIds(Protocol):
    """The ids of a split: an array, or several files that are read as one."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> np.ndarray: ...


def blocks(ids: TokenIds, start: int = 0) -> Iterator[np.ndarray]:
    """All ids from `start` on in order, a few million at a time."""
    for first in range(start, len(ids), BLOCK):
        yield ids[first : first + BLOCK]


def entropy(counts_V: np.ndarray) -> float:
    """Entropy of the frequencies of ids, in nats per token."""
    frequencies = counts_V[counts_V > 0] / counts_V.sum()
    return -float(np.sum(frequencies * np.log(frequencies)))


class TokenDataset:
    """Token ids of the splits of one corpus; ids are in [0, vocab_size).

    `version` is that of the text, e.g. 'py3.11.7-1.0.0'; `splits` are names, 'train' first;
    `carved` maps the splits that were carved from train to the fraction of it that each is;
    `document_ends` gives those of a split, by default the positions after its separators.
    """

    def __init__(
        self,
        name: str,
        version: str,
        tokenizer: Tokenizer,
        infos: Mapping[str, SplitInfo],
        tokens: Mapping[str, TokenIds],
        carved: Mapping[str, float] | None = None,
        document_ends: Callable[[str], np.ndarray] | None = None,
    ):
        self.name = name
        self.version = version
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.splits = tuple(infos)
        self.carved = dict(carved or {})
        self._infos = infos
        self._tokens = tokens
        # Once for each split, which is read through.
        self._ends = functools.cache(document_ends or self._document_ends)

    def info(self, split: str) -> SplitInfo:
        """Counts of a split; ConfigError for an unknown one."""
        if split not in self._infos:
            raise ConfigError(
                f'split={split!r} is not in dataset {self.name!r}; valid: '
                f'{", ".join(map(repr, self.splits))}.'
            )
        return self._infos[split]

    def split(self, split: str) -> TokenIds:
        """Token ids of a split, memory-mapped."""
        self.info(split)  # refuses an unknown one
        return self._tokens[split]

    def windows(self, split: str, first_B: np.ndarray, size: int) -> np.ndarray:
        """Rows of `size` consecutive tokens from these positions on, int32 [B, size]."""
        ids = self.split(split)
        if isinstance(ids, np.ndarray):
            return ids[first_B[:, None] + np.arange(size)].astype(np.int32)
        rows_BT = np.empty((len(first_B), size), np.int32)
        for row_T, first in zip(rows_BT, first_B.tolist(), strict=True):
            row_T[:] = ids[first : first + size]
        return rows_BT

    def document_ends(self, split: str) -> np.ndarray:
        """The position after each document's separator, ascending."""
        return self._ends(split)

    def document_names(self, split: str) -> list[str]:
        """Names of a split's documents in order; their numbers where the corpus names none."""
        info = self.info(split)
        if info.document_names:
            return list(info.document_names)
        return [str(number) for number in range(info.num_documents)]

    def identity(self) -> dict[str, Any]:
        """Identifies the data in results and checkpoints; JSON."""
        fingerprints = {split: info.fingerprint for split, info in self._infos.items()}
        identity = {
            'name': self.name,
            'version': self.version,
            'tokenizer': self.tokenizer.name,
            'fingerprints': dict(sorted(fingerprints.items())),
        }
        if self.carved:
            identity['carved'] = self.carved
        return identity

    def unigram_nats(self, split: str) -> float:
        """Entropy of the token frequencies of a split, in nats per token."""
        return self.info(split).unigram_nats_per_token

    def bytes_per_token(self, split: str) -> float | None:
        """Bytes of text per token of a split, on average; None where they are unknown."""
        info = self.info(split)
        if info.num_bytes is None:
            return None
        return info.num_bytes / info.num_tokens

    def _document_ends(self, split: str) -> np.ndarray:
        ends = [np.zeros(0, np.int64)]
        num_read = 0
        for ids in blocks(self.split(split)):
            separators = num_read + np.flatnonzero(ids == self.tokenizer.separator)
            ends.append(separators + 1)
            num_read += len(ids)
        return np.concatenate(ends)


class PairDataset:
    """Tokenized parallel text: sentence i of a split is document i on both sides.

    `splits` are those that both sides have. ConfigError if one has unequally many sentences.
    """

    def __init__(self, source: TokenDataset, target: TokenDataset):
        self.source = source
        self.target = target
        self.splits = tuple(split for split in source.splits if split in target.splits)
        self.vocab_size = source.vocab_size
        self.separator = source.tokenizer.separator
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for split in self.splits:
            source_ends = source.document_ends(split)
            target_ends = target.document_ends(split)
            if len(source_ends) != len(target_ends):
                raise ConfigError(
                    f'split {split!r} has {len(source_ends)} sentences in source {source.name!r} '
                    f'but {len(target_ends)} in target {target.name!r}; line i of one must '
                    'translate line i of the other.'
                )
            self._bounds[split] = (np.append(0, source_ends), np.append(0, target_ends))

    def bounds(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Source and target bounds [pairs + 1]: pair i is tokens [bounds[i], bounds[i + 1]).

        The last of these tokens is the separator. Raises ConfigError for an unknown split.
        """
        self.source.info(split)
        return self._bounds[split]

    def tokens(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """All source and all target tokens of a split."""
        return np.asarray(self.source.split(split)), np.asarray(self.target.split(split))

    def sentences(self, split: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """All source and all target sentences in file order, without separators."""

        def cut(tokens: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
            return [tokens[start : end - 1] for start, end in itertools.pairwise(bounds)]

        source, target = self.tokens(split)
        source_bounds, target_bounds = self.bounds(split)
        return cut(source, source_bounds), cut(target, target_bounds)

    def identity(self) -> dict[str, Any]:
        """Identifies the data in results and checkpoints; JSON."""
        return {'source': self.source.identity(), 'target': self.target.identity()}

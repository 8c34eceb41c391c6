"""Tokenized corpora: the token ids of their splits, and the counts of each split."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from qkattn.data.mapped import read_ahead
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.errors import ConfigError

# How many ids are read at a time when a whole split is read.
BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """The counts of a split, and what else is known about it without reading its tokens."""

    num_documents: int
    # None for 'train', and for a corpus without names.
    document_names: tuple[str, ...] | None = None
    # Includes the separator after each document.
    num_tokens: int
    # The bytes of text that the tokens stand for; a separator counts as one byte. None if the
    # vocabulary is unknown.
    num_bytes: int | None
    # The entropy of the token frequencies.
    unigram_nats_per_token: float
    # The sha256 of all tokens.
    fingerprint: str


class TokenIds(Protocol):
    """The ids of a split: an array, or several files that behave like one array."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> np.ndarray: ...


def blocks(ids: TokenIds, start: int = 0) -> Iterator[np.ndarray]:
    """Yields all ids from position `start` on, in order, BLOCK at a time."""
    for first in range(start, len(ids), BLOCK):
        block = ids[first : first + BLOCK]
        read_ahead(block)
        yield block


def entropy(counts_V: np.ndarray) -> float:
    """Returns the entropy of the frequencies of ids, in nats per token."""
    frequencies = counts_V[counts_V > 0] / counts_V.sum()
    return -float(np.sum(frequencies * np.log(frequencies)))


class TokenDataset:
    """The token ids of the splits of one corpus, and their counts. Ids are below vocab_size.

    The attribute `splits` holds the names of the splits, 'train' first.
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
        """Takes the parts of the dataset.

        Args:
          name: the name of the corpus.
          version: the version of its text, e.g. 'py3.11.7-1.0.0'.
          tokenizer: the tokenizer of the ids.
          infos: the counts of each split, such as its number of documents.
          tokens: the ids of each split.
          carved: the splits that were cut off the train split of the corpus, each with its fraction
            of train, as in {'test': 0.1}.
          document_ends: a function of a split that returns the position after each document. By
            default a document ends with the separator of the tokenizer.
        """
        self.name = name
        self.version = version
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.splits = tuple(infos)
        self.carved = dict(carved or {})
        self._infos = infos
        self._tokens = tokens
        # Cached by split, because finding the ends may read the whole split.
        self._ends = functools.cache(document_ends or self._document_ends)

    def in_ids_of(self, tokenizer: Tokenizer) -> 'TokenDataset':
        """Returns the same tokens with another tokenizer, which gives ids the same meaning."""
        dataset = copy.copy(self)
        dataset.tokenizer = tokenizer
        dataset.vocab_size = tokenizer.vocab_size
        return dataset

    def info(self, split: str) -> SplitInfo:
        """Returns the counts of a split; raises ConfigError for an unknown split."""
        if split not in self._infos:
            raise ConfigError(
                f'split={split!r} is not in dataset {self.name!r}; valid: '
                f'{", ".join(map(repr, self.splits))}.'
            )
        return self._infos[split]

    def split(self, split: str) -> TokenIds:
        """Returns the token ids of a split, memory-mapped."""
        self.info(split)  # raises ConfigError for an unknown split
        return self._tokens[split]

    def windows(self, split: str, first_B: np.ndarray, size: int) -> np.ndarray:
        """Returns rows of `size` consecutive tokens, int32 [B, size].

        Row b begins at position first_B[b] of the split.
        """
        ids = self.split(split)
        if isinstance(ids, np.ndarray):
            positions_BT = first_B[:, None] + np.arange(size)
            return ids[positions_BT].astype(np.int32)
        # Ids of several files can only be sliced.
        rows_BT = np.empty((len(first_B), size), np.int32)
        for row_T, first in zip(rows_BT, first_B.tolist(), strict=True):
            row_T[:] = ids[first : first + size]
        return rows_BT

    def document_ends(self, split: str) -> np.ndarray:
        """Returns the position after each document of a split, ascending."""
        return self._ends(split)

    def document_names(self, split: str) -> list[str]:
        """Returns the names of the documents of a split, in order.

        If the documents have no names, these are their numbers: '0', '1' and so on.
        """
        info = self.info(split)
        if info.document_names:
            return list(info.document_names)
        return [str(number) for number in range(info.num_documents)]

    def identity(self) -> dict[str, Any]:
        """Returns JSON that identifies the data in results and checkpoints."""
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
        """Returns the entropy of the token frequencies of a split, in nats per token."""
        return self.info(split).unigram_nats_per_token

    def bytes_per_token(self, split: str) -> float | None:
        """Returns the mean bytes of text per token of a split; None if they are unknown."""
        info = self.info(split)
        if info.num_bytes is None:
            return None
        return info.num_bytes / info.num_tokens

    def _document_ends(self, split: str) -> np.ndarray:
        """Returns the position after each separator of a split."""
        ends = [np.zeros(0, np.int64)]
        num_read = 0
        for ids in blocks(self.split(split)):
            separators = num_read + np.flatnonzero(ids == self.tokenizer.separator)
            ends.append(separators + 1)
            num_read += len(ids)
        return np.concatenate(ends)


class PairDataset:
    """Tokenized parallel text: sentence i of a split is document i of source and target.

    Source and target have one tokenizer, so they share `vocab_size` and `separator`. `splits` holds
    the splits that both of them have.
    """

    def __init__(self, source: TokenDataset, target: TokenDataset):
        """Pairs the sentences; raises ConfigError if a split has more of them on one side."""
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
        """Returns the bounds [pairs + 1] of the sentences of a split, in source and in target.

        Sentence i has the tokens [bounds[i], bounds[i + 1]). Its last token is the separator.
        Raises ConfigError for an unknown split.
        """
        self.source.info(split)
        return self._bounds[split]

    def tokens(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns all source tokens and all target tokens of a split."""
        return np.asarray(self.source.split(split)), np.asarray(self.target.split(split))

    def sentences(self, split: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns all source and all target sentences of a split in file order.

        Each sentence is an array of ids, without the separator.
        """

        def cut_sentences(tokens: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
            # The last token of a sentence is the separator.
            return [tokens[start : end - 1] for start, end in itertools.pairwise(bounds)]

        source, target = self.tokens(split)
        source_bounds, target_bounds = self.bounds(split)
        return cut_sentences(source, source_bounds), cut_sentences(target, target_bounds)

    def identity(self) -> dict[str, Any]:
        """Returns JSON that identifies the data in results and checkpoints."""
        return {'source': self.source.identity(), 'target': self.target.identity()}

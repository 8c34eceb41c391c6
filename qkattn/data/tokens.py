"""Tokenized corpora: the token ids and statistics of each split."""

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

# Ids per read of a whole split.
BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """Statistics of a split."""

    num_documents: int
    # None for 'train', and for a corpus without names.
    document_names: tuple[str, ...] | None = None
    # Includes a separator after each document.
    num_tokens: int
    # Bytes of the text, and one for each separator. None if the vocabulary is unknown.
    num_bytes: int | None
    # Entropy of the token frequencies.
    unigram_nats_per_token: float
    # sha256 of the token ids.
    fingerprint: str


class TokenIds(Protocol):
    """The ids of a split: an array, or several files that are sliced as one array."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> np.ndarray: ...


def blocks(ids: TokenIds, start: int = 0) -> Iterator[np.ndarray]:
    """Yields the ids from position `start` on, BLOCK at a time."""
    for first in range(start, len(ids), BLOCK):
        block = ids[first : first + BLOCK]
        read_ahead(block)
        yield block


def entropy(counts_V: np.ndarray) -> float:
    """Returns the entropy of token counts, in nats per token."""
    probabilities = counts_V[counts_V > 0] / counts_V.sum()
    return -float(np.sum(probabilities * np.log(probabilities)))


class TokenDataset:
    """The token ids and statistics of a corpus.

    Attributes:
        name: The name of the corpus.
        version: The version of the text.
        tokenizer: The tokenizer of the ids.
        vocab_size: All ids are below this number.
        splits: The split names, 'train' first.
        carved: The splits cut off the train split, each with its fraction of train.
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
        """Creates a dataset.

        Args:
            name: The name of the corpus.
            version: The version of the text, e.g. 'py3.11.7-1.0.0'.
            tokenizer: The tokenizer of the ids.
            infos: The statistics of each split.
            tokens: The ids of each split.
            carved: The splits cut off the train split, each with its fraction of train. For
                example, {'test': 0.1}.
            document_ends: A function from a split to the position after each document. By default,
                documents end with the separator of the tokenizer.
        """
        self.name = name
        self.version = version
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.splits = tuple(infos)
        self.carved = dict(carved or {})
        self._infos = infos
        self._tokens = tokens
        # Cached, because finding the ends may read the whole split.
        self._ends = functools.cache(document_ends or self._document_ends)

    def in_ids_of(self, tokenizer: Tokenizer) -> 'TokenDataset':
        """Returns a copy of the dataset with a tokenizer that gives ids the same meaning."""
        dataset = copy.copy(self)
        dataset.tokenizer = tokenizer
        dataset.vocab_size = tokenizer.vocab_size
        return dataset

    def info(self, split: str) -> SplitInfo:
        """Returns the statistics of a split.

        Raises:
            ConfigError: The split is unknown.
        """
        if split not in self._infos:
            raise ConfigError(
                f'split={split!r} is not in dataset {self.name!r}; valid: '
                f'{", ".join(map(repr, self.splits))}.'
            )
        return self._infos[split]

    def split(self, split: str) -> TokenIds:
        """Returns the memory-mapped token ids of a split."""
        self.info(split)  # raises ConfigError for an unknown split
        return self._tokens[split]

    def windows(self, split: str, first_B: np.ndarray, size: int) -> np.ndarray:
        """Returns rows of consecutive tokens.

        Args:
            split: The split.
            first_B: The position of each row's first token.
            size: Number of tokens in a row, T.

        Returns:
            ids_BT, int32.
        """
        ids = self.split(split)
        if isinstance(ids, np.ndarray):
            position_BT = first_B[:, None] + np.arange(size)
            return ids[position_BT].astype(np.int32)
        # Ids of several files can only be sliced.
        ids_BT = np.empty((len(first_B), size), np.int32)
        for b, first in enumerate(first_B.tolist()):
            ids_BT[b] = ids[first : first + size]
        return ids_BT

    def document_ends(self, split: str) -> np.ndarray:
        """Returns the position after each document of a split, ascending."""
        return self._ends(split)

    def document_names(self, split: str) -> list[str]:
        """Returns the document names of a split; without names, '0', '1' and so on."""
        info = self.info(split)
        if info.document_names:
            return list(info.document_names)
        return [str(index) for index in range(info.num_documents)]

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
        """Returns the mean bytes of text per token of a split, or None if unknown."""
        info = self.info(split)
        if info.num_bytes is None:
            return None
        return info.num_bytes / info.num_tokens

    def _document_ends(self, split: str) -> np.ndarray:
        """Returns the position after each separator of a split."""
        no_ends = np.zeros(0, np.int64)
        ends_of_blocks = [no_ends]  # for a split without blocks
        block_begin = 0
        for ids in blocks(self.split(split)):
            separator_positions = block_begin + np.flatnonzero(ids == self.tokenizer.separator)
            ends_of_blocks.append(separator_positions + 1)
            block_begin += len(ids)
        return np.concatenate(ends_of_blocks)


class PairDataset:
    """Tokenized parallel text: document i of the target translates document i of the source.

    Attributes:
        source: The dataset in the source language. Each document is a sentence.
        target: The dataset in the target language, with the same tokenizer.
        splits: The splits that source and target have.
        vocab_size: The size of the shared vocabulary.
        separator: The id at the end of each sentence.
    """

    def __init__(self, source: TokenDataset, target: TokenDataset):
        """Pairs the sentences.

        Raises:
            ConfigError: Source and target have different numbers of sentences in a split.
        """
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
            # Sentence i is between bounds i and i + 1.
            self._bounds[split] = (np.append(0, source_ends), np.append(0, target_ends))

    def bounds(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sentence bounds of a split in the source and in the target.

        Sentence i is tokens[bounds[i]:bounds[i + 1]], including the separator at its end.

        Raises:
            ConfigError: The split is unknown.
        """
        self.source.info(split)  # raises ConfigError for an unknown split
        return self._bounds[split]

    def tokens(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns all source tokens and all target tokens of a split."""
        source_ids = np.asarray(self.source.split(split))
        target_ids = np.asarray(self.target.split(split))
        return source_ids, target_ids

    def sentences(self, split: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns all source and all target sentences of a split, as ids without the separator."""

        def cut_sentences(ids: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
            # The last id of a sentence is the separator.
            return [ids[begin : end - 1] for begin, end in itertools.pairwise(bounds)]

        source_ids, target_ids = self.tokens(split)
        source_bounds, target_bounds = self.bounds(split)
        source_sentences = cut_sentences(source_ids, source_bounds)
        target_sentences = cut_sentences(target_ids, target_bounds)
        return source_sentences, target_sentences

    def identity(self) -> dict[str, Any]:
        """Returns JSON that identifies the data in results and checkpoints."""
        return {'source': self.source.identity(), 'target': self.target.identity()}

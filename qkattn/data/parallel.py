"""Tokenized parallel text: the same sentences in two languages."""

from typing import Any

import numpy as np

from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError


class PairDataset:
    """Parallel text: sentence i of a split is document i on both sides.

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
        self.vocab_size = source.vocab_size
        self.separator = source.tokenizer.separator
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for split in self.splits:
            sides = _bounds(source, split), _bounds(target, split)
            num_source, num_target = (len(bounds) - 1 for bounds in sides)
            if num_source != num_target:
                raise ConfigError(
                    f'split {split!r} has {num_source} sentences in source {source.name!r} but '
                    f'{num_target} in target {target.name!r}; line i of one must translate line i '
                    'of the other.'
                )
            self._bounds[split] = sides

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

    def sentences(self, split: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """All source and all target sentences in file order, without separators."""
        source_bounds, target_bounds = self.bounds(split)
        return (
            _sentences(self.source.split(split), source_bounds),
            _sentences(self.target.split(split), target_bounds),
        )

    def identity(self) -> dict[str, Any]:
        """Identifies the data in results and checkpoints; JSON."""
        return {'source': self.source.identity(), 'target': self.target.identity()}


def _bounds(side: TokenDataset, split: str) -> np.ndarray:
    return np.concatenate([[0], side.document_ends(split)])


def _sentences(tokens: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
    return [tokens[a:b] for a, b in zip(bounds[:-1], bounds[1:] - 1, strict=True)]

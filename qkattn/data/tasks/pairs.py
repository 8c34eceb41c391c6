"""Sentence pairs of parallel text, packed into rows of a fixed shape for an encoder-decoder."""

import dataclasses
import logging
from typing import Any

import numpy as np

from qkattn.config import ModelConfig
from qkattn.data.tasks.rows import ArrayShapes, Batch, token_shapes
from qkattn.data.tokens import TokenDataset
from qkattn.errors import ConfigError

# Changes whenever the same pairs would be packed differently.
PACKING = 1
# Rows that are being filled at a time; more pack a little tighter, and each pair looks at them all.
OPEN_ROWS = 64

log = logging.getLogger(__name__)


class PairDataset:
    """Parallel text: sentence i of a split is document i on both sides.

    Attributes:
      source, target: the two sides, tokenised alike.
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
        self._bounds = {}
        for split in self.splits:
            sides = [self._document_bounds(side, split) for side in (source, target)]
            num_source, num_target = (len(bounds) - 1 for bounds in sides)
            if num_source != num_target:
                raise ConfigError(
                    f'split {split!r} has {num_source} sentences in source {source.name!r} but '
                    f'{num_target} in target {target.name!r}; line i of one must translate line i '
                    'of the other.'
                )
            self._bounds[split] = tuple(sides)

    def _document_bounds(self, side: TokenDataset, split: str) -> np.ndarray:
        ends_I = np.flatnonzero(side.split(split) == self.separator) + 1
        return np.concatenate([[0], ends_I])

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
        return tuple(
            [tokens[a:b] for a, b in zip(bounds[:-1], bounds[1:] - 1, strict=True)]
            for tokens, bounds in zip(
                (self.source.split(split), self.target.split(split)),
                self.bounds(split),
                strict=True,
            )
        )

    def identity(self) -> dict[str, Any]:
        """What a result has to carry to say which data it is about; JSON."""
        return {'source': self.source.identity(), 'target': self.target.identity()}


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Row r holds pairs[first[r]:first[r + 1]], in this order."""

    pairs: np.ndarray
    first: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Placed:
    """The pairs of a batch, row after row: which, in which row, and their number there from 1."""

    num_rows: int
    pair_P: np.ndarray
    row_P: np.ndarray
    segment_P: np.ndarray


class TranslationRows:
    """Rows of several sentence pairs each, the target predicted from the source.

    A source x_1 .. x_m enters as itself and the separator, m + 1 tokens; a target y_1 .. y_n enters
    as the separator and itself and is predicted as itself and the separator, n + 1 tokens. Rows
    hold whole pairs, numbered from 1 in `source_segments_BS` and `segments_BT`, where 0 is padding
    (token 0, weight 0). Which pairs share a row depends on the data and the two lengths only, so
    that a row is to training what a window is to text; every pair is in exactly one row.

    Args:
      pairs: the parallel text.
      source_length: S, tokens of a row of sources.
      length: T, tokens of a row of targets.
      drop_long: leaves out, of every split, the pairs that are longer than a row.

    Raises:
      ConfigError: a length out of range; a pair longer than a row, unless `drop_long`.
    """

    def __init__(
        self, pairs: PairDataset, source_length: int, length: int, *, drop_long: bool = False
    ):
        for field, value in (('model.source_context', source_length), ('model.context', length)):
            if value < 1:
                raise ConfigError(f'{field}={value!r} is too small; it must be at least 1.')
        self.pairs, self.source_length, self.length = pairs, source_length, length
        self.splits, self.vocab_size = pairs.splits, pairs.vocab_size
        sizes = {
            split: np.stack([np.diff(b) for b in pairs.bounds(split)]) for split in self.splits
        }
        fits = {
            split: (sizes_2I[0] <= source_length) & (sizes_2I[1] <= length)
            for split, sizes_2I in sizes.items()
        }
        self.num_dropped = {split: int(np.sum(~fits_I)) for split, fits_I in fits.items()}
        if any(self.num_dropped.values()):
            self._report_long(sizes, drop_long)
        self._packed = {
            split: _pack(sizes[split], np.flatnonzero(fits[split]), (source_length, length))
            for split in self.splits
        }

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        """The arrays that `read` returns."""
        S, T, integer = model.encoder.context, model.context, np.dtype(np.int32)
        source = {'source_BS': (S, integer), 'source_segments_BS': (S, integer)}
        return token_shapes(model) | source | {'segments_BT': (T, integer)}

    def _report_long(self, sizes: dict[str, np.ndarray], drop_long: bool) -> None:
        if not drop_long:
            longest = [max(s[side].max(initial=0) for s in sizes.values()) for side in (0, 1)]
            raise ConfigError(
                f'{sum(self.num_dropped.values())} of {sum(s.shape[1] for s in sizes.values())} '
                f'sentence pairs are longer than model.source_context={self.source_length} or '
                f'model.context={self.length} tokens; the longest source has {longest[0]} and the '
                f'longest target {longest[1]} with their separators, so raise the two, or leave '
                'such pairs out, of evaluation too, with data.drop_long=True.'
            )
        for split, dropped in self.num_dropped.items():
            log.info(
                'drop_long: %d of %d pairs of split %r are left out of training and evaluation',
                dropped,
                sizes[split].shape[1],
                split,
            )

    def _rows(self, split: str) -> _Packed:
        num_pairs = len(self.pairs.bounds(split)[0]) - 1  # refuses an unknown split
        packed = self._packed[split]
        if not len(packed.pairs):
            raise ConfigError(
                f'split {split!r} of parallel text {self.pairs.source.name!r} has no sentence pair '
                f'that fits into model.source_context={self.source_length} and '
                f'model.context={self.length} tokens, of {num_pairs}.'
            )
        return packed

    def count(self, split: str) -> int:
        return len(self._rows(split).first) - 1

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        packed = self._rows(split)
        rows_B = np.asarray(rows_B)
        first_B, counts_B = packed.first[rows_B], packed.first[rows_B + 1] - packed.first[rows_B]
        placed = _Placed(
            num_rows=len(rows_B),
            pair_P=packed.pairs[_ranges(first_B, counts_B)],
            row_P=np.repeat(np.arange(len(rows_B)), counts_B),
            segment_P=_ranges(np.ones_like(counts_B), counts_B),
        )
        source, target = self.pairs.source.split(split), self.pairs.target.split(split)
        source_bounds, target_bounds = self.pairs.bounds(split)
        source_BS, source_segments_BS = _lay_out(source, source_bounds, self.source_length, placed)
        targets_BT, segments_BT = _lay_out(target, target_bounds, self.length, placed)
        # Each pair's target ends with the separator, so shifting the row by one puts a separator
        # before the next pair's first token; the row's own first is put there by hand.
        tokens_BT = np.roll(targets_BT, 1, axis=1)
        tokens_BT[:, 0] = self.pairs.separator
        return {
            'source_BS': source_BS,
            'source_segments_BS': source_segments_BS,
            'tokens_BT': np.where(segments_BT > 0, tokens_BT, 0),
            'targets_BT': targets_BT,
            'segments_BT': segments_BT,
            'loss_weights_BT': (segments_BT > 0).astype(np.float32),
        }

    def identity(self) -> dict[str, Any]:
        """The two sides, how pairs are packed, and how many `drop_long` left out per split."""
        return self.pairs.identity() | {
            'packing': {
                'version': PACKING,
                'source_length': self.source_length,
                'length': self.length,
            },
            'dropped_pairs': self.num_dropped,
        }

    def bytes_per_token(self, split: str) -> float:
        """Of the whole target side of the split."""
        return self.pairs.target.bytes_per_token(split)

    def unigram_nats(self, split: str) -> float:
        """Of the whole target side of the split."""
        return self.pairs.target.info(split).unigram_nats_per_token


def _lay_out(
    tokens: np.ndarray, bounds: np.ndarray, length: int, placed: _Placed
) -> tuple[np.ndarray, np.ndarray]:
    """One side of a batch: tokens_BT and segments_BT, int32."""
    sizes_P = bounds[placed.pair_P + 1] - bounds[placed.pair_P]
    row_N = np.repeat(placed.row_P, sizes_P)
    tokens_per_row_B = np.bincount(row_N, minlength=placed.num_rows)
    column_N = _ranges(np.zeros_like(tokens_per_row_B), tokens_per_row_B)
    tokens_BT = np.zeros((placed.num_rows, length), np.int32)
    segments_BT = np.zeros_like(tokens_BT)
    tokens_BT[row_N, column_N] = tokens[_ranges(bounds[placed.pair_P], sizes_P)]
    segments_BT[row_N, column_N] = np.repeat(placed.segment_P, sizes_P)
    return tokens_BT, segments_BT


def _ranges(starts_P: np.ndarray, counts_P: np.ndarray) -> np.ndarray:
    """start, start + 1, .., start + count - 1 of each, one after another."""
    before_P = np.cumsum(counts_P) - counts_P
    return np.arange(counts_P.sum()) + np.repeat(starts_P - before_P, counts_P)


def _pack(sizes_2I: np.ndarray, kept: np.ndarray, capacity_2: tuple[int, int]) -> _Packed:
    """Best fit of the pairs, in a shuffled order, into a bounded number of open rows."""
    order = kept[np.argsort(np.random.Generator(np.random.Philox(key=0)).random(len(kept)))]
    num_rows = OPEN_ROWS
    row_of_slot = list(range(num_rows))
    source_room_O = np.full(num_rows, capacity_2[0])
    target_room_O = np.full(num_rows, capacity_2[1])
    rows = []
    for source_size, target_size in sizes_2I[:, order].T.tolist():
        source_left_O = source_room_O - source_size
        target_left_O = target_room_O - target_size
        left_O = source_left_O + target_left_O
        left_O[np.minimum(source_left_O, target_left_O) < 0] = sum(capacity_2)
        slot = left_O.argmin()
        # A sentence has a token at least, its separator, so a row it fits into has less room left.
        if left_O[slot] == sum(capacity_2):
            # The row that is closest to full on either side is closed, an empty one opened.
            slot = np.minimum(source_room_O, target_room_O).argmin()
            source_room_O[slot], target_room_O[slot] = capacity_2
            row_of_slot[slot] = num_rows
            num_rows += 1
        source_room_O[slot] -= source_size
        target_room_O[slot] -= target_size
        rows.append(row_of_slot[slot])
    _, counts = np.unique(rows, return_counts=True)
    return _Packed(order[np.argsort(rows, kind='stable')], np.append(0, np.cumsum(counts)))

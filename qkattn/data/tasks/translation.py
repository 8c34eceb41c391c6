"""Translation: sentence pairs packed into rows of a fixed shape for an encoder-decoder."""

import copy
import dataclasses
import logging
from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.load import load_pairs
from qkattn.data.parallel import PairDataset
from qkattn.data.tasks.packing import PACKING, Packed, Placed, lay_out, pack, ranges
from qkattn.data.tasks.rows import INT, ArrayShapes, Batch, DataForm, token_shapes
from qkattn.errors import ConfigError

log = logging.getLogger(__name__)


class TranslationRows:
    """Rows of several sentence pairs each, the target predicted from the source.

    A source x_1 .. x_m enters as itself and the separator, m + 1 tokens; a target y_1 .. y_n enters
    as the separator and itself and is predicted as itself and the separator, n + 1 tokens. Rows
    hold whole pairs, numbered from 1 in `source_segments_BS` and `segments_BT`, where 0 is padding
    (token 0, loss weight 0). Which pairs share a row depends on the data and the two lengths only;
    every pair is in exactly one row.

    Args:
      pairs: the parallel text.
      source_length: S, tokens of a row of sources.
      length: T, tokens of a row of targets.
      drop_long: leaves out, of every split, the pairs that are longer than a row.

    Raises:
      ConfigError: a length out of range; a pair longer than a row, unless `drop_long`.
    """

    kind: ClassVar[str] = 'encoder_decoder'
    data: ClassVar[DataForm] = 'a translation set'

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        S, T = model.encoder.context, model.context
        source = {'source_BS': (S, INT), 'source_segments_BS': (S, INT)}
        return token_shapes(model) | source | {'segments_BT': (T, INT)}

    @classmethod
    def open(cls, config: Config) -> Self:
        model, data = config.model, config.data
        return cls(load_pairs(data), model.encoder.context, model.context, drop_long=data.drop_long)

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
        self._sources: dict[str, np.ndarray] = {}
        self._packed = {
            split: pack(sizes[split], np.flatnonzero(fits[split]), (source_length, length))
            for split in self.splits
        }

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

    def _rows(self, split: str) -> Packed:
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
        placed = Placed(
            num_rows=len(rows_B),
            pair_P=packed.pairs[ranges(first_B, counts_B)],
            row_P=np.repeat(np.arange(len(rows_B)), counts_B),
            segment_P=ranges(np.ones_like(counts_B), counts_B),
        )
        source, target = self.pairs.source.split(split), self.pairs.target.split(split)
        source_bounds, target_bounds = self.pairs.bounds(split)
        sources = placed
        if split in self._sources:
            sources = dataclasses.replace(placed, pair_P=self._sources[split][placed.pair_P])
        source_BS, source_segments_BS = lay_out(source, source_bounds, self.source_length, sources)
        targets_BT, segments_BT = lay_out(target, target_bounds, self.length, placed)
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

    def with_shuffled_sources(self) -> Self:
        """The same rows, in which a target stands beside the source of another pair.

        Sources change places among those of equal length, so that a model loses what it knows from
        their words alone; one whose length no other has stays.
        """
        shuffled = copy.copy(self)
        shuffled._sources = {}
        for split in self.splits:
            lengths_I = np.diff(self.pairs.bounds(split)[0])
            draw_I = np.random.Generator(np.random.Philox(key=0)).random(len(lengths_I))
            order_I = np.lexsort((draw_I, lengths_I))
            # Each moves to the next of its length, the last to the first.
            first_I = np.searchsorted(lengths_I[order_I], lengths_I[order_I])
            last_I = np.searchsorted(lengths_I[order_I], lengths_I[order_I], side='right') - 1
            place_I = np.arange(len(order_I))
            follows_I = np.where(place_I == last_I, first_I, place_I + 1)
            shuffled._sources[split] = np.empty_like(order_I)
            shuffled._sources[split][order_I] = order_I[follows_I]
        return shuffled

    def documents(self, split: str) -> None:
        return None

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

"""Translation: sentence pairs packed into rows of a fixed shape for an encoder-decoder."""

import copy
from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.corpora.corpus_registry import refuse_unused
from qkattn.data.load import load_pairs
from qkattn.data.tasks.rows import INT, ArrayShapes, Batch, DataForm, Rows, token_batch
from qkattn.data.tokens import PairDataset
from qkattn.errors import ConfigError

PACKING = 1  # changes whenever the same pairs would be packed differently
OPEN_ROWS = 64  # filled at a time; more pack a little tighter, but each pair looks at them all


class TranslationRows(Rows):
    """Rows of several sentence pairs each, the target predicted from the source.

    A source x_1 .. x_m enters as itself and the separator, m + 1 tokens; a target y_1 .. y_n enters
    as the separator and itself and is predicted as itself and the separator, n + 1 tokens. Rows
    hold whole pairs, numbered from 1 in `source_segments_BS` and `segments_BT`, where 0 is padding
    (token 0, loss weight 0). Which pairs share a row depends on the data and the two lengths, S and
    T, only; every pair is in exactly one row. Pairs longer than a row are a ConfigError;
    `drop_long` leaves them out, of every split.
    """

    kind: ClassVar[str] = 'encoder_decoder'
    data: ClassVar[DataForm] = 'a translation set'

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        S, T = model.encoder.context, model.context
        source = {'source_BS': (S, INT), 'source_segments_BS': (S, INT)}
        return Rows.array_shapes(model) | source | {'segments_BT': (T, INT)}

    @classmethod
    def open(cls, config: Config) -> Self:
        model = config.model
        data = config.data
        refuse_unused(data, ('mask_rate', 'shift_windows'), 'an encoder-decoder')
        return cls(load_pairs(data), model.encoder.context, model.context, drop_long=data.drop_long)

    def __init__(
        self, pairs: PairDataset, source_length: int, length: int, *, drop_long: bool = False
    ):
        self.pairs = pairs
        self.source_length = source_length
        self.length = length
        self.splits = pairs.splits
        self.vocab_size = pairs.vocab_size
        self._sources: dict[str, np.ndarray] = {}
        self.num_dropped: dict[str, int] = {}
        self._packed: dict[str, list[np.ndarray]] = {}  # the pairs of each row
        sizes = {s: np.stack([np.diff(b) for b in pairs.bounds(s)]) for s in self.splits}
        for split, sizes_2I in sizes.items():
            fits_I = (sizes_2I[0] <= source_length) & (sizes_2I[1] <= length)
            self.num_dropped[split] = int(np.sum(~fits_I))
            self._packed[split] = pack(sizes_2I, np.flatnonzero(fits_I), (source_length, length))
        if any(self.num_dropped.values()) and not drop_long:
            source, target = np.concatenate([*sizes.values()], axis=1).max(1)
            raise ConfigError(
                f'{sum(self.num_dropped.values())} sentence pairs do not fit into '
                f'model.source_context={source_length} and model.context={length}; they must be '
                f'at least {source} and {target}, or set data.drop_long=True to leave such pairs '
                'out, of evaluation too.'
            )

    def count(self, split: str) -> int:
        self.pairs.bounds(split)  # refuses an unknown split
        if not self._packed[split]:
            raise ConfigError(
                f'split {split!r} of {self.pairs.source.name} has no sentence pair that fits into '
                f'model.source_context={self.source_length} and model.context={self.length}.'
            )
        return len(self._packed[split])

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        pairs = [self._packed[split][row] for row in rows_B]
        pair_P = np.concatenate(pairs)
        row_P = np.repeat(np.arange(len(pairs)), [len(row) for row in pairs])
        segment_P = np.concatenate([np.arange(len(row)) + 1 for row in pairs])

        def lay_out(
            tokens: np.ndarray, bounds: np.ndarray, pair_P: np.ndarray, length: int
        ) -> np.ndarray:
            """Tokens and segments of one side."""
            starts_P = bounds[pair_P]
            ends_P = bounds[pair_P + 1]
            sizes_B = np.bincount(row_P, ends_P - starts_P, len(pairs))
            filled_BT = np.arange(length) < sizes_B[:, None]
            both_2BT = np.zeros((2, len(pairs), length), INT)
            sentences = [tokens[a:b] for a, b in zip(starts_P, ends_P, strict=True)]
            both_2BT[0, filled_BT] = np.concatenate(sentences)
            both_2BT[1, filled_BT] = np.repeat(segment_P, ends_P - starts_P)
            return both_2BT

        source, target = self.pairs.tokens(split)
        source_bounds, target_bounds = self.pairs.bounds(split)
        source_P = self._sources[split][pair_P] if split in self._sources else pair_P
        source_BS, source_segments_BS = lay_out(source, source_bounds, source_P, self.source_length)
        targets_BT, segments_BT = lay_out(target, target_bounds, pair_P, self.length)
        # Each target ends with the separator, which shifting puts before the next pair's tokens.
        tokens_BT = np.roll(targets_BT, 1, axis=1)
        tokens_BT[:, 0] = self.pairs.separator
        used_BT = segments_BT > 0
        return {
            'source_BS': source_BS,
            'source_segments_BS': source_segments_BS,
            'segments_BT': segments_BT,
            **token_batch(np.where(used_BT, tokens_BT, 0), targets_BT, used_BT),
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
            groups = np.split(order_I, np.flatnonzero(np.diff(lengths_I[order_I])) + 1)
            shuffled._sources[split] = np.empty_like(order_I)
            for group in groups:
                shuffled._sources[split][group] = np.roll(group, -1)
        return shuffled

    def identity(self) -> dict[str, Any]:
        lengths = {'source_length': self.source_length, 'length': self.length}
        packing = {'packing': {'version': PACKING} | lengths, 'dropped_pairs': self.num_dropped}
        return self.pairs.identity() | packing

    def bytes_per_token(self, split: str) -> float:
        """Of the whole split with the pairs that `drop_long` leaves out, as is `unigram_nats`."""
        return self.pairs.target.bytes_per_token(split)

    def unigram_nats(self, split: str) -> float:
        return self.pairs.target.unigram_nats(split)


def pack(sizes_2I: np.ndarray, kept: np.ndarray, capacity_2: tuple[int, int]) -> list[np.ndarray]:
    """Best fit of the pairs, in a shuffled order, into a bounded number of open rows."""
    order = kept[np.argsort(np.random.Generator(np.random.Philox(key=0)).random(len(kept)))]
    num_rows = OPEN_ROWS
    row_O = np.arange(num_rows)
    free_2O = np.repeat(np.array([capacity_2]).T, num_rows, axis=1)
    rows = []
    for size_2 in sizes_2I.T[order]:
        left_2O = free_2O - size_2[:, None]
        left_O = np.where(left_2O.min(0) < 0, sum(capacity_2), left_2O.sum(0))
        slot = left_O.argmin()
        # A sentence has a token at least, its separator, so a row it fits into has less space left.
        if left_O[slot] == sum(capacity_2):
            # The row that is closest to full on either side is closed, an empty one opened.
            slot = free_2O.min(0).argmin()
            free_2O[:, slot] = capacity_2
            row_O[slot] = num_rows
            num_rows += 1
        free_2O[:, slot] -= size_2
        rows.append(row_O[slot])
    if not rows:
        return []
    _, first = np.unique(sorted(rows), return_index=True)
    return np.split(order[np.argsort(rows, kind='stable')], first[1:])

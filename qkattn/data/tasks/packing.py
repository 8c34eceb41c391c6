"""Packs sentence pairs into rows of fixed lengths and lays their tokens out."""

import dataclasses

import numpy as np

# Changes whenever the same pairs would be packed differently.
PACKING = 1
# Rows that are being filled at a time; more pack a little tighter, and each pair looks at them all.
OPEN_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Packed:
    """Row r holds pairs[first[r]:first[r + 1]], in this order."""

    pairs: np.ndarray
    first: np.ndarray


@dataclasses.dataclass(frozen=True)
class Placed:
    """The pairs of a batch, row after row: which, in which row, and their number there from 1."""

    num_rows: int
    pair_P: np.ndarray
    row_P: np.ndarray
    segment_P: np.ndarray


def lay_out(
    tokens: np.ndarray, bounds: np.ndarray, length: int, placed: Placed
) -> tuple[np.ndarray, np.ndarray]:
    """One side of a batch: tokens_BT and segments_BT, int32."""
    sizes_P = bounds[placed.pair_P + 1] - bounds[placed.pair_P]
    row_N = np.repeat(placed.row_P, sizes_P)
    tokens_per_row_B = np.bincount(row_N, minlength=placed.num_rows)
    column_N = ranges(np.zeros_like(tokens_per_row_B), tokens_per_row_B)
    tokens_BT = np.zeros((placed.num_rows, length), np.int32)
    segments_BT = np.zeros_like(tokens_BT)
    tokens_BT[row_N, column_N] = tokens[ranges(bounds[placed.pair_P], sizes_P)]
    segments_BT[row_N, column_N] = np.repeat(placed.segment_P, sizes_P)
    return tokens_BT, segments_BT


def ranges(starts_P: np.ndarray, counts_P: np.ndarray) -> np.ndarray:
    """start, start + 1, .., start + count - 1 of each, one after another."""
    before_P = np.cumsum(counts_P) - counts_P
    return np.arange(counts_P.sum()) + np.repeat(starts_P - before_P, counts_P)


def pack(sizes_2I: np.ndarray, kept: np.ndarray, capacity_2: tuple[int, int]) -> Packed:
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
    return Packed(order[np.argsort(rows, kind='stable')], np.append(0, np.cumsum(counts)))

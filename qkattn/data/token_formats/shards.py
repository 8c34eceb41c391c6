"""Token files that other tools write: a shard is one file, and a split any number of them."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from qkattn.config.paths import require_regular
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Shard:
    """The ids of one file, memory-mapped."""

    path: Path
    ids: np.ndarray
    # The position after each document, ascending; None where the file does not say.
    document_ends: np.ndarray | None = None

    def cut(self, start: int, end: int) -> 'Shard':
        """The ids from `start` to `end`, which are ends of documents where these are known."""
        ends = self.document_ends
        if ends is not None:
            ends = ends[(ends > start) & (ends <= end)] - start
        return Shard(self.path, self.ids[start:end], ends)


class TokenFormat(Protocol):
    """A format of token files."""

    name: ClassVar[str]

    @staticmethod
    def reads(path: Path) -> bool:
        """Whether a file is of this format."""

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        """Maps a file; ConfigError where it is damaged.

        `dtype` is data.token_dtype, for a format that does not state the type of its ids.
        """


class Shards:
    """The ids of several shards, read as one array: len(shards), shards[first:end]."""

    def __init__(self, shards: Sequence[Shard]):
        self.shards = tuple(shards)
        self.dtype = shards[0].ids.dtype
        # Shard i holds the positions from _bounds[i] to _bounds[i + 1].
        sizes = [len(shard.ids) for shard in shards]
        self._bounds = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, positions: slice) -> np.ndarray:
        """The ids of a range of positions; a view where they are in one shard."""
        start, end, _ = positions.indices(len(self))
        number = bisect.bisect_right(self._bounds, start) - 1
        parts = []
        while start < end:
            first = self._bounds[number]
            ids = self.shards[number].ids
            part = ids[start - first : end - first]
            parts.append(part)
            start += len(part)
            number += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def starts(self) -> Iterator[tuple[int, Shard]]:
        """Each shard, with the position of its first id."""
        return zip(self._bounds[:-1], self.shards, strict=True)

    def cut(self, positions: Sequence[int]) -> list['Shards']:
        """The ids before, between and after these ascending positions."""
        bounds = [0, *positions, len(self)]
        parts = []
        for start, end in itertools.pairwise(bounds):
            shards = []
            for first, shard in self.starts():
                start_in_shard = max(start - first, 0)
                end_in_shard = min(end - first, len(shard.ids))
                if start_in_shard < end_in_shard:
                    shards.append(shard.cut(start_in_shard, end_in_shard))
            parts.append(Shards(shards))
        return parts


def mapped(path: Path, dtype: str | np.dtype, offset: int = 0) -> np.ndarray:
    """The ids of a file from byte `offset` on; ConfigError where the last one is cut."""
    try:
        require_regular(path, most=None)
        num_bytes = path.stat().st_size - offset
    except OSError as error:
        raise ConfigError(f'data.path: {path} cannot be read ({error.strerror})') from error
    size = np.dtype(dtype).itemsize
    if num_bytes <= 0:
        raise ConfigError(f'data.path: {path} holds no tokens')
    if num_bytes % size:
        raise ConfigError(
            f'data.path: {path} has {num_bytes:,} bytes of ids, which is no multiple of the {size} '
            f'bytes of an id in {np.dtype(dtype).name}; copy the file again, or set '
            'data.token_dtype'
        )
    # Slices of a memmap take several times as long as those of its array.
    return np.asarray(np.memmap(path, dtype, 'r', offset))


def refuse_other_dtype(path: Path, stated: str, requested: str | None) -> None:
    """Raises ConfigError where data.token_dtype is not the type that a file states."""
    if requested is not None and requested != stated:
        raise ConfigError(
            f'data.token_dtype={requested!r} does not fit {path}, whose header states {stated}; '
            'leave it at None'
        )

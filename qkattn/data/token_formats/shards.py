"""Token files that other tools write. Each file is a shard; a split has one or more shards."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from qkattn.config.paths import require_regular
from qkattn.data.mapped import map_ids, read_ahead
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Shard:
    """The ids of one file, memory-mapped."""

    path: Path
    ids: np.ndarray
    # The position after each document, ascending. None if the file does not say.
    document_ends: np.ndarray | None = None

    def cut(self, start: int, end: int) -> 'Shard':
        """Returns the part of the shard from `start` to `end`.

        If the file says where documents end, both must be bounds of documents.
        """
        ends = self.document_ends
        if ends is not None:
            # Take the ends of the documents in the part, and count them from its beginning.
            is_in_part = (ends > start) & (ends <= end)
            ends = ends[is_in_part] - start
        return Shard(self.path, self.ids[start:end], ends)


class TokenFormat(Protocol):
    """A format of token files."""

    name: ClassVar[str]

    @staticmethod
    def reads(path: Path) -> bool:
        """Whether a file has this format."""

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        """Opens a file, memory-mapped; raises ConfigError if it is damaged.

        `dtype` is data.token_dtype, the type of the ids for formats that do not state it.
        """


class Shards:
    """The ids of several shards, which behave like one array: len(shards), shards[first:end]."""

    def __init__(self, shards: Sequence[Shard]):
        self.shards = tuple(shards)
        self.dtype = shards[0].ids.dtype
        # Shard i holds the positions from _bounds[i] to _bounds[i + 1].
        sizes = [len(shard.ids) for shard in shards]
        self._bounds = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Returns the ids of a range of positions; a view if they are all in one shard."""
        start, end, _ = positions.indices(len(self))
        # Begin with the shard that holds `start`, and take the ids up to `end` from it, or up to
        # its end. Go on with the next shard.
        number = bisect.bisect_right(self._bounds, start) - 1
        parts = []
        while start < end:
            first = self._bounds[number]
            part = self.shards[number].ids[start - first : end - first]
            parts.append(part)
            start += len(part)
            number += 1
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            read_ahead(part)
        # The empty array sets the type if the range is empty.
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def shards_with_start(self) -> Iterator[tuple[int, Shard]]:
        """Yields (position of the first id, shard) for each shard."""
        return zip(self._bounds[:-1], self.shards, strict=True)

    def cut(self, positions: Sequence[int]) -> list['Shards']:
        """Cuts the ids at ascending positions: n positions give n + 1 parts."""
        bounds = [0, *positions, len(self)]
        parts = []
        for start, end in itertools.pairwise(bounds):
            # Take from each shard, whose ids begin at `first`, what lies between the two bounds.
            shards = []
            for first, shard in self.shards_with_start():
                start_in_shard = max(start - first, 0)
                end_in_shard = min(end - first, len(shard.ids))
                if start_in_shard < end_in_shard:
                    shards.append(shard.cut(start_in_shard, end_in_shard))
            parts.append(Shards(shards))
        return parts


def memory_map_ids(path: Path, dtype: str | np.dtype, offset: int = 0) -> np.ndarray:
    """Returns the ids of a file, memory-mapped, from byte `offset` to its end.

    Raises ConfigError if there are no ids, or if the bytes of the last one are incomplete.
    """
    try:
        require_regular(path, most=None)  # of any size
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
    return map_ids(path, dtype, offset)


def refuse_other_dtype(path: Path, stated: str, requested: str | None) -> None:
    """Raises ConfigError if data.token_dtype differs from the type that a file states.

    `requested` is data.token_dtype; None agrees with every file.
    """
    if requested is not None and requested != stated:
        raise ConfigError(
            f'data.token_dtype={requested!r} does not fit {path}, whose header states {stated}; '
            'leave it at None'
        )

"""Token files of other tools. Each file is a shard, and a split has one or more shards."""

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
    """The memory-mapped ids of one file."""

    path: Path
    ids: np.ndarray
    # The position after each document, ascending. None without an index of documents.
    document_ends: np.ndarray | None = None

    def cut(self, start: int, end: int) -> 'Shard':
        """Returns a shard of ids[start:end]; both positions must be bounds of documents."""
        ends = self.document_ends
        if ends is not None:
            is_inside = (ends > start) & (ends <= end)
            ends = ends[is_inside] - start
        return Shard(self.path, self.ids[start:end], document_ends=ends)


class TokenFormat(Protocol):
    """A format of token files."""

    name: ClassVar[str]

    @staticmethod
    def reads(path: Path) -> bool:
        """Whether a file has this format."""

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        """Memory-maps a file.

        Args:
            path: The file.
            dtype: The value of data.token_dtype, for formats that do not state the type of ids.

        Raises:
            ConfigError: The file is damaged.
        """


class Shards:
    """Several shards that are sliced like one array of ids: shards[start:end]."""

    def __init__(self, shards: Sequence[Shard]):
        self.shards = tuple(shards)
        self.dtype = shards[0].ids.dtype
        # Shard i holds the positions [_bounds[i], _bounds[i + 1]).
        sizes = [len(shard.ids) for shard in shards]
        self._bounds = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Returns the ids of a slice; a view if all are in one shard."""
        start, end, _ = positions.indices(len(self))  # from 0, even if they are None or negative
        i = bisect.bisect_right(self._bounds, start) - 1  # the shard that holds `start`
        parts = []
        while start < end:
            shard_begin = self._bounds[i]
            ids_of_shard = self.shards[i].ids
            part = ids_of_shard[start - shard_begin : end - shard_begin]
            parts.append(part)
            start += len(part)
            i += 1
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            read_ahead(part)  # lets the kernel read all parts at the same time
        no_ids = np.zeros(0, self.dtype)  # for an empty slice
        return np.concatenate([no_ids, *parts])

    def shards_with_start(self) -> Iterator[tuple[int, Shard]]:
        """Yields (position of the first id, shard) for each shard."""
        return zip(self._bounds[:-1], self.shards, strict=True)

    def cut(self, positions: Sequence[int]) -> list['Shards']:
        """Cuts the ids at n ascending positions into n + 1 parts."""
        bounds = [0, *positions, len(self)]
        parts = []
        for part_begin, part_end in itertools.pairwise(bounds):
            shards = []
            for shard_begin, shard in self.shards_with_start():
                # The overlap of the part and the shard, as positions in the shard.
                begin = max(part_begin - shard_begin, 0)
                end = min(part_end - shard_begin, len(shard.ids))
                if begin < end:
                    shards.append(shard.cut(begin, end))
            parts.append(Shards(shards))
        return parts


def memory_map_ids(path: Path, dtype: str | np.dtype, offset: int = 0) -> np.ndarray:
    """Memory-maps the ids of a file, from byte `offset` on.

    Raises:
        ConfigError: The file cannot be read, has no ids, or ends with an incomplete id.
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
    """Raises ConfigError if a file states another dtype than data.token_dtype requests."""
    if requested is not None and requested != stated:
        raise ConfigError(
            f'data.token_dtype={requested!r} does not fit {path}, whose header states {stated}; '
            'leave it at None'
        )

"""Token files without a header, such as nanoGPT's `train.bin` and `val.bin`."""

from pathlib import Path
from typing import ClassVar

import numpy as np

from qkattn.data.token_formats.shards import Shard, TokenFormat, memory_map_ids
from qkattn.errors import ConfigError

DTYPE = 'uint16'  # the type of nanoGPT's ids
SAMPLE = 4096  # how many ids are examined to guess their type
# Ids are below 2**20. So the upper 16 bits of an id in uint32 are below this number.
UPPER_HALF_END = 16
# A header of llm.c, and of tools like it, has 256 fields of type int32. At most the first 8 are in
# use; the others are 0.
HEADER_FIELDS = 256
USED_FIELDS = 8
HEADER_BYTES = 4 * HEADER_FIELDS


class Headerless(TokenFormat):
    """A file that holds ids and nothing else.

    The ids are uint16, unless data.token_dtype names another type. As in nanoGPT:
    https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py
    """

    name: ClassVar[str] = 'headerless'

    @staticmethod
    def reads(path: Path) -> bool:
        return path.suffix == '.bin'

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        ids = memory_map_ids(path, np.dtype(dtype or DTYPE).newbyteorder('<'))
        _refuse_header(path, ids)
        if dtype is None:
            _refuse_wider_ids(path, ids[:SAMPLE])
        return Shard(path, ids)


def _refuse_header(path: Path, ids: np.ndarray) -> None:
    """Raises ConfigError if a file seems to begin with a header of an unknown format.

    A header of llm.c begins with three fields that are never 0, and has zeros in its unused part.
    Files with a header of a known format do not come here, because that format opens them.

    Args:
      path: the file.
      ids: what the file holds, read as ids from its first byte on.
    """
    # The first HEADER_BYTES bytes. An id has one byte or more, so no more ids are needed.
    start = ids[:HEADER_BYTES].tobytes()[:HEADER_BYTES]
    if len(start) < HEADER_BYTES:
        return  # the file is shorter than a header
    header = np.frombuffer(start, '<i4')
    magic, version, num_ids = header[:3]
    is_unused_part_zero = not header[USED_FIELDS:].any()
    if magic and version and num_ids and is_unused_part_zero:
        raise ConfigError(
            f'data.path: {path} begins with a header whose magic number is {magic}; those of '
            'llm.c are 20240520 and 20240801'
        )


def _refuse_wider_ids(path: Path, ids: np.ndarray) -> None:
    """Raises ConfigError if ids, which were read as uint16, are probably uint32.

    In this case each id was read as two: its lower half, which may have any value, and its upper
    half, which is small. For example, the ids 70000 and 9 appear as 4464, 1, 9, 0.
    """
    # Lower and upper halves alternate.
    lower_halves = ids[::2]
    upper_halves = ids[1::2]
    if len(upper_halves) == 0:
        return
    all_upper_are_small = upper_halves.max() < UPPER_HALF_END
    some_lower_is_large = lower_halves.max() >= UPPER_HALF_END
    if all_upper_are_small and some_lower_is_large:
        raise ConfigError(
            f'data.path: every other id of {path} is below {UPPER_HALF_END} in uint16, as if ids '
            "were uint32; set data.token_dtype to 'uint32', or to 'uint16' if they are not"
        )

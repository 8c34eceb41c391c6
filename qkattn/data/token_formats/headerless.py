"""Token files without a header, such as nanoGPT's `train.bin` and `val.bin`."""

from pathlib import Path
from typing import ClassVar

import numpy as np

from qkattn.data.token_formats.shards import Shard, TokenFormat, memory_map_ids
from qkattn.errors import ConfigError

DTYPE = 'uint16'  # the type of nanoGPT's ids
SAMPLE = 4096  # number of ids that are examined to guess their type
# The upper 16 bits of ids in uint32 are below this number, because ids are below 2**20.
UPPER_HALF_END = 16
# A header of llm.c, or a tool like it, has 256 int32 fields. All but the first few are 0.
HEADER_FIELDS = 256
USED_FIELDS = 8
HEADER_BYTES = 4 * HEADER_FIELDS


class Headerless(TokenFormat):
    """A file that holds only ids, by default uint16 as in nanoGPT.

    https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py
    """

    name: ClassVar[str] = 'headerless'

    @staticmethod
    def reads(path: Path) -> bool:
        return path.suffix == '.bin'

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        little_endian_dtype = np.dtype(dtype or DTYPE).newbyteorder('<')
        ids = memory_map_ids(path, little_endian_dtype)
        _refuse_header(path, ids)
        if dtype is None:
            _refuse_wider_ids(path, ids[:SAMPLE])
        return Shard(path, ids)


def _refuse_header(path: Path, ids: np.ndarray) -> None:
    """Raises ConfigError if a file seems to begin with a header like that of llm.c.

    Args:
        path: The file.
        ids: The whole file, read as ids.
    """
    first_ids = ids[:HEADER_BYTES]  # ids have at least one byte
    first_bytes = first_ids.tobytes()[:HEADER_BYTES]
    if len(first_bytes) < HEADER_BYTES:
        return  # the file is shorter than a header
    header = np.frombuffer(first_bytes, '<i4')
    magic, version, num_ids = header[:3]
    has_used_fields = magic != 0 and version != 0 and num_ids != 0
    all_other_fields_are_0 = not header[USED_FIELDS:].any()
    if has_used_fields and all_other_fields_are_0:
        raise ConfigError(
            f'data.path: {path} begins with a header whose magic number is {magic}; those of '
            'llm.c are 20240520 and 20240801'
        )


def _refuse_wider_ids(path: Path, ids: np.ndarray) -> None:
    """Raises ConfigError if ids that were read as uint16 are probably uint32.

    For example, the uint32 ids 70000 and 9 would be read as 4464, 1, 9, 0. Lower and upper halves
    alternate, and upper halves are small.
    """
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

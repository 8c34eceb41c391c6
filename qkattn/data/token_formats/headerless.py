"""Ids without a header, as nanoGPT's `train.bin` and `val.bin`."""

from pathlib import Path
from typing import ClassVar

import numpy as np

from qkattn.data.token_formats.shards import Shard, TokenFormat, mapped
from qkattn.errors import ConfigError

DTYPE = 'uint16'  # of nanoGPT
SAMPLE = 4096  # ids that are looked at for their type
# Ids are below 2**20, so the upper half of an id in uint32 is below this.
UPPER_HALF_END = 16
# The headers of llm.c and of tools like it are 256 int32, of which at most these first are not 0.
HEADER_SIZE = 256
HEADER_FIELDS = 8


class Headerless(TokenFormat):
    """A file of ids and nothing else; they are uint16 unless data.token_dtype names another type.

    https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py
    """

    name: ClassVar[str] = 'headerless'

    @staticmethod
    def reads(path: Path) -> bool:
        return path.suffix == '.bin'

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        ids = mapped(path, np.dtype(dtype or DTYPE).newbyteorder('<'))
        _refuse_header(path, ids)
        if dtype is None:
            _refuse_wider_ids(path, ids[:SAMPLE])
        return Shard(path, ids)


def _refuse_header(path: Path, ids: np.ndarray) -> None:
    """Raises ConfigError where a file begins like one with a header, but with an unknown magic."""
    start = ids[: 4 * HEADER_SIZE].tobytes()[: 4 * HEADER_SIZE]
    if len(start) < 4 * HEADER_SIZE:
        return
    header = np.frombuffer(start, '<i4')
    # Magic number, version and number of ids.
    has_fields = header[:3].all()
    if has_fields and not header[HEADER_FIELDS:].any():
        raise ConfigError(
            f'data.path: {path} begins with a header whose magic number is {header[0]}; those of '
            'llm.c are 20240520 and 20240801'
        )


def _refuse_wider_ids(path: Path, ids: np.ndarray) -> None:
    """Raises ConfigError where ids look like the halves of ids in uint32, small and large ones."""
    lower_halves = ids[::2]
    upper_halves = ids[1::2]
    if not len(upper_halves):
        return
    if upper_halves.max() < UPPER_HALF_END <= lower_halves.max():
        raise ConfigError(
            f'data.path: every other id of {path} is below {UPPER_HALF_END} in uint16, as if ids '
            "were uint32; set data.token_dtype to 'uint32', or to 'uint16' if they are not"
        )

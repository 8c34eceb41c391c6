"""Shards of llm.c and modded-nanogpt, as `fineweb_train_000001.bin`."""

from pathlib import Path
from typing import ClassVar

import numpy as np

from qkattn.config.paths import open_regular
from qkattn.data.token_formats.shards import Shard, TokenFormat, mapped, refuse_other_dtype
from qkattn.errors import ConfigError

HEADER_BYTES = 256 * 4
# By the magic number: the version, and the type of the ids.
KINDS = {20240520: (1, 'uint16'), 20240801: (7, 'uint32')}  # tokens of GPT-2, of Llama 3


class LlmC(TokenFormat):
    """A header of 256 int32, of which the first are magic, version and number of ids; then ids.

    https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
    """

    name: ClassVar[str] = 'llm.c'

    @staticmethod
    def reads(path: Path) -> bool:
        header = _header(path)
        return len(header) > 0 and int(header[0]) in KINDS

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        header = _header(path)
        if len(header) < HEADER_BYTES // 4:
            raise ConfigError(
                f'data.path: {path} ends inside of its header of {HEADER_BYTES} bytes'
            )
        magic, version, num_ids = header[:3].tolist()
        expected_version, stated_dtype = KINDS[magic]
        if version != expected_version:
            raise ConfigError(
                f'data.path: {path} has version {version} of the magic number {magic}; valid is '
                f'{expected_version}'
            )
        refuse_other_dtype(path, stated_dtype, dtype)
        ids = mapped(path, np.dtype(stated_dtype).newbyteorder('<'), HEADER_BYTES)
        if len(ids) != num_ids:
            raise ConfigError(
                f'data.path: {path} holds {len(ids):,} tokens after its header, which states '
                f'{num_ids:,}; copy the file again'
            )
        return Shard(path, ids)


def _header(path: Path) -> np.ndarray:
    """The first 256 int32 of a file, fewer of a shorter one."""
    try:
        with open_regular(path) as file:
            start = file.read(HEADER_BYTES)
    except OSError as error:
        raise ConfigError(f'data.path: {path} cannot be read ({error.strerror})') from error
    return np.frombuffer(start[: len(start) // 4 * 4], '<i4')

"""Token files of llm.c and modded-nanogpt, such as `fineweb_train_000001.bin`."""

from pathlib import Path
from typing import ClassVar

import numpy as np

from qkattn.config.paths import open_regular
from qkattn.data.token_formats.shards import Shard, TokenFormat, memory_map_ids, refuse_other_dtype
from qkattn.errors import ConfigError

# A file begins with a header of 256 int32.
HEADER_BYTES = 256 * 4
# The version and the type of ids for each magic number, of GPT-2 and Llama 3 tokens.
KINDS = {20240520: (1, 'uint16'), 20240801: (7, 'uint32')}


class LlmC(TokenFormat):
    """A file with a header, then ids.

    The first fields of the header are a magic number, a version and the number of ids.
    https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
    """

    name: ClassVar[str] = 'llm.c'

    @staticmethod
    def reads(path: Path) -> bool:
        header = _read_header(path)
        if len(header) == 0:
            return False
        magic = int(header[0])
        return magic in KINDS

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        """Memory-maps the ids of a file and checks its header; see `TokenFormat.open`.

        `path` is a file for which `reads` returns True, so its magic number is in KINDS.
        """
        header = _read_header(path)
        if header.nbytes < HEADER_BYTES:
            raise ConfigError(
                f'data.path: {path} ends inside of its header of {HEADER_BYTES} bytes'
            )
        magic, version, num_ids = header[:3].tolist()
        expected_version, dtype_of_ids = KINDS[magic]
        if version != expected_version:
            raise ConfigError(
                f'data.path: {path} has version {version} of the magic number {magic}; valid is '
                f'{expected_version}'
            )
        refuse_other_dtype(path, stated=dtype_of_ids, requested=dtype)
        little_endian_dtype = np.dtype(dtype_of_ids).newbyteorder('<')
        ids = memory_map_ids(path, little_endian_dtype, offset=HEADER_BYTES)
        if len(ids) != num_ids:
            raise ConfigError(
                f'data.path: {path} holds {len(ids):,} tokens after its header, which states '
                f'{num_ids:,}; copy the file again'
            )
        return Shard(path, ids)


def _read_header(path: Path) -> np.ndarray:
    """Returns the first 256 int32 of a file, or fewer if the file is shorter."""
    try:
        with open_regular(path) as file:
            first_bytes = file.read(HEADER_BYTES)
    except OSError as error:
        raise ConfigError(f'data.path: {path} cannot be read ({error.strerror})') from error
    num_fields = len(first_bytes) // 4
    return np.frombuffer(first_bytes, '<i4', count=num_fields)

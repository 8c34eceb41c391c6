"""Token files of Megatron-LM: ids in `NAME.bin`, documents in the index `NAME.idx`."""

import struct
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from qkattn.data.token_formats.shards import Shard, TokenFormat, memory_map_ids, refuse_other_dtype
from qkattn.errors import ConfigError
from qkattn.storage.files import read_whole

MAGIC = b'MMIDIDX\x00\x00'
VERSION = 1
# The fields after the magic number: version, code of the dtype, number of sequences, number of
# document bounds.
HEADER = struct.Struct('<QBQQ')
# The dtype of each code. Other codes, which are not for ids, are refused.
DTYPES = {1: 'uint8', 4: 'int32', 5: 'int64', 8: 'uint16'}


class Megatron(TokenFormat):
    """Documents of several sequences of ids, with an index in a file of its own.

    https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
    """

    name: ClassVar[str] = 'Megatron'

    @staticmethod
    def reads(path: Path) -> bool:
        return path.with_suffix('.idx').exists()

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        """Memory-maps a file and checks its index; see `TokenFormat.open`."""
        index_path = path.with_suffix('.idx')
        index = _read_index(index_path, dtype)
        little_endian_dtype = np.dtype(index.dtype).newbyteorder('<')
        ids = memory_map_ids(path, little_endian_dtype)

        # Sequence i is ids[sequence_bounds[i]:sequence_bounds[i + 1]].
        sequence_ends = np.cumsum(index.lengths, dtype=np.int64)
        sequence_bounds = np.append(0, sequence_ends)
        num_ids = sequence_bounds[-1]
        if num_ids != len(ids):
            raise ConfigError(
                f'data.path: {path} holds {len(ids):,} tokens, but {index_path.name} states '
                f'{num_ids:,}; copy both files again'
            )
        first_bytes = sequence_bounds[:-1] * ids.itemsize
        if not np.array_equal(index.pointers, first_bytes):
            raise ConfigError(
                f'data.path: {index_path} has sequences that do not follow one another'
            )

        # Document i is the sequences document_bounds[i] to document_bounds[i + 1] - 1.
        document_bounds = index.document_bounds
        num_sequences = len(index.lengths)
        if not _cover_all_sequences(document_bounds, num_sequences):
            raise ConfigError(
                f'data.path: {index_path} has documents that do not begin at sequence 0, ascend, '
                f'and end at {num_sequences:,}'
            )

        # With sequence bounds [0, 3, 5, 9], document bounds [0, 2, 3] give the ends [5, 9].
        document_ends = sequence_bounds[document_bounds[1:]]
        # Leave out empty documents, which end where the document before ends, or at 0.
        document_ends = np.unique(document_ends)
        document_ends = document_ends[document_ends > 0]
        return Shard(path, ids, document_ends)


def _cover_all_sequences(document_bounds: np.ndarray, num_sequences: int) -> bool:
    """Whether document bounds cover all sequences; [0, 2, 3] are two documents of 3 sequences."""
    num_documents = len(document_bounds) - 1
    if num_documents < 1:
        return False
    begins_at_first = document_bounds[0] == 0
    is_ascending = (np.diff(document_bounds) >= 0).all()
    ends_at_last = document_bounds[-1] == num_sequences
    return bool(begins_at_first and is_ascending and ends_at_last)


class _Index(NamedTuple):
    """The content of an index file."""

    dtype: str  # of the ids
    lengths: np.ndarray  # number of ids in each sequence
    pointers: np.ndarray  # first byte of each sequence
    document_bounds: np.ndarray  # document i is the sequences bounds[i] to bounds[i + 1] - 1


def _read_index(path: Path, dtype: str | None) -> _Index:
    """Reads an index file.

    Args:
        path: The index file.
        dtype: The value of data.token_dtype, or None.

    Raises:
        ConfigError: The index is damaged, or states another dtype.
    """
    try:
        content = read_whole(path, most=None)
    except OSError as error:
        raise ConfigError(f'data.path: {path} cannot be read ({error.strerror})') from error
    if not content.startswith(MAGIC):
        raise ConfigError(
            f'data.path: {path} begins with {content[: len(MAGIC)]!r}, not with {MAGIC!r}'
        )
    if len(content) < len(MAGIC) + HEADER.size:
        raise ConfigError(f'data.path: {path} ends inside of its header')
    version, code, num_sequences, num_bounds = HEADER.unpack_from(content, offset=len(MAGIC))
    if version != VERSION:
        raise ConfigError(f'data.path: {path} has version {version}; valid is {VERSION}')
    if code not in DTYPES:
        valid = ', '.join(f'{number} ({name})' for number, name in DTYPES.items())
        raise ConfigError(f'data.path: {path} has ids of type {code}; valid are {valid}')
    refuse_other_dtype(path, DTYPES[code], dtype)

    # Three arrays follow the header: int32, int64, int64.
    lengths_offset = len(MAGIC) + HEADER.size
    pointers_offset = lengths_offset + 4 * num_sequences
    bounds_offset = pointers_offset + 8 * num_sequences
    num_bytes = bounds_offset + 8 * num_bounds
    if len(content) < num_bytes:
        raise ConfigError(
            f'data.path: {path} has {len(content):,} bytes, not the {num_bytes:,} of '
            f'{num_sequences:,} sequences; copy the file again'
        )
    return _Index(
        dtype=DTYPES[code],
        lengths=np.frombuffer(content, '<i4', count=num_sequences, offset=lengths_offset),
        pointers=np.frombuffer(content, '<i8', count=num_sequences, offset=pointers_offset),
        document_bounds=np.frombuffer(content, '<i8', count=num_bounds, offset=bounds_offset),
    )

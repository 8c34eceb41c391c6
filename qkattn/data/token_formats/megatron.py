"""Token files of Megatron-LM: ids in `NAME.bin`, and where documents end in `NAME.idx`."""

import struct
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from qkattn.data.token_formats.shards import Shard, TokenFormat, memory_map_ids, refuse_other_dtype
from qkattn.errors import ConfigError
from qkattn.storage.files import read_whole

MAGIC = b'MMIDIDX\x00\x00'
VERSION = 1
# The fields after the magic number: the version, the code of the type of the ids, the number of
# sequences, and the length of the list of documents.
HEADER = struct.Struct('<QBQQ')
# Maps a code to its type. Other codes stand for floats, or for signed types that are too narrow for
# ids; they are refused.
DTYPES = {1: 'uint8', 4: 'int32', 5: 'int64', 8: 'uint16'}


class Megatron(TokenFormat):
    """Sequences of ids in one file, and an index of the sequences and documents in another.

    The index has a header and three arrays: the length of each sequence in ids (int32), the byte at
    which it begins (int64), and the bounds of the documents (int64). Document i has the sequences
    from bounds[i] to bounds[i + 1].
    https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
    """

    name: ClassVar[str] = 'Megatron'

    @staticmethod
    def reads(path: Path) -> bool:
        return path.with_suffix('.idx').exists()

    @staticmethod
    def open(path: Path, dtype: str | None) -> Shard:
        """Opens a file, memory-mapped, and checks its index; see `TokenFormat.open`."""
        index_path = path.with_suffix('.idx')
        index = _read_index(index_path, dtype)
        ids = memory_map_ids(path, np.dtype(index.dtype).newbyteorder('<'))

        # Sequence i has the ids from sequence_bounds[i] to sequence_bounds[i + 1].
        sequence_bounds = np.append(0, np.cumsum(index.lengths, dtype=np.int64))
        num_ids = sequence_bounds[-1]
        if num_ids != len(ids):
            raise ConfigError(
                f'data.path: {path} holds {len(ids):,} tokens, but {index_path.name} states '
                f'{num_ids:,}; copy both files again'
            )
        # The pointers are the bytes at which the sequences begin.
        if not np.array_equal(index.pointers, sequence_bounds[:-1] * ids.itemsize):
            raise ConfigError(
                f'data.path: {index_path} has sequences that do not follow one another'
            )

        # Document i has the sequences from document_bounds[i] to document_bounds[i + 1].
        document_bounds = index.document_bounds
        num_sequences = len(index.lengths)
        if not _cover_all_sequences(document_bounds, num_sequences):
            raise ConfigError(
                f'data.path: {index_path} has documents that do not begin at sequence 0, ascend, '
                f'and end at {num_sequences:,}'
            )

        # For example, three sequences of 3, 2 and 4 ids have the bounds [0, 3, 5, 9]. A document of
        # the first two, and one of the third, have the bounds [0, 2, 3]. They end at [5, 9].
        document_ends = sequence_bounds[document_bounds[1:]]
        # A document without ids is left out. It ends where the one before it does, or at 0.
        different_ends = np.unique(document_ends)
        return Shard(path, ids, different_ends[different_ends > 0])


def _cover_all_sequences(document_bounds: np.ndarray, num_sequences: int) -> bool:
    """Whether documents with these bounds follow one another from the first sequence to the last.

    For example, [0, 2, 3] are the bounds of two documents that cover three sequences.
    """
    if len(document_bounds) < 2:
        return False  # there is no document
    begins_at_first = document_bounds[0] == 0
    is_ascending = (np.diff(document_bounds) >= 0).all()
    ends_at_last = document_bounds[-1] == num_sequences
    return bool(begins_at_first and is_ascending and ends_at_last)


class _Index(NamedTuple):
    """The content of an index."""

    dtype: str  # of the ids
    lengths: np.ndarray  # how many ids each sequence has
    pointers: np.ndarray  # the byte at which each sequence begins
    document_bounds: np.ndarray  # document i has the sequences from bounds[i] to bounds[i + 1]


def _read_index(path: Path, dtype: str | None) -> _Index:
    """Reads the index of a file of ids.

    `dtype` is data.token_dtype. Raises ConfigError if the index is damaged, or states another type.
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
    version, code, num_sequences, num_bounds = HEADER.unpack_from(content, len(MAGIC))
    if version != VERSION:
        raise ConfigError(f'data.path: {path} has version {version}; valid is {VERSION}')
    if code not in DTYPES:
        valid = ', '.join(f'{number} ({name})' for number, name in DTYPES.items())
        raise ConfigError(f'data.path: {path} has ids of type {code}; valid are {valid}')
    refuse_other_dtype(path, DTYPES[code], dtype)

    # The three arrays follow the header. These are the bytes at which they begin.
    lengths_at = len(MAGIC) + HEADER.size
    pointers_at = lengths_at + 4 * num_sequences
    bounds_at = pointers_at + 8 * num_sequences
    num_bytes = bounds_at + 8 * num_bounds
    if len(content) < num_bytes:
        raise ConfigError(
            f'data.path: {path} has {len(content):,} bytes, not the {num_bytes:,} of '
            f'{num_sequences:,} sequences; copy the file again'
        )
    return _Index(
        dtype=DTYPES[code],
        lengths=np.frombuffer(content, '<i4', num_sequences, lengths_at),
        pointers=np.frombuffer(content, '<i8', num_sequences, pointers_at),
        document_bounds=np.frombuffer(content, '<i8', num_bounds, bounds_at),
    )

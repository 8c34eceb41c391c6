"""Token files of Megatron-LM: ids in `NAME.bin`, and where documents end in `NAME.idx`."""

import struct
from pathlib import Path
from typing import ClassVar

import numpy as np

from qkattn.data.token_formats.shards import Shard, TokenFormat, mapped, refuse_other_dtype
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
        index = path.with_suffix('.idx')
        try:
            content = read_whole(index, most=None)
        except OSError as error:
            raise ConfigError(f'data.path: {index} cannot be read ({error.strerror})') from error
        if not content.startswith(MAGIC):
            raise ConfigError(
                f'data.path: {index} begins with {content[: len(MAGIC)]!r}, not with {MAGIC!r}'
            )
        if len(content) < len(MAGIC) + HEADER.size:
            raise ConfigError(f'data.path: {index} ends inside of its header')
        version, code, num_sequences, num_bounds = HEADER.unpack_from(content, len(MAGIC))
        if version != VERSION:
            raise ConfigError(f'data.path: {index} has version {version}; valid is {VERSION}')
        if code not in DTYPES:
            valid = ', '.join(f'{number} ({name})' for number, name in DTYPES.items())
            raise ConfigError(f'data.path: {index} has ids of type {code}; valid are {valid}')
        refuse_other_dtype(index, DTYPES[code], dtype)

        lengths_at = len(MAGIC) + HEADER.size
        pointers_at = lengths_at + 4 * num_sequences
        bounds_at = pointers_at + 8 * num_sequences
        num_bytes = bounds_at + 8 * num_bounds
        if len(content) < num_bytes:
            raise ConfigError(
                f'data.path: {index} has {len(content):,} bytes, not the {num_bytes:,} of '
                f'{num_sequences:,} sequences; copy the file again'
            )
        lengths = np.frombuffer(content, '<i4', num_sequences, lengths_at)
        pointers = np.frombuffer(content, '<i8', num_sequences, pointers_at)
        bounds = np.frombuffer(content, '<i8', num_bounds, bounds_at)

        ids = mapped(path, np.dtype(DTYPES[code]).newbyteorder('<'))
        sequence_ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
        if sequence_ends[-1] != len(ids):
            raise ConfigError(
                f'data.path: {path} holds {len(ids):,} tokens, but {index.name} states '
                f'{sequence_ends[-1]:,}; copy both files again'
            )
        if not np.array_equal(pointers, sequence_ends[:-1] * ids.itemsize):
            raise ConfigError(f'data.path: {index} has sequences that do not follow one another')
        is_ascending = num_bounds > 1 and bounds[0] == 0 and (np.diff(bounds) >= 0).all()
        if not is_ascending or bounds[-1] != num_sequences:
            raise ConfigError(
                f'data.path: {index} has documents that do not begin at sequence 0, ascend, and '
                f'end at {num_sequences:,}'
            )
        document_ends = np.unique(sequence_ends[bounds[1:]])
        # A document without a token is left out.
        return Shard(path, ids, document_ends[document_ends > 0])

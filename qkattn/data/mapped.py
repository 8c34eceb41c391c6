"""Memory-mapped token files."""

import mmap
import os
from collections.abc import Iterator

import numpy as np

from qkattn.config.paths import open_regular


def map_ids(path: str | os.PathLike[str], dtype: str | np.dtype, offset: int = 0) -> np.ndarray:
    """Memory-maps the ids of a regular file, from byte `offset` on, for random access.

    To read ids in order, call `read_ahead` first.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The file is empty or its last id is incomplete.
    """
    with open_regular(path) as file:
        # Length 0 is the whole file.
        memory = mmap.mmap(file.fileno(), length=0, access=mmap.ACCESS_READ)
    # By default, the kernel would read up to several MB for a row of a few kB.
    memory.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(memory, dtype, offset=offset)


def read_ahead(ids: np.ndarray) -> None:
    """Makes the kernel begin to read memory-mapped ids; does nothing for other arrays."""
    for owner in _owners(ids):
        if isinstance(owner, mmap.mmap):
            address_of_file = np.frombuffer(owner, np.uint8).ctypes.data
            begin = ids.ctypes.data - address_of_file
            end = begin + ids.nbytes
            # madvise needs the start of a page.
            page_begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
            owner.madvise(mmap.MADV_WILLNEED, page_begin, end - page_begin)


def _owners(ids: np.ndarray) -> Iterator[object]:
    """Yields an array, its base, the base of its base and so on.

    For example: a slice, the array, a memoryview, the mapped file.
    """
    owner: object = ids
    while owner is not None:
        yield owner
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, 'base', None)

"""Token files that are mapped into memory: rows are read at random, whole splits in order."""

import mmap
import os
from collections.abc import Iterator

import numpy as np

from qkattn.config.paths import open_regular


def map_ids(path: str | os.PathLike[str], dtype: str | np.dtype, offset: int = 0) -> np.ndarray:
    """Maps the ids of a regular file into memory, from byte `offset` on.

    They are for rows that are read at random. The kernel is told to read only the pages that are
    used. By default, it also reads the pages around them, up to several MB for a row of a few kB.
    `read_ahead` is for ids that are read in order.

    Raises OSError if the file cannot be opened, and ValueError if it is empty or its last id is
    cut.
    """
    with open_regular(path) as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype, offset=offset)


def read_ahead(ids: np.ndarray) -> None:
    """Makes the kernel begin to read mapped ids; does nothing for other arrays."""
    for pages in _owners(ids):
        if isinstance(pages, mmap.mmap):
            file_address = np.frombuffer(pages, np.uint8).ctypes.data
            first_byte = ids.ctypes.data - file_address
            # The kernel takes ranges of bytes that begin with a page.
            start = first_byte // mmap.PAGESIZE * mmap.PAGESIZE
            pages.madvise(mmap.MADV_WILLNEED, start, first_byte + ids.nbytes - start)


def _owners(ids: np.ndarray) -> Iterator[object]:
    """Yields the objects that hold the memory of an array, from the nearest to the farthest.

    A slice of mapped ids, for example, is a view of an array, which is a view of a memoryview,
    which is a view of the mapped file.
    """
    owner: object = ids
    while owner is not None:
        yield owner
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, 'base', None)

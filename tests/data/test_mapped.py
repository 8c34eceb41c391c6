"""Mapped token files: how the kernel reads them."""

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from qkattn.data import tokens
from qkattn.data.mapped import map_ids, read_ahead
from qkattn.data.token_formats.shards import Shard, Shards


@pytest.fixture
def file(tmp_path):
    """A file of 10,000 ids in uint16 after a header of 1,024 bytes."""
    path = tmp_path / 'ids.bin'
    path.write_bytes(bytes(1024) + np.arange(10_000, dtype=np.uint16).tobytes())
    return path


@pytest.fixture
def kernel_advice(monkeypatch):
    """A list that gets (kind, first byte, number of bytes) at each call of `madvise`.

    `madvise` tells the kernel how a program will read a mapped file. The kernel still gets the
    advice. If the number of bytes is None, the advice is for all bytes from the first one.
    """
    advice = []

    class RecordingMmap(mmap.mmap):
        def madvise(self, kind, start=0, length=None):
            advice.append((kind, start, length))
            if length is None:
                super().madvise(kind, start)
            else:
                super().madvise(kind, start, length)

    monkeypatch.setattr(mmap, 'mmap', RecordingMmap)
    return advice


@pytest.mark.skipif(sys.platform != 'linux', reason='/proc is of Linux')
def test_a_row_does_not_read_the_pages_around_it(file):
    ids = map_ids(file, 'uint16')
    assert len(ids) == 1024 // 2 + 10_000  # the header is read as ids

    # The flags that the kernel has for the pages of the file.
    mappings = Path('/proc/self/smaps').read_text()
    flags = re.findall(rf'{re.escape(str(file))}\n(?:.*\n)*?VmFlags: (.*)\n', mappings)
    assert len(flags) == 1
    assert 'rr' in flags[0].split()  # "random read": nothing is read ahead


def test_ids_follow_the_header_and_cannot_be_written(file):
    ids = map_ids(file, np.dtype('<u2'), 1024)
    assert ids.tolist() == list(range(10_000))
    with pytest.raises(ValueError, match='read-only'):
        ids[0] = 1


@pytest.mark.parametrize('size', [0, 3])
def test_a_file_of_no_whole_ids_is_refused(file, size):
    file.write_bytes(bytes(size))
    with pytest.raises(ValueError):
        map_ids(file, 'uint16')


def test_pages_of_ids_are_read_ahead(file, kernel_advice):
    """`read_ahead` tells the kernel which bytes of a mapped file will soon be read.

    The file has a header of 1,024 bytes, and then ids of two bytes.
    """
    ids = map_ids(file, 'uint16', 1024)
    first_byte = 1024 + 2 * 4000
    byte_after_last = 1024 + 2 * 6000
    kernel_advice.clear()  # mapping the file gives advice, too

    read_ahead(ids[4000:6000])

    assert len(kernel_advice) == 1
    kind, start, length = kernel_advice[0]
    assert kind == mmap.MADV_WILLNEED
    # Advice begins with a whole page.
    assert start == first_byte // mmap.PAGESIZE * mmap.PAGESIZE
    assert start + length == byte_after_last


def test_ids_in_memory_are_not_read_ahead(file, kernel_advice):
    ids = map_ids(file, 'uint16', 1024)
    in_memory = ids[:100].copy()
    kernel_advice.clear()

    read_ahead(in_memory)

    assert not kernel_advice


def test_a_split_that_is_read_in_blocks_is_read_ahead(file, kernel_advice, monkeypatch):
    """A whole split is read in blocks. The kernel gets advice before each block is read.

    The split has two shards, both with the 10,000 ids of the same file. A block has 4,000 ids.
    """
    monkeypatch.setattr(tokens, 'BLOCK', 4000)
    ids = map_ids(file, 'uint16', 1024)
    two_shards = Shards([Shard(file, ids), Shard(file, ids)])
    kernel_advice.clear()  # mapping the file gives advice, too

    blocks = list(tokens.blocks(two_shards))

    assert np.concatenate(blocks).tolist() == 2 * list(range(10_000))

    # A block that continues in the next shard takes two reads. Each read ends at one of these ids.
    last_ids = [
        4000,  # block 1, in the first shard
        8000,  # block 2
        10_000,  # block 3 begins
        2000,  # block 3 ends in the second shard
        6000,  # block 4
        10_000,  # block 5
    ]
    # The header of a file has 1,024 bytes, and each id has two bytes.
    ends = [start + length for _, start, length in kernel_advice]
    assert ends == [1024 + 2 * last_id for last_id in last_ids]

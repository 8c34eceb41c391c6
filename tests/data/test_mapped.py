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
    """A list of the advice that the kernel gets on pages: (kind, first byte, number of bytes)."""
    advice = []

    class Pages(mmap.mmap):
        def madvise(self, what, start=0, length=None):
            advice.append((what, start, length))
            super().madvise(what, start, len(self) if length is None else length)

    monkeypatch.setattr(mmap, 'mmap', Pages)
    return advice


@pytest.mark.skipif(sys.platform != 'linux', reason='/proc is of Linux')
def test_a_row_does_not_read_the_pages_around_it(file):
    ids = map_ids(file, 'uint16')
    assert len(ids) == 10_512
    (mapping,) = re.findall(
        rf'{re.escape(str(file))}\n(?:.*\n)*?VmFlags: (.*)\n', Path('/proc/self/smaps').read_text()
    )
    assert 'rr' in mapping.split()  # random reads


def test_ids_follow_the_header_and_cannot_be_written(file):
    ids = map_ids(file, np.dtype('<u2'), 1024)
    assert ids.tolist() == list(range(10_000))
    with pytest.raises(ValueError, match='read-only'):
        ids[0] = 1
    # Files that are shorter than the header.
    for size in (0, 3):
        file.write_bytes(bytes(size))
        with pytest.raises(ValueError):
            map_ids(file, 'uint16')


def test_the_pages_of_ids_that_are_read_in_order_are_read_ahead(file, kernel_advice):
    ids = map_ids(file, 'uint16', 1024)
    kernel_advice.clear()
    read_ahead(ids[4000:6000])  # bytes 9,024 to 13,024
    ((what, start, length),) = kernel_advice
    assert (what, start % mmap.PAGESIZE) == (mmap.MADV_WILLNEED, 0)
    assert 9024 - mmap.PAGESIZE < start <= 9024
    assert start + length == 13_024
    read_ahead(ids[:100].copy())
    assert len(kernel_advice) == 1


def test_a_split_that_is_read_in_blocks_is_read_ahead(file, kernel_advice, monkeypatch):
    monkeypatch.setattr(tokens, 'BLOCK', 4000)
    ids = map_ids(file, 'uint16', 1024)
    shards = Shards([Shard(file, ids), Shard(file, ids)])
    kernel_advice.clear()
    assert np.concatenate(list(tokens.blocks(shards))).tolist() == 2 * list(range(10_000))
    # Blocks 1 and 2 are in the first shard, 3 in both, 4 and 5 in the second.
    ends = [start + length for _, start, length in kernel_advice]
    assert ends == [1024 + 2 * end for end in (4000, 8000, 10_000, 2000, 6000, 10_000)]

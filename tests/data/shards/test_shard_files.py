import numpy as np
import pytest

from qkattn.data.shards import shard_files
from qkattn.data.shards.shard_files import Counts, Shard, ShardTokens, counts_of, files_at, header
from tests.data.refusals import refused
from tests.data.shards.examples import upload, write_bin


def test_a_header_is_that_of_llm_c_and_keeps_the_counts():
    counts = Counts(num_tokens=7, num_documents=2, num_bytes=2**40 + 1, sha256='0a' * 32)
    for dtype, expected in (('uint16', [20240520, 1, 7]), ('uint32', [20240801, 7, 7])):
        head = header(dtype, counts)
        assert len(head) == 1024 and np.frombuffer(head, '<i4')[:3].tolist() == expected
        assert counts_of(head) == counts
    with refused('a shard of 2,147,483,648 tokens has no header'):
        header('uint16', Counts(num_tokens=2**31, num_documents=1, num_bytes=0, sha256=''))


@pytest.fixture(params=['local', 'memory://shards', 'gs://runs/shards'])
def tokens(request, tmp_path):
    """Three shards of 0 .. 9, 10 .. 14 and 15 .. 99 in a directory, or at a URL."""
    bounds = {'a.bin': (0, 10), 'b.bin': (10, 15), 'c.bin': (15, 100)}
    for name, (low, high) in bounds.items():
        write_bin(tmp_path / name, np.arange(low, high))
    where = str(tmp_path)
    if request.param != 'local':
        if request.param.startswith('gs'):
            request.getfixturevalue('bucket')
        where = request.param
        for name in bounds:
            upload(tmp_path / name, where)
    files = files_at(where)
    assert files.sizes() == {name: 1024 + 2 * (b - a) for name, (a, b) in bounds.items()}
    assert files.content('b.bin') == (tmp_path / 'b.bin').read_bytes()
    assert files.heads(['c.bin'], 1026)[0][-2:] == b'\x0f\0'
    shards = [Shard(file=n, num_tokens=b - a, dtype='uint16') for n, (a, b) in bounds.items()]
    return ShardTokens(files, shards)


def test_windows_go_over_the_ends_of_shards(tokens, monkeypatch):
    assert len(tokens) == 100
    first_B = np.array([0, 6, 9, 10, 83])
    windows_BT = tokens.windows(first_B, 17)
    assert windows_BT.dtype == np.int32
    assert (windows_BT == first_B[:, None] + np.arange(17)).all()
    part = tokens.part(8, 40).part(1, 30)
    assert len(part) == 29 and part.windows(np.array([0, 2]), 3).tolist() == [
        [9, 10, 11],
        [11, 12, 13],
    ]
    monkeypatch.setattr(shard_files, 'BLOCK', 12)
    assert np.concatenate(list(part.blocks())).tolist() == list(range(9, 38))
    assert np.asarray(part, np.uint8).tolist() == list(range(9, 38))


def test_only_the_rows_that_are_asked_for_are_read(tokens):
    read = []
    tokens.files.tokens, real = (
        lambda pieces: read.extend(pieces) or real(pieces),
        tokens.files.tokens,
    )
    tokens.windows(np.array([10, 12, 50]), 5)
    assert [(shard.file, low, high) for shard, low, high in read] == [
        ('b.bin', 0, 5),
        ('b.bin', 2, 5),
        ('c.bin', 0, 2),
        ('c.bin', 35, 40),
    ]

import fsspec
import numpy as np
import pytest

from qkattn.data.shard_files import Shard, ShardTokens, files_at, shard_of
from qkattn.storage.files import write_atomic
from tests.data.datasets import write_bin
from tests.data.refusals import refused


@pytest.mark.parametrize(
    ('dtype', 'head'),
    [('uint8', [20240520, 8]), ('uint16', [20240520, 1]), ('uint32', [20240801, 7])],
)
def test_a_header_is_that_of_llm_c_and_keeps_the_counts(dtype, head):
    for num_tokens in (7, 2**31 + 5, 2**32 + 7):
        counts = {'num_documents': 2, 'num_bytes': 2**40 + 1, 'sha256': '0a' * 32}
        shard = Shard(num_tokens=num_tokens, dtype=dtype, file='a.bin', **counts)
        content = shard.header()
        assert len(content) == 1024 and shard_of('a.bin', shard.size, content, '/d') == shard
        assert np.frombuffer(content, '<u4')[:3].tolist() == [*head, num_tokens % 2**32]
        for size in (shard.size - 1, shard.size + 1):
            with refused(f'/d/a.bin is damaged: it has {size:,} bytes, but its .*; fetch it'):
                shard_of('a.bin', size, content, '/d')


@pytest.fixture(params=['local', 'memory://shards', 'gs://runs/shards'])
def tokens(request, tmp_path):
    """Three shards of 0 .. 9, 10 .. 14 and 15 .. 99 in a directory, or at a URL."""
    bounds = {'a.bin': (0, 10), 'b.bin': (10, 15), 'c.bin': (15, 100)}
    where = str(tmp_path) if request.param == 'local' else request.param
    if where.startswith('gs'):
        request.getfixturevalue('bucket')
    for name, (low, high) in bounds.items():
        path = write_bin(tmp_path / name, np.arange(low, high))
        if where.startswith('gs'):
            write_atomic(f'{where}/{name}', path.read_bytes())
        elif where.startswith('memory'):
            fsspec.filesystem('memory').pipe(f'{where}/{name}', path.read_bytes())
    files = files_at(where)
    assert files.sizes() == {name: 1024 + 2 * (b - a) for name, (a, b) in bounds.items()}
    assert files.read(['b.bin']) == [(tmp_path / 'b.bin').read_bytes()]
    assert files.read(['c.bin'], 1026)[0][-2:] == b'\x0f\0'
    shards = [Shard(file=n, num_tokens=b - a, dtype='uint16') for n, (a, b) in bounds.items()]
    return ShardTokens(files, shards)


def test_windows_go_over_the_ends_of_shards_and_read_only_what_is_asked_for(tokens, monkeypatch):
    pieces, real = [], tokens.files.tokens
    monkeypatch.setattr(tokens.files, 'tokens', lambda p: pieces.extend(p) or real(p))
    first_B = np.array([0, 6, 9, 10, 83])
    windows_BT = tokens.windows(first_B, 17)
    assert windows_BT.dtype == np.int32 and len(tokens) == 100
    assert (windows_BT == first_B[:, None] + np.arange(17)).all()
    del pieces[:]
    tokens.windows(np.array([10, 12]), 5)
    assert [(shard.file, low, high) for shard, low, high in pieces] == [
        ('b.bin', 0, 5),
        ('b.bin', 2, 5),
        ('c.bin', 0, 2),
    ]
    part = ShardTokens(tokens.files, ShardTokens(tokens.files, tokens.part(8, 40)).part(1, 30))
    assert len(part) == 29 and part.windows(np.array([2]), 3).tolist() == [[11, 12, 13]]
    monkeypatch.setattr('qkattn.data.shard_files.BLOCK', 12)
    assert np.concatenate(list(part.blocks())).tolist() == list(range(9, 38))
    assert np.asarray(part).dtype == np.uint16 and np.asarray(part).tolist() == list(range(9, 38))
    assert len(np.asarray(ShardTokens(tokens.files, []))) == 0


def test_a_split_in_one_local_file_is_mapped(tmp_path):
    write_bin(tmp_path / 'a.bin', np.arange(9), 'uint32')
    tokens = ShardTokens(
        files_at(str(tmp_path)), [Shard(file='a.bin', num_tokens=9, dtype='uint32')]
    )
    first, second = np.asarray(tokens), np.asarray(tokens)
    assert np.shares_memory(first, second) and not first.flags.writeable
    windows_BT = tokens.windows(np.array([5, 0]), 3)
    assert windows_BT.tolist() == [[5, 6, 7], [0, 1, 2]] and windows_BT.dtype == np.int32

import dataclasses
import itertools
import json
import os
import shutil

import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data import write_shards
from qkattn.data.load import load_text, prepare, verify
from qkattn.storage.leases import locked
from tests.data.datasets import SHARD_TOKENS, contents, register
from tests.data.refusals import refused


def test_shards_hold_whole_documents_up_to_their_size(text, made, tmp_path):
    index = json.loads((made / 'index.json').read_text())
    assert sum(len(split['shards']) for split in index['splits'].values()) == 6
    for split in index['splits'].values():
        for shard in split['shards']:
            head = np.fromfile(made / shard['file'], '<i4', 256)
            ids = np.fromfile(made / shard['file'], '<u2', offset=1024)
            assert head[:3].tolist() == [20240520, 1, len(ids)] and not head[3:].any()
            ends = np.flatnonzero(ids == 0) + 1
            assert (len(ends), ends[-1]) == (shard['num_documents'], len(ids))
            # The document that reaches the size is the last one.
            assert shard is split['shards'][-1] or len(ids) >= SHARD_TOKENS > ends[-2]
    assert verify(str(made)) == []
    # A shard that is filled exactly is closed.
    ends = np.flatnonzero(np.fromfile(made / 'train_000000.bin', '<u2', offset=1024) == 0) + 1
    exact = prepare(text, str(tmp_path / 'exact'), shard_tokens=int(ends[9]))
    assert exact.splits['train'].shards[0].num_documents == 10
    # The fingerprint does not depend on how the tokens are cut.
    for name, split in exact.splits.items():
        assert split.fingerprint == index['splits'][name]['fingerprint']


def test_stopped_at_any_write_it_goes_on_to_the_same(text, made, tmp_path, monkeypatch):
    replace = os.replace

    def stopping(*paths):
        if next(counter) == writes:
            raise KeyboardInterrupt
        return replace(*paths)

    for writes in range(13):  # each shard and then the index, and the whole index
        out, counter = tmp_path / str(writes), itertools.count()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, 'replace', stopping)
            prepare(text, str(out), shard_tokens=SHARD_TOKENS)
        stamps = {path: path.stat().st_mtime_ns for path in out.glob('*.bin')}
        assert len(stamps) == (writes + 1) // 2
        prepare(text, str(out), shard_tokens=SHARD_TOKENS)
        assert contents(out) == contents(made)
        # One that is not in the index is written again.
        assert sum(path.stat().st_mtime_ns == stamps[path] for path in stamps) == writes // 2


def test_a_finished_directory_is_left_as_it_is_and_a_damaged_one_repaired(
    text, made, tmp_path, caplog, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(write_shards, 'write_atomic', None)
        assert prepare(text, str(made), shard_tokens=SHARD_TOKENS).complete
    copy = shutil.copytree(made, tmp_path / 'copy')
    kept, first, second = (copy / f'train_00000{n}.bin' for n in range(3))
    data = bytearray(first.read_bytes())
    data[1500] ^= 1
    first.write_bytes(data)
    assert load_text(DataConfig(name='shards', path=str(copy)))  # which reads no tokens
    second.unlink()
    sentence = '{} is missing, or not the shard that index.json describes'
    assert verify(str(copy)) == [sentence.format(path) for path in (first, second)]
    for damaged_index in (False, True):
        stamp = kept.stat().st_mtime_ns
        prepare(text, str(copy), shard_tokens=SHARD_TOKENS)
        assert contents(copy) == contents(made)
        # Without an index nobody knows what the shards were made of.
        assert (kept.stat().st_mtime_ns != stamp) == damaged_index
        (copy / 'index.json').unlink()
    assert f'{sentence.format(first)}; it is written again' in caplog.messages


def lost():
    yield b'a'
    raise OSError('lost')


@pytest.mark.parametrize(
    ('fields', 'texts', 'message'),
    [
        ({'tokenizer': 'characters'}, None, "shards with tokenizer='bytes', not 'characters'"),
        ({'name': 'shards'}, None, "data.name='shards' is tokenized already; name the text"),
        ({'name': 'cldr', 'languages': 'en-de'}, None, 'is a translation set; shards'),
        ({}, [b'a', b'b\0'], "document 2 of split 'train' of x cannot be encoded: "),
        ({}, lost(), "split 'train' of x cannot be read .OSError: lost.; restore"),
        ({}, [], "split 'train' of x has no document; give it text"),
        ({'tokenizer': 'bpe', 'tokenizer_size': 257}, [b'\xe4'] * 40, 'cannot be tokenized: '),
    ],
)
def test_bad_input_is_one_sentence(text, made, tmp_path, monkeypatch, fields, texts, message):
    data, out = dataclasses.replace(text, **fields), made
    if texts is not None:
        register(monkeypatch, 'x', {'train': texts, 'validation': [b'a']})
        data, out = dataclasses.replace(data, name='x', path=None), tmp_path
    with refused(message):
        prepare(data, str(out), shard_tokens=SHARD_TOKENS)


def test_a_second_process_is_refused(text, tmp_path):
    with locked(tmp_path / 'lock'), refused('is being prepared by another process; wait until'):
        prepare(text, str(tmp_path), shard_tokens=SHARD_TOKENS)

"""Tokens in memory; shards on disk: what is written, after stops and damages too, and read."""

import dataclasses
import itertools
import json
import os
import shutil

import numpy as np
import pytest

from qkattn.config import Config, DataConfig
from qkattn.data import tokens, write_shards
from qkattn.data.load import load_text, prepare, tokenizer_of, verify
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import PairDataset, ShardTokens, TokenDataset
from qkattn.storage.leases import locked
from tests.damages import PICKLE
from tests.data.datasets import contents, register, token_dataset, write_texts
from tests.refusals import refused


def test_windows_go_over_the_ends_of_shards(monkeypatch):
    ids, first_B = np.arange(100, dtype=np.uint16), np.array([0, 6, 9, 10, 83])
    monkeypatch.setattr(tokens, 'BLOCK', 12)
    for arrays in ([ids], [ids[:10], ids[10:15], ids[15:]]):
        split = ShardTokens(arrays)
        windows_BT = split.windows(first_B, 17)
        assert windows_BT.dtype == np.int32 and len(split) == 100
        assert (windows_BT == first_B[:, None] + np.arange(17)).all()
        assert np.array_equal(np.concatenate(list(split.blocks())), ids)
        assert max(map(len, split.blocks())) == 12
        assert np.array_equal(np.asarray(split), ids) and np.asarray(split).dtype == ids.dtype


def test_identity_and_documents_of_datasets_and_pairs(monkeypatch):
    monkeypatch.setattr(tokens, 'BLOCK', 3)
    text = {'train': np.frombuffer(b'aab\0c\0', np.uint8)}
    source, target = (token_dataset(name, ByteTokenizer(), text) for name in 'ab')
    assert source.document_ends('train').tolist() == [4, 6]
    with refused("split='val' is not in dataset 'a'; valid: 'train'"):
        source.split('val')
    infos = {'train': source.info('train'), 'test': target.info('train')}
    carved = TokenDataset('a', '1', ByteTokenizer(), infos, {}, {'test': 0.1}).identity()
    fingerprints = carved.pop('fingerprints')
    assert list(fingerprints.items()) == [('test', 'btrain'), ('train', 'atrain')]
    assert carved == {'name': 'a', 'version': '1', 'tokenizer': 'bytes', 'carved': {'test': 0.1}}
    both = {'source': source.identity(), 'target': target.identity()}
    assert 'carved' not in source.identity() and PairDataset(source, target).identity() == both


SHARD_TOKENS = 2000


def shards(path, **fields):
    return DataConfig(name='shards', path=str(path), **fields)


def prepared(data, out, shard_tokens=SHARD_TOKENS):
    return prepare(data, str(out), shard_tokens=shard_tokens)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """A folder of texts as a dataset."""
    root = tmp_path_factory.mktemp('text')
    path = str(write_texts(root / 'files'))
    return DataConfig(name='text', path=path, data_dir=str(root / 'cache'))


@pytest.fixture(scope='module')
def made(text, tmp_path_factory):
    """Its shards."""
    out = tmp_path_factory.mktemp('shards')
    prepared(text, out)
    return out


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
    exact = prepared(text, tmp_path / 'exact', shard_tokens=int(ends[9]))
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

    for writes in (0, 1, 5, 8, 12):  # of 6 shards, an index after each, and the whole index
        out, counter = tmp_path / str(writes), itertools.count()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, 'replace', stopping)
            prepared(text, out)
        stamps = {path: path.stat().st_mtime_ns for path in out.glob('*.bin')}
        assert len(stamps) == (writes + 1) // 2
        prepared(text, out)
        assert contents(out) == contents(made)
        # One that is not in the index is written again.
        assert sum(path.stat().st_mtime_ns == stamps[path] for path in stamps) == writes // 2


def test_a_finished_directory_is_left_as_it_is_and_a_damaged_one_repaired(
    text, made, tmp_path, caplog, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(write_shards, 'write_atomic', None)
        assert prepared(text, made).complete
    copy = shutil.copytree(made, tmp_path / 'copy')
    kept, first, second = (copy / f'train_00000{n}.bin' for n in range(3))
    data = bytearray(first.read_bytes())
    data[1500] ^= 1
    first.write_bytes(data)
    assert load_text(shards(copy))  # which reads no tokens
    second.unlink()
    sentence = '{} is missing, or not the shard that index.json describes'
    assert verify(str(copy)) == [sentence.format(path) for path in (first, second)]
    for damaged_index in (False, True):
        stamp = kept.stat().st_mtime_ns
        prepared(text, copy)
        assert contents(copy) == contents(made)
        # Without an index nobody knows what the shards were made of.
        assert (kept.stat().st_mtime_ns != stamp) == damaged_index
        (copy / 'index.json').unlink()
    assert f'{sentence.format(first)}; it is written again' in caplog.messages


def lost():
    yield b'a'
    raise OSError('lost')


def test_what_cannot_be_prepared(text, made, tmp_path, monkeypatch):
    for fields, texts, message in (
        ({'tokenizer': 'characters'}, None, "shards with tokenizer='bytes', not 'characters'"),
        ({'name': 'shards'}, None, "data.name='shards' is tokenized already; name the text"),
        ({'name': 'cldr', 'languages': 'en-de'}, None, 'is a translation set; shards'),
        ({}, [b'a', b'b\0'], "document 2 of split 'train' of x cannot be encoded: "),
        ({}, lost(), "split 'train' of x cannot be read .OSError: lost.; restore"),
        ({}, [], "split 'train' of x has no document; give it text"),
        ({'tokenizer': 'bpe', 'tokenizer_size': 257}, [b'\xe4'] * 40, 'cannot be tokenized: '),
    ):
        data, out = dataclasses.replace(text, **fields), made
        if texts is not None:
            register(monkeypatch, 'x', {'train': texts, 'validation': [b'a']})
            data, out = dataclasses.replace(data, name='x', path=None), tmp_path / message[:9]
        with refused(message):
            prepared(data, out)
    with locked(tmp_path / 'lock'), refused('is being prepared by another process; wait until'):
        prepared(text, tmp_path)


def test_the_vocabulary_comes_with_the_shards(text, tmp_path):
    data = dataclasses.replace(text, tokenizer='characters')
    prepared(data, tmp_path)
    assert tokenizer_of(shards(tmp_path)).name == tokenizer_of(data).name
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(path.read_bytes() + b' ')
    with refused('tokenizer.json is damaged: its sha256 is .*; copy it again, or repeat'):
        load_text(shards(tmp_path))


def edit(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


def test_a_damaged_or_missing_file_is_named(made, tmp_path):
    copy = shutil.copytree(made, tmp_path / 'copy')
    for file, damage, message in (
        ('train_000001.bin', None, 'train_000001.bin is missing, or not the shard .*; copy it'),
        ('test_000000.bin', lambda text: text[:1500], 'test_000000.bin is missing, or not'),
        ('index.json', None, 'index.json cannot be read .No such file'),
        ('index.json', lambda text: PICKLE.decode('latin-1'), 'index.json'),
        ('index.json', edit(schema=2), "field 'schema' is 2, expected"),
        ('index.json', edit(dtype='int64'), "field 'dtype' is 'int64', expected"),
        ('index.json', edit(complete=False), 'is not finished; copy it again, or repeat'),
        ('index.json', edit(tokenizer_name='x'), 'was tokenized with x, but .* bytes'),
        ('index.json', edit(model_sha256='x'), 'tokenizer.json is damaged: it cannot be read'),
        ('index.json', lambda t: t.replace('"num_tokens": ', '"num_tokens": 1'), 'is missing, or'),
    ):
        content = (copy / file).read_text('latin-1')
        (copy / file).unlink()
        if damage:
            (copy / file).write_text(damage(content), 'latin-1')
        with refused(message):
            load_text(shards(copy))
        (copy / file).write_text(content, 'latin-1')


def test_settings_that_do_not_fit_are_refused(text, made, tmp_path):
    assert load_text(shards(made, carve_test=True)).splits == ('train', 'validation', 'test')
    path = shutil.copytree(text.path, tmp_path / 'files')
    shutil.rmtree(path / 'test')
    prepared(dataclasses.replace(text, path=str(path)), tmp_path)
    for where, fields, message in (
        (made, {'lowercase': True}, 'data.lowercase=True has no effect on shards'),
        (made, {'tokenizer': 'bpe'}, "data.tokenizer='bpe' has no effect .* with bytes .*; set it"),
        (made, {'path': 'gs://b/x'}, 'data.path=gs://b/x is a URL, but .* local or mounted'),
        (tmp_path, {'carve_test': True}, 'data.carve_test=True has no effect on shards, .*; set'),
    ):
        with refused(message):
            rows_of(Config(data=dataclasses.replace(shards(where), **fields)))

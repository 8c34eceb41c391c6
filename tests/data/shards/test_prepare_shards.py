import dataclasses
import errno
import json
import os
import signal
import sys

import numpy as np
import pytest

from qkattn.data.shards import prepare_shards
from qkattn.data.shards.encoding import chunks
from qkattn.data.shards.prepare_shards import prepare, verify
from qkattn.errors import DiskError
from qkattn.storage.leases import locked
from tests.data.refusals import refused
from tests.data.shards.examples import contents
from tests.processes import start_python

SIZE = 2000
SETTINGS = {'workers': 1, 'shard_tokens': SIZE}


@pytest.fixture(scope='module')
def whole(text, tmp_path_factory):
    """What an undisturbed preparation in one process writes."""
    out = tmp_path_factory.mktemp('whole') / 'shards'
    prepare(text, str(out), **SETTINGS)
    return out


def test_shards_hold_whole_documents_up_to_their_size(whole):
    index = json.loads((whole / 'index.json').read_text())
    files = {path.name for path in whole.glob('*.bin')}
    assert {
        shard['file'] for split in index['splits'].values() for shard in split['shards']
    } == files
    for split in index['splits'].values():
        for shard in split['shards']:
            head, ids = np.fromfile(whole / shard['file'], '<i4', 256), None
            ids = np.fromfile(whole / shard['file'], '<u2', offset=1024)
            assert head[:4].tolist() == [20240520, 1, len(ids), shard['num_documents']]
            ends = np.flatnonzero(ids == 0) + 1
            assert (len(ends), ends[-1]) == (shard['num_documents'], len(ids))
            if shard is not split['shards'][-1]:
                # The document that reaches the size is the last one.
                assert len(ids) >= SIZE and (len(ends) == 1 or ends[-2] < SIZE)
    assert list(verify(str(whole))) == []


def test_any_number_of_workers_writes_the_same(text, whole, tmp_path, monkeypatch):
    monkeypatch.setattr('qkattn.data.shards.encoding.CHUNK_BYTES', 500)
    prepare(text, str(tmp_path / 'a'), **SETTINGS)
    prepare(text, str(tmp_path / 'b'), workers=3, shard_tokens=SIZE)
    assert contents(tmp_path / 'a') == contents(tmp_path / 'b') == contents(whole)


def test_the_fingerprint_does_not_depend_on_the_shards(text, whole, tmp_path):
    prepare(text, str(tmp_path), workers=1, shard_tokens=10**6)
    first, second = (json.loads((d / 'index.json').read_text()) for d in (whole, tmp_path))
    for split, found in second['splits'].items():
        assert len(found['shards']) == 1
        assert found['fingerprint'] == first['splits'][split]['fingerprint']


# Kills a preparation at each of its writes in turn, and goes on from what it left.
KILLED = """
    import os, signal, sys
    from qkattn.config import DataConfig
    from qkattn.data.shards.prepare_shards import prepare
    path, cache, out, size = sys.argv[1:5]

    def killed_at(writes, call):
        replace, left = os.replace, [writes]
        def counted(*arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(*arguments)
        os.replace = counted
        call()
        os._exit(0)

    codes = []
    for writes in range(100):
        child = os.fork()
        if not child:
            data = DataConfig(name='text', path=path, data_dir=cache)
            settings = {'workers': 1, 'shard_tokens': int(size)}
            killed_at(writes, lambda: prepare(data, f'{out}/{writes}', **settings))
        codes.append(os.waitpid(child, 0)[1])
        if not codes[-1]:
            break
    print(*codes)
"""


def test_killed_at_any_write_it_goes_on_to_the_same(text, whole, tmp_path):
    process = start_python(KILLED, text.path, text.data_dir, tmp_path, SIZE)
    printed, errors = process.communicate(timeout=300)
    *codes, last = map(int, printed.split())
    # The plan, the shards and the index are a write each.
    num_shards = len(list(whole.glob('*.bin')))
    assert codes == [signal.SIGKILL] * (num_shards + 2) and last == 0, errors
    for writes in range(len(codes)):
        out = tmp_path / str(writes)
        left = contents(out)
        assert len([name for name in left if name.endswith('.bin')]) == min(
            max(writes - 1, 0), num_shards
        )
        stamps = {path: path.stat().st_mtime_ns for path in out.glob('*.bin')}
        prepare(text, str(out), **SETTINGS)
        assert contents(out) == contents(whole)
        assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_a_finished_directory_is_left_as_it_is(text, whole, monkeypatch):
    monkeypatch.setattr(prepare_shards, 'write_atomic', None)
    assert prepare(text, str(whole), **SETTINGS).complete


def test_missing_and_damaged_shards_are_named_and_made_again(text, whole, tmp_path, caplog):
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged, short, missing = (tmp_path / f'train_00000{n}.bin' for n in (0, 1, 2))
    data = bytearray(damaged.read_bytes())
    data[1500] ^= 1
    damaged.write_bytes(data)
    short.write_bytes(short.read_bytes()[:1300])
    missing.unlink()
    assert list(verify(str(tmp_path))) == [
        f'{damaged} is damaged: its sha256 is not that in index.json',
        f'{short} is damaged: 1,300 bytes',
        f'{missing} is missing',
    ]
    prepare(text, str(tmp_path), **SETTINGS)
    assert contents(tmp_path) == contents(whole)
    assert f'{damaged} is damaged and written again' in caplog.messages


def test_a_second_process_and_other_settings_are_refused(text, whole, tmp_path):
    with locked(tmp_path / 'lock'), refused('is being prepared by another process; wait until'):
        prepare(text, str(tmp_path), **SETTINGS)
    with refused('holds shards with shard_tokens=2000, not 99; give another directory'):
        prepare(text, str(whole), workers=1, shard_tokens=99)
    with refused("holds shards with tokenizer='bytes', not 'characters'; give another"):
        prepare(dataclasses.replace(text, tokenizer='characters'), str(whole), **SETTINGS)


@pytest.mark.parametrize(
    ('fields', 'settings', 'says'),
    [
        ({}, {'workers': 0}, '--workers=0 must be at least 1'),
        ({}, {'shard_tokens': 0}, '--shard_tokens=0 must be at least 1'),
        (
            {},
            {'out': 'gs://bucket/x'},
            '--out=gs://bucket/x is a URL; prepare .* gcloud storage cp',
        ),
        ({'name': 'shards'}, {}, "data.name='shards' is tokenized already; name the text"),
        ({'name': 'cldr', 'path': None, 'languages': 'en-de'}, {}, 'is a translation set; shards'),
        ({'name': 'recall(pairs=8)', 'path': None}, {}, "unknown data.name 'recall'"),
        ({'path': '/absent'}, {}, "data.path='/absent' does not exist"),
        ({'tokenizer': 'absent.json'}, {}, "data.tokenizer='absent.json' cannot be read"),
        (
            {'tokenizer': 'ids'},
            {},
            "document 1 cannot be encoded: data.tokenizer='ids' has no text",
        ),
        ({}, {'out': '/proc/x'}, '/proc/x cannot be written'),
    ],
)
def test_bad_input_is_one_sentence(text, tmp_path, fields, settings, says):
    arguments = SETTINGS | {'out': str(tmp_path)} | settings
    with refused(says):
        prepare(dataclasses.replace(text, **fields), **arguments)


@pytest.mark.parametrize(
    ('files', 'says'),
    [
        ({'train.txt': b'one line'}, 'too small to be cut at line ends'),
        ({'train.txt': b''}, "train.txt' is empty"),
        ({'train.txt': b'\xff\n' * 40}, "train.txt', line 1, is not UTF-8"),
    ],
)
def test_too_little_or_unreadable_text_is_one_sentence(text, tmp_path, files, says):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with refused(says):
        prepare(dataclasses.replace(text, path=str(tmp_path)), str(tmp_path / 'out'), **SETTINGS)


SOURCE = """
from qkattn.data.corpora.corpus import Corpus
def broken(config, *, error='OSError', text=b'a'):
    def documents(language):
        def texts():
            yield from [text] * 40
            raise {'OSError': OSError, 'RuntimeError': RuntimeError}[error]('lost')
        return {split: texts() for split in ('train', 'validation')}
    return Corpus(name='broken', version='1', splits=('train', 'validation'), documents=documents)
def none(config):
    empty = {'train': [b'a'] * 40, 'validation': []}
    return Corpus(name='none', version='1', splits=tuple(empty), documents=lambda _: empty)
def latin(config):
    latin = {'train': [bytes([228])] * 40, 'validation': [b'a']}
    return Corpus(name='latin', version='1', splits=tuple(latin), documents=lambda _: latin)
"""


@pytest.mark.parametrize(
    ('fields', 'says'),
    [
        (
            {'name': 'source:broken(error="OSError")'},
            "split 'train' of broken cannot be read .lost",
        ),
        ({'name': 'source:broken(error="RuntimeError")'}, 'cannot be read .lost.; restore the so'),
        ({'name': 'source:none'}, "none has no document in split 'validation'; give it text"),
        ({'name': 'source:latin', 'tokenizer': 'bpe'}, 'cannot be tokenized: text is not valid UT'),
        ({'name': 'source:latin', 'lowercase': True}, "split 'train' of latin.* cannot be read"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_sentence(text, tmp_path, monkeypatch, fields, says):
    (tmp_path / 'source.py').write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'source', raising=False)
    data = dataclasses.replace(text, path=None, tokenizer_size=257, **fields)
    with refused(says):
        prepare(data, str(tmp_path / 'out'), **SETTINGS)


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(
    text, whole, tmp_path, monkeypatch
):
    out = tmp_path / 'out'
    with monkeypatch.context() as patched:
        real = prepare_shards.header

        def full(dtype, counts):
            if (out / 'train_000002.bin').exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(dtype, counts)

        patched.setattr(prepare_shards, 'header', full)
        with refused('cannot be written: the disk is full; make room', DiskError):
            prepare(text, str(out), **SETTINGS)
    assert not list(out.glob('*.tmp'))
    prepare(text, str(out), **SETTINGS)
    assert contents(out) == contents(whole)


def test_chunks_hold_all_documents_behind_the_first(monkeypatch):
    monkeypatch.setattr('qkattn.data.shards.encoding.CHUNK_BYTES', 4)
    monkeypatch.setattr('qkattn.data.shards.encoding.CHUNK_DOCUMENTS', 3)
    texts = [b'a', b'', b'bb', b'ccccc', b'', b'', b'', b'd']
    found = list(chunks(iter(texts), 1))
    assert found == [(1, [b'', b'bb', b'ccccc']), (4, [b'', b'', b'']), (7, [b'd'])]

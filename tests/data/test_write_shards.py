import dataclasses
import json
import signal
import sys

import numpy as np
import pytest

from qkattn.data import write_shards
from qkattn.data.load import prepare, verify
from qkattn.storage.leases import locked
from tests.data.datasets import contents
from tests.data.refusals import refused
from tests.processes import start_python

SIZE = 2000
SETTINGS = {'workers': 1, 'shard_tokens': SIZE}


def test_shards_hold_whole_documents_up_to_their_size(text, made, tmp_path):
    index = json.loads((made / 'index.json').read_text())
    names = {shard['file'] for split in index['splits'].values() for shard in split['shards']}
    assert names == {path.name for path in made.glob('*.bin')} and len(names) == 6
    for split in index['splits'].values():
        for shard in split['shards']:
            head = np.fromfile(made / shard['file'], '<i4', 256)
            ids = np.fromfile(made / shard['file'], '<u2', offset=1024)
            assert head[:4].tolist() == [20240520, 1, len(ids), shard['num_documents']]
            ends = np.flatnonzero(ids == 0) + 1
            assert (len(ends), ends[-1]) == (shard['num_documents'], len(ids))
            if shard is not split['shards'][-1]:
                # The document that reaches the size is the last one.
                assert len(ids) >= SIZE and (len(ends) == 1 or ends[-2] < SIZE)
    assert list(verify(str(made))) == []
    # A shard that is filled exactly is closed.
    ends = np.flatnonzero(np.fromfile(made / 'train_000000.bin', '<u2', offset=1024) == 0) + 1
    exact = prepare(text, str(tmp_path / 'exact'), workers=1, shard_tokens=int(ends[9]))
    assert exact.splits['train'].shards[0].num_documents == 10
    # The fingerprint does not depend on how the tokens are cut.
    whole = prepare(text, str(tmp_path / 'whole'), workers=1, shard_tokens=10**6)
    for name, split in whole.splits.items():
        assert len(split.shards) == 1
        assert split.fingerprint == index['splits'][name]['fingerprint']


def test_any_number_of_workers_writes_the_same(text, made, tmp_path, monkeypatch):
    monkeypatch.setattr(write_shards, 'CHUNK_BYTES', 500)
    monkeypatch.setattr(write_shards, 'CHUNK_DOCUMENTS', 4)
    prepare(text, str(tmp_path / 'a'), **SETTINGS)
    prepare(text, str(tmp_path / 'b'), workers=3, shard_tokens=SIZE)
    assert contents(tmp_path / 'a') == contents(tmp_path / 'b') == contents(made)


# Kills a preparation at each of its writes in turn.
KILLED = """
    import os, signal, sys
    from qkattn.config import DataConfig
    from qkattn.data.load import prepare
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


def test_killed_at_any_write_it_goes_on_to_the_same(text, made, tmp_path):
    process = start_python(KILLED, text.path, text.data_dir, tmp_path, SIZE)
    printed, errors = process.communicate(timeout=300)
    *codes, last = map(int, printed.split())
    # The plan, the shards and the index are a write each.
    num_shards = len(list(made.glob('*.bin')))
    assert codes == [signal.SIGKILL] * (num_shards + 2) and last == 0, errors
    for writes in range(len(codes)):
        out = tmp_path / str(writes)
        stamps = {path: path.stat().st_mtime_ns for path in out.glob('*.bin')}
        assert len(stamps) == min(max(writes - 1, 0), num_shards)
        prepare(text, str(out), **SETTINGS)
        assert contents(out) == contents(made)
        assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_a_finished_directory_is_left_as_it_is_and_a_damaged_one_repaired(
    text, made, tmp_path, caplog, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(write_shards, 'write_atomic', None)
        assert prepare(text, str(made), **SETTINGS).complete
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first, second, third = (tmp_path / f'train_00000{n}.bin' for n in (1, 2, 3))
    data = bytearray(first.read_bytes())
    data[1500] ^= 1
    first.write_bytes(data)
    # What is damaged alone is repaired, too.
    prepare(text, str(tmp_path), **SETTINGS)
    assert contents(tmp_path) == contents(made)
    assert f'{first} is damaged and written again' in caplog.messages
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:1300])
    third.unlink()
    problems = list(verify(str(tmp_path)))
    assert problems[0] == f'{first} is damaged: its sha256 is not that in index.json'
    assert problems[1].startswith(f'{second} is damaged: it has 1,300 bytes, but its ')
    assert problems[2] == f'{third} is missing' and len(problems) == 3
    prepare(text, str(tmp_path), **SETTINGS)
    assert contents(tmp_path) == contents(made)
    # Without an index nobody knows what the shards were made of.
    (tmp_path / 'index.json').unlink()
    write_bytes, stamp = first.read_bytes(), first.stat().st_mtime_ns
    prepare(text, str(tmp_path), **SETTINGS)
    assert first.read_bytes() == write_bytes and first.stat().st_mtime_ns != stamp


@pytest.mark.parametrize(
    ('fields', 'settings', 'message'),
    [
        ({}, {'workers': 0}, '--workers=0 must be at least 1'),
        ({}, {'shard_tokens': 0}, '--shard_tokens=0 must be at least 1'),
        ({}, {'out': 'gs://b/x'}, '--out=gs://b/x is a URL; prepare .* gcloud storage cp'),
        ({}, {'shard_tokens': 99}, 'holds shards with shard_tokens=2000, not 99; give another'),
        ({'tokenizer': 'characters'}, {}, "shards with tokenizer='bytes', not 'characters'; give"),
        ({'name': 'shards'}, {}, "data.name='shards' is tokenized already; name the text"),
        ({'name': 'cldr', 'path': None, 'languages': 'en-de'}, {}, 'is a translation set; shards'),
        ({'name': 'recall(pairs=8)', 'path': None}, {}, "unknown data.name 'recall'"),
        ({'path': '/absent'}, {}, "data.path='/absent' does not exist"),
        ({'tokenizer': 'absent.json'}, {}, "data.tokenizer='absent.json' cannot be read"),
        ({'tokenizer': 'ids'}, {'out': 'new'}, "document 1 of split 'train' of text cannot be enc"),
        ({}, {'out': '/proc/x'}, '/proc/x cannot be written'),
        (
            {'path': None, 'name': 'source:broken'},
            {},
            "split 'train' of broken cannot be read .l",
        ),
        ({'path': None, 'name': 'source:none'}, {}, "'validation' of none has no document; give"),
        (
            {'path': None, 'name': 'source:latin', 'tokenizer': 'bpe'},
            {},
            'cannot be tokenized: text',
        ),
        (
            {'path': None, 'name': 'source:latin', 'lowercase': True},
            {},
            "'train' of latin.* cann",
        ),
    ],
)
def test_bad_input_is_one_sentence(text, made, tmp_path, monkeypatch, fields, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'source.py').write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'source', raising=False)
    new = 'source' in fields.get('name', '')
    arguments = SETTINGS | {'out': 'new' if new else str(made)} | settings
    with refused(message):
        prepare(dataclasses.replace(text, tokenizer_size=257, **fields), **arguments)


SOURCE = """
from qkattn.data.corpora.corpus import Corpus
def made(name, train, validation):
    texts = {'train': train, 'validation': validation}
    return Corpus(name=name, version='1', splits=tuple(texts), documents=lambda _: texts)
def lost():
    yield from [b'a'] * 40
    raise OSError('lost')
def broken(config): return made('broken', lost(), [b'a'])
def none(config): return made('none', [b'a'] * 40, [])
def latin(config): return made('latin', [bytes([228])] * 40, [b'a'])
"""


def test_a_second_process_is_refused(text, tmp_path):
    with locked(tmp_path / 'lock'), refused('is being prepared by another process; wait until'):
        prepare(text, str(tmp_path), **SETTINGS)

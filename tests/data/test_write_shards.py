import dataclasses
import itertools
import json
import os
import shutil
import sys

import numpy as np
import pytest

from qkattn.data import write_shards
from qkattn.data.load import prepare, verify
from qkattn.storage.leases import locked
from tests.data.datasets import SHARD_TOKENS, contents
from tests.data.refusals import refused


def test_shards_hold_whole_documents_up_to_their_size(text, made, tmp_path):
    index = json.loads((made / 'index.json').read_text())
    names = {shard['file'] for split in index['splits'].values() for shard in split['shards']}
    assert names == {path.name for path in made.glob('*.bin')} and len(names) == 6
    for split in index['splits'].values():
        for shard in split['shards']:
            head = np.fromfile(made / shard['file'], '<i4', 256)
            ids = np.fromfile(made / shard['file'], '<u2', offset=1024)
            assert head[:3].tolist() == [20240520, 1, len(ids)] and not head[3:].any()
            ends = np.flatnonzero(ids == 0) + 1
            assert (len(ends), ends[-1]) == (shard['num_documents'], len(ids))
            if shard is not split['shards'][-1]:
                # The document that reaches the size is the last one.
                assert len(ids) >= SHARD_TOKENS and (len(ends) == 1 or ends[-2] < SHARD_TOKENS)
    assert verify(str(made)) == []
    # A shard that is filled exactly is closed.
    ends = np.flatnonzero(np.fromfile(made / 'train_000000.bin', '<u2', offset=1024) == 0) + 1
    exact = prepare(text, str(tmp_path / 'exact'), shard_tokens=int(ends[9]))
    assert exact.splits['train'].shards[0].num_documents == 10
    # The fingerprint does not depend on how the tokens are cut.
    whole = prepare(text, str(tmp_path / 'whole'), shard_tokens=10**6)
    for name, split in whole.splits.items():
        assert len(split.shards) == 1
        assert split.fingerprint == index['splits'][name]['fingerprint']


def test_stopped_at_any_write_it_goes_on_to_the_same(text, made, tmp_path, monkeypatch):
    replace = os.replace

    def stopping(*paths):
        if next(counter) == writes:
            raise KeyboardInterrupt
        return replace(*paths)

    for writes in itertools.count():
        out, counter = tmp_path / str(writes), itertools.count()
        with monkeypatch.context() as patched:
            patched.setattr(os, 'replace', stopping)
            try:
                prepare(text, str(out), shard_tokens=SHARD_TOKENS)
                break
            except KeyboardInterrupt:
                pass
        stamps = {path: path.stat().st_mtime_ns for path in out.glob('*.bin')}
        assert len(stamps) == (writes + 1) // 2  # each shard, then the index
        unlisted = out / f'train_{len(stamps) - 1:06d}.bin' if writes % 2 else None
        prepare(text, str(out), shard_tokens=SHARD_TOKENS)
        assert contents(out) == contents(made)
        kept = [path for path, stamp in stamps.items() if path.stat().st_mtime_ns == stamp]
        assert len(kept) == writes // 2 and unlisted not in kept
    assert writes == 2 * len(list(made.glob('*.bin'))) + 1


def test_a_finished_directory_is_left_as_it_is_and_a_damaged_one_repaired(
    text, made, tmp_path, caplog, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(write_shards, 'write_atomic', None)
        assert prepare(text, str(made), shard_tokens=SHARD_TOKENS).complete
    copy = shutil.copytree(made, tmp_path / 'copy')
    first, second, third = (copy / f'train_00000{n}.bin' for n in (1, 2, 3))
    data = bytearray(first.read_bytes())
    data[1500] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:1300])
    third.unlink()
    sentence = '{} is missing, or not the shard that index.json describes'
    assert verify(str(copy)) == [sentence.format(path) for path in (first, second, third)]
    stamp = (copy / 'train_000000.bin').stat().st_mtime_ns
    prepare(text, str(copy), shard_tokens=SHARD_TOKENS)
    assert contents(copy) == contents(made)
    assert (copy / 'train_000000.bin').stat().st_mtime_ns == stamp
    assert f'{sentence.format(first)}; it is written again' in caplog.messages
    # Without an index nobody knows what the shards were made of.
    (copy / 'index.json').unlink()
    prepare(text, str(copy), shard_tokens=SHARD_TOKENS)
    assert contents(copy) == contents(made)
    assert (copy / 'train_000000.bin').stat().st_mtime_ns != stamp


@pytest.mark.parametrize(
    ('fields', 'settings', 'message'),
    [
        ({}, {'out': 'gs://b/x'}, '--out=gs://b/x is a URL'),
        ({}, {'shard_tokens': 99}, 'holds shards with shard_tokens=2000, not 99; give another'),
        ({'tokenizer': 'characters'}, {}, "shards with tokenizer='bytes', not 'characters'; give"),
        ({'name': 'shards'}, {}, "data.name='shards' is tokenized already; name the text"),
        ({'name': 'cldr', 'path': None, 'languages': 'en-de'}, {}, 'is a translation set; shards'),
        ({'tokenizer': 'absent.json'}, {}, "data.tokenizer='absent.json' cannot be read"),
        ({'name': 'source:zero', 'path': None}, {'out': 'new'}, "document 2 of split 'train' of"),
        ({}, {'out': '/proc/x'}, '/proc/x cannot be written'),
        ({'name': 'source:broken', 'path': None}, {'out': 'new'}, "'train' of broken cannot be re"),
        ({'name': 'source:none', 'path': None}, {'out': 'new'}, "'validation' of none has no docu"),
        (
            {'name': 'source:latin', 'path': None, 'tokenizer': 'bpe'},
            {'out': 'new'},
            'cannot be tokenized',
        ),
        (
            {'name': 'source:latin', 'path': None, 'lowercase': True},
            {'out': 'new'},
            "'train' of latin cannot be read",
        ),
    ],
)
def test_bad_input_is_one_sentence(text, made, tmp_path, monkeypatch, fields, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'source.py').write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'source', raising=False)
    with refused(message):
        data = dataclasses.replace(text, tokenizer_size=257, **fields)
        prepare(data, **{'out': str(made), 'shard_tokens': SHARD_TOKENS} | settings)


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
def zero(config): return made('zero', [b'a', b'b' + bytes(1)], [b'a'])
"""


def test_a_second_process_is_refused(text, tmp_path):
    with locked(tmp_path / 'lock'), refused('is being prepared by another process; wait until'):
        prepare(text, str(tmp_path), shard_tokens=SHARD_TOKENS)

import dataclasses
import json
import logging

import numpy as np
import pytest
import tokenizers

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.load import load_text, prepare, tokenizer_of, verify
from qkattn.data.pipeline import train_batch
from qkattn.data.shard_files import ShardTokens
from qkattn.data.tasks.language import LanguageRows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.storage.files import write_atomic
from tests import damages
from tests.data.datasets import write_bin
from tests.data.refusals import refused


def shards(path, **fields):
    return DataConfig(name='shards', path=str(path), **fields)


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the shards."""
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_shards_are_the_dataset_that_they_were_made_of(text, made):
    before, after = load_text(text), load_text(shards(made))
    assert after.splits == before.splits and len(list(made.glob('train_*.bin'))) > 3
    for split in before.splits:
        assert np.array_equal(np.asarray(after.split(split)), np.asarray(before.split(split)))
        assert np.array_equal(after.document_ends(split), before.document_ends(split))
        assert after.document_names(split) == before.document_names(split)
        differing = {'fingerprint': '', 'shards': ()}
        infos = (dataclasses.replace(d.info(split), **differing) for d in (before, after))
        assert len(set(infos)) == 1 and after.bytes_per_token(split) == 1
    identity = json.loads(json.dumps(after.identity()))
    assert identity.pop('fingerprints').keys() == before.identity().pop('fingerprints').keys()
    assert identity == {'name': 'text', 'version': before.version, 'tokenizer': 'bytes'}
    assert tokenizer_of(shards(made)).name == 'bytes'
    encoder = ModelConfig(context=16, kind='encoder', vocab_size=257)
    for model in (ModelConfig(context=16), encoder):
        rows = [rows_of(Config(model=model, data=data)) for data in (text, shards(made))]
        batch, same = (train_batch(r, seed=3, step=11, batch_size=8) for r in rows)
        assert all(np.array_equal(array, same[name]) for name, array in batch.items())


def test_shards_in_a_bucket_are_read_by_ranges_of_the_rows(made, bucket):
    for path in made.glob('*.*'):
        write_atomic(f'gs://runs/shards/{path.name}', path.read_bytes())
    local, remote = (
        rows_of(Config(model=ModelConfig(context=16), data=shards(where)))
        for where in (made, 'gs://runs/shards/')
    )
    assert remote.identity() == local.identity()
    del bucket.log[:]
    batches = [train_batch(rows, seed=1, step=7, batch_size=6) for rows in (local, remote)]
    assert np.array_equal(batches[0]['tokens_BT'], batches[1]['tokens_BT'])
    # A row is a range, in two files at most.
    assert 6 <= len([line for line in bucket.log if '.bin' in line]) <= 12
    assert list(verify('gs://runs/shards')) == []
    for where, message in (
        ('gs://runs/absent', "data.path='gs://runs/absent' cannot be read"),
        ('gs://absent/x', 'gs://absent does not exist'),
        ('gs://forbidden/x', 'gs://forbidden may not be used to read'),
    ):
        with refused(message):
            load_text(shards(where))


def test_opening_reads_no_tokens_and_a_host_only_its_rows(made, monkeypatch):
    sizes, real = [], ShardTokens._read
    monkeypatch.setattr(
        ShardTokens,
        '_read',
        lambda self, pieces: sizes.append(sum(b - a for _, a, b in pieces)) or real(self, pieces),
    )
    rows = LanguageRows(load_text(shards(made)), 16, shift=True)
    assert rows.count('train') > 100 and rows.identity() and rows.unigram_nats('validation')
    assert rows.bytes_per_token('validation') == 1 and not sizes
    whole = train_batch(rows, seed=5, step=40, batch_size=8)
    parts = [
        train_batch(rows, seed=5, step=40, batch_size=8, part=slice(host, None, 4))
        for host in range(4)
    ]
    assert sizes == [8 * 17] + [2 * 17] * 4
    for name, array in whole.items():
        together = np.stack([part[name] for part in parts], axis=1).reshape(array.shape)
        assert np.array_equal(together, array)


def edit(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


@pytest.mark.parametrize(
    ('file', 'damage', 'message'),
    [
        ('train_000001.bin', None, 'train_000001.bin is missing; copy it again'),
        ('test_000000.bin', lambda text: text[:1500], 'is damaged: it has 1,500 bytes, but its'),
        ('index.json', lambda text: text[:99], 'index.json is damaged .*; copy it again'),
        ('index.json', lambda text: damages.NESTED, 'damaged .it is nested too'),
        ('index.json', edit(schema=2), 'has schema 2, but this version of qkattn reads schema 1'),
        ('index.json', edit(splits=3), 'index.json is damaged'),
        ('index.json', edit(dtype=3), "index.json is damaged .field 'dtype' is 3"),
        ('index.json', edit(complete=False), 'is not finished; repeat the command'),
        ('index.json', edit(tokenizer_name='x'), 'was tokenized with x, but .* bytes'),
        ('index.json', edit(model_sha256='x'), 'tokenizer.json cannot be read'),
        (
            'index.json',
            lambda text: text.replace('"num_tokens": ', '"num_tokens": 1'),
            'contradict',
        ),
        ('index.json', lambda text: text.replace('"validation/000.txt",', ''), 'contradict each'),
    ],
)
def test_what_is_damaged_or_missing_is_named(copy, file, damage, message):
    path = copy / file
    content = path.read_text('latin-1')
    path.unlink() if damage is None else path.write_text(damage(content), 'latin-1')
    with refused(message):
        load_text(shards(copy))


def test_a_damaged_vocabulary_is_named(text, tmp_path):
    data = dataclasses.replace(text, tokenizer='characters')
    prepare(data, str(tmp_path), workers=1, shard_tokens=10**6)
    assert load_text(shards(tmp_path)).tokenizer.name == tokenizer_of(data).name
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(path.read_bytes() + b' ')
    with refused('tokenizer.json is damaged: its sha256 is not that in index.json; copy it again'):
        load_text(shards(tmp_path))


def test_shards_without_an_index_are_read_as_they_are(tmp_path, caplog):
    separated = np.arange(5000) % 50
    separated[49::50] = 50256
    write_bin(tmp_path / 'owt' / 'train.bin', separated, None)
    write_bin(tmp_path / 'owt' / 'val.bin', separated[:1020], None)
    for number in (1, 2, 3):
        write_bin(tmp_path / 'fw' / f'fineweb_train_{number:06d}.bin', np.roll(separated, number))
    write_bin(tmp_path / 'fw' / 'fineweb_val_000000.bin', separated[:1000])
    write_bin(tmp_path / 'llama' / 'edu_train_000001.bin', np.arange(70000, 71000), 'uint32')
    write_bin(tmp_path / 'llama' / 'edu_val_000000.bin', np.arange(90), 'uint32')
    with caplog.at_level(logging.INFO):
        owt = load_text(shards(tmp_path / 'owt'))
    assert 'owt has no index: its ids are taken for those of ids-50257-50256' in caplog.messages
    assert (owt.name, owt.vocab_size, owt.splits) == ('owt', 50257, ('train', 'validation'))
    assert np.array_equal(np.asarray(owt.split('train')), separated)
    assert owt.document_ends('validation').tolist() == [*range(50, 1001, 50), 1020]
    assert owt.bytes_per_token('validation') is None and owt.unigram_nats('validation') > 3
    fineweb = load_text(shards(f'{tmp_path}/fw/fineweb_*.bin'))
    assert (fineweb.name, len(fineweb.split('train'))) == ('fineweb', 15000)
    window_BT = fineweb.windows('train', np.array([4998]), 4)
    assert window_BT.tolist() == [[47, 48, 48, 50256]]
    (tmp_path / 'fw' / 'fineweb_train_000002.bin').unlink()
    assert len(load_text(shards(tmp_path / 'fw')).split('train')) == 10000
    assert caplog.messages[-1].endswith('fw: train has no shards with the numbers 2')
    llama = load_text(shards(tmp_path / 'llama'))
    assert llama.vocab_size == 128256 and llama.windows('train', np.array([3]), 2).max() == 70004
    # Written down, because results and checkpoints hold them.
    assert {s: f[:8] for s, f in owt.identity()['fingerprints'].items()} == {
        'train': 'c1a9db3d',
        'validation': 'b6a2b439',
    }


def test_splits_that_shards_lack_are_carved_from_the_end_of_train(tmp_path, caplog):
    ids = np.arange(1000) % 30
    path = write_bin(tmp_path / 'train.bin', ids, None)
    data = shards(tmp_path, tokenizer='ids(vocab_size=30, separator=29)')
    with caplog.at_level(logging.INFO):
        dataset = load_text(data)
    assert [len(dataset.split(split)) for split in dataset.splits] == [810, 90, 100]
    together = [np.asarray(dataset.split(split)) for split in ('train', 'validation', 'test')]
    assert np.array_equal(np.concatenate(together), ids)
    assert dataset.identity()['carved'] == {'validation': 0.1, 'test': 0.1}
    assert dataset.version == 'bin-carved-validation-test'
    assert sum('10 % of train' in message for message in caplog.messages) == 2
    assert len(set(dataset.identity()['fingerprints'].values())) == 3
    write_bin(tmp_path / 'val.bin', ids[:100], None)
    assert load_text(data).splits == ('train', 'validation')
    carved = load_text(dataclasses.replace(data, carve_test=True))
    assert carved.splits == ('train', 'validation', 'test') and carved.carved == {'test': 0.1}
    assert [len(carved.split(split)) for split in carved.splits] == [900, 100, 100]
    path.write_bytes(path.read_bytes()[:8])
    (tmp_path / 'val.bin').unlink()
    with refused('has no validation shards, and too few tokens in train, 4, to carve one'):
        load_text(data)


def test_the_vocabulary_of_shards_may_be_named(tmp_path):
    vocabulary = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={'a': 0, 'b': 1, ' ': 2, '<|endoftext|>': 3}, merges=[])
    )
    vocabulary.add_special_tokens(['<|endoftext|>'])
    vocabulary.decoder = tokenizers.decoders.Fuse()
    vocabulary.save(str(tmp_path / 'gpt.json'))
    write_bin(tmp_path / 'train.bin', [0, 1, 3] * 40, None)
    write_bin(tmp_path / 'val.bin', [0, 2, 1, 3, 1, 3], None)
    dataset = load_text(shards(tmp_path, tokenizer=str(tmp_path / 'gpt.json')))
    assert (dataset.vocab_size, dataset.tokenizer.separator) == (4, 3)
    assert dataset.document_ends('validation').tolist() == [4, 6]
    assert dataset.bytes_per_token('validation') == 1
    assert len(dataset.tokenizer.encode('b')) == 1 and dataset.tokenizer.decode([1]) == 'b'
    unseparated = load_text(shards(tmp_path, tokenizer='ids(vocab_size=4, separator=None)'))
    assert unseparated.document_ends('validation').tolist() == [6]
    with refused("data.tokenizer='ids' has no text, only ids; give --prompt_tokens"):
        unseparated.tokenizer.encode('a')


HEAD = np.array([20240520, 3, 5], '<i4').tobytes()
EMPTY = np.array([20240520, 1, *[0] * 254], '<i4').tobytes()
IDS = 'ids(vocab_size=2, separator=5)'
WIDE = np.array([20240801, 7, 1, *[0] * 254], '<i4').tobytes()


@pytest.mark.parametrize(
    ('files', 'fields', 'message'),
    [
        ({}, {}, 'holds no train shards; their names have to be like train.bin'),
        ({'fineweb_000001.bin': b'ab'}, {}, 'no train shards; .*, not fineweb_000001.bin'),
        ({'train.bin': b'abc'}, {}, 'train.bin is no shard of tokens: .* its 3 bytes have to be'),
        ({'train.bin': HEAD}, {}, 'train.bin has a header 20240520, version 3, which .* known are'),
        ({'train.bin': EMPTY}, {}, 'train.bin has a header of 0 tokens; remove it'),
        ({'train.bin': b'ab', 'val.bin': WIDE[:-2]}, {}, 'val.bin is damaged: it has 1,026 bytes'),
        ({'train.bin': b'ab', 'val.bin': WIDE}, {}, 'shards of uint16 and uint32'),
        ({'x_train_1.bin': b'ab', 'y_train_1.bin': b'ab'}, {}, "shards of 'x' and 'y'; name those"),
        ({'train.bin': b'abcd'}, {'tokenizer': 'bpe'}, "data.tokenizer='bpe' cannot be that of"),
        ({'train.bin': b'abcd'}, {'tokenizer': IDS}, 'separator=5 must'),
        # Of shards with an index.
        (None, {'lowercase': True}, "data.lowercase=True has no effect on data.name='shards'"),
        (
            None,
            {'tokenizer': 'bpe'},
            "data.tokenizer='bpe' has no effect .* made with bytes; leave",
        ),
        (None, {'feature': 'x'}, "data.feature='x' has no effect"),
        (None, {'path': None}, "data.path=None: data.name='shards' needs the file or directory"),
        (None, {'path': 'absent'}, r"data.path='absent' cannot be read \(No such file"),
        (None, {'path': 'memory://absent'}, "='memory://absent' cannot be read .FileNotFound"),
        (None, {'path': 'odd://x'}, "data.path='odd://x' needs a package that is not installed"),
    ],
)
def test_other_files_and_settings_that_do_not_fit_are_refused(
    made, tmp_path, files, fields, message
):
    for name, data in (files or {}).items():
        (tmp_path / name).write_bytes(data)
    path = str(made if files is None else tmp_path)
    with refused(message):
        rows_of(Config(data=DataConfig(**{'name': 'shards', 'path': path} | fields)))

import dataclasses
import json
import shutil

import numpy as np
import pytest

from qkattn.config import Config, DataConfig
from qkattn.data.load import load_text, prepare, tokenizer_of
from qkattn.data.tasks.task_registry import rows_of
from tests.data.datasets import SHARD_TOKENS
from tests.data.refusals import refused


def shards(path, **fields):
    return DataConfig(name='shards', path=str(path), **fields)


def test_shards_are_the_dataset_that_they_were_made_of(text, made):
    before, after = load_text(text), load_text(shards(made))
    assert after.splits == before.splits and len(list(made.glob('train_*.bin'))) > 3
    for split in before.splits:
        assert np.array_equal(np.asarray(after.split(split)), np.asarray(before.split(split)))
        differing = {'fingerprint': '', 'shards': ()}
        infos = (dataclasses.replace(d.info(split), **differing) for d in (before, after))
        assert len(set(infos)) == 1
    identity = json.loads(json.dumps(after.identity()))
    assert identity.pop('fingerprints').keys() == before.identity().pop('fingerprints').keys()
    assert identity == {'name': 'text', 'version': before.version, 'tokenizer': 'bytes'}


def test_the_vocabulary_comes_with_the_shards(text, tmp_path):
    data = dataclasses.replace(text, tokenizer='characters')
    prepare(data, str(tmp_path), shard_tokens=SHARD_TOKENS)
    assert tokenizer_of(shards(tmp_path)).name == tokenizer_of(data).name
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(path.read_bytes() + b' ')
    with refused('tokenizer.json is damaged: its sha256 is .*; copy it again, or repeat'):
        load_text(shards(tmp_path))


def edit(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


@pytest.mark.parametrize(
    ('file', 'damage', 'message'),
    [
        ('train_000001.bin', None, 'train_000001.bin is missing, or not the shard .*; copy it'),
        ('test_000000.bin', lambda text: text[:1500], 'test_000000.bin is missing, or not'),
        ('index.json', None, 'index.json cannot be read .No such file'),
        ('index.json', edit(schema=2), "field 'schema' is 2, expected"),
        ('index.json', edit(dtype='int64'), "field 'dtype' is 'int64', expected"),
        ('index.json', edit(complete=False), 'is not finished; copy it again, or repeat'),
        ('index.json', edit(tokenizer_name='x'), 'was tokenized with x, but .* bytes'),
        ('index.json', edit(model_sha256='x'), 'tokenizer.json is damaged: it cannot be read'),
        ('index.json', lambda t: t.replace('"num_tokens": ', '"num_tokens": 1'), 'is missing, or'),
    ],
)
def test_a_damaged_or_missing_file_is_named(made, tmp_path, file, damage, message):
    path = shutil.copytree(made, tmp_path / 'copy') / file
    content = path.read_text('latin-1')
    path.unlink() if damage is None else path.write_text(damage(content), 'latin-1')
    with refused(message):
        load_text(shards(path.parent))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'lowercase': True}, 'data.lowercase=True has no effect on shards'),
        ({'tokenizer': 'bpe'}, "data.tokenizer='bpe' has no effect .* made with bytes .*; set it"),
        ({'path': 'gs://b/x'}, 'data.path=gs://b/x is a URL, but .* local or mounted directory'),
    ],
)
def test_settings_that_do_not_fit_are_refused(made, fields, message):
    with refused(message):
        rows_of(Config(data=dataclasses.replace(shards(made), **fields)))


def test_a_test_split_is_carved_before_shards_are_made(text, tmp_path):
    path = shutil.copytree(text.path, tmp_path / 'files')
    shutil.rmtree(path / 'test')
    prepare(dataclasses.replace(text, path=str(path)), str(tmp_path), shard_tokens=SHARD_TOKENS)
    with refused('data.carve_test=True has no effect on shards, .*; set it where prepare_data'):
        load_text(shards(tmp_path, carve_test=True))

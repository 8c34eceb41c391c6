"""The cache of a corpus, and the rows of every kind of model on every kind of data."""

import dataclasses
import hashlib
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data import write_shards
from qkattn.data.load import load
from qkattn.data.tasks.language import LanguageRows, MaskedRows
from qkattn.data.tasks.probe_tasks import CausalProbeRows, LabellingProbeRows
from qkattn.data.tasks.task_registry import TASKS, rows_of, task_of
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokens import PairDataset
from tests.data.datasets import read_rows
from tests.data.refusals import refused

CORPUS = """
from qkattn.data.corpora.corpus import Corpus
texts = {'train': [b'aab', b'c'], 'validation': [b'abcd'], 'test': [b'']}
def letters(config):
    def names(split):
        return [f'{split} {n}' for n in range(len(texts[split]))]
    return Corpus(
        name='letters', version='1', splits=tuple(texts), documents=lambda _: texts, names=names
    )
"""


@pytest.fixture
def letters(tmp_path, monkeypatch):
    """A corpus of three splits, of which no document is cut."""
    (tmp_path / 'letters.py').write_text(CORPUS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'letters', raising=False)
    return DataConfig(name='letters:letters', data_dir=str(tmp_path / 'data'))


def cache_of(config):
    (index,) = Path(config.data_dir).rglob('index.json')
    return index.parent


def test_the_cache_holds_a_shard_per_split_in_the_narrowest_dtype(letters, warnings):
    dataset = load(letters)
    assert {split: np.asarray(dataset.split(split)).tobytes() for split in dataset.splits} == {
        'train': b'aab\0c\0',
        'validation': b'abcd\0',
        'test': b'\0',
    }
    info = dataset.info('train')
    assert (info.num_documents, info.num_tokens, info.num_bytes) == (2, 6, 6)
    # Frequencies 2, 1, 1, 2 of 6.
    nats = 2 * (2 / 6) * math.log(6 / 2) + 2 * (1 / 6) * math.log(6)
    assert info.unigram_nats_per_token == pytest.approx(nats, rel=1e-12)
    # Of the ids as they are stored: results and checkpoints hold it.
    assert info.fingerprint == hashlib.sha256(b'aab\0c\0').hexdigest()
    assert dataset.document_names('validation') == ['validation 0'] and info.document_names is None
    directory = cache_of(letters)
    assert {path.name for path in directory.iterdir()} == {
        *('lock', 'index.json', 'train_000000.bin', 'validation_000000.bin', 'test_000000.bin')
    }
    assert directory.parts[-4:-2] == ('tokens', 'letters') and directory.name == 'bytes'
    # Opened again, also as shards, and beside files of another layout, it is not written again.
    for name in ('train.bin', 'train.json'):
        (directory / name).write_bytes(b'{}')
    stamps = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    shards = DataConfig(name='shards', path=str(directory))
    for config in (letters, shards):
        assert load(config).identity() == dataset.identity() and not warnings
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == stamps


@pytest.mark.parametrize(
    ('file', 'damage', 'message'),
    [
        ('train_000000.bin', lambda data: data[:1024] + b'b' + data[1025:], 'its sha256 is not'),
        ('validation_000000.bin', lambda data: data[:-1], 'it has 1,028 bytes, but its 5 tokens'),
        ('train_000000.bin', None, 'train_000000.bin is missing;'),
        ('index.json', lambda data: b'{', 'it is not JSON'),
        ('index.json', lambda data: b'[]', 'expected an object'),
        ('index.json', lambda data: b'[' * 200_000, 'it is nested too deeply'),
        ('index.json', lambda data: data.replace(b': 6,', b': "6",'), "field 'num_tokens' is '6'"),
        ('index.json', lambda data: data.replace(b'"1-', b'"2-'), "has version='2-"),
        ('index.json', lambda data: data.replace(b'"validation 0"', b''), 'contradict each other'),
    ],
)
def test_a_damaged_cache_is_named_and_written_again(letters, warnings, file, damage, message):
    identity = load(letters).identity()
    path = cache_of(letters) / file
    content = path.read_bytes()
    path.write_bytes(damage(content)) if damage else path.unlink()
    after = load(letters)
    assert after.identity() == identity and path.read_bytes() == content
    assert np.asarray(after.split('train')).tobytes() == b'aab\0c\0'
    (warning,) = warnings
    assert message in warning and '\n' not in warning and str(path.parent) in warning
    assert warning.endswith('; it is prepared again')


def test_an_interrupted_write_is_finished_by_the_next(letters, warnings, monkeypatch):
    def interrupted(*arguments):
        if len(list(Path(letters.data_dir).rglob('*.bin'))) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    real = write_shards.Shard.header
    with monkeypatch.context() as patched:
        patched.setattr(write_shards.Shard, 'header', interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(letters)
    directory = cache_of(letters)
    assert not json.loads((directory / 'index.json').read_text())['complete']
    (kept,) = directory.glob('*.bin')
    stamp = kept.stat().st_mtime_ns
    assert len(load(letters).split('validation')) == 5 and not warnings
    assert kept.stat().st_mtime_ns == stamp and not list(directory.glob('*.tmp'))
    # Shards of an index that says something else are not kept.
    index = directory / 'index.json'
    index.write_text(index.read_text().replace('"version": "1', '"version": "0'))
    load(letters)
    assert kept.stat().st_mtime_ns != stamp and len(warnings) == 1


LINES = {
    'en': [f'the {n} dog{"s" * (n > 1)} run home' for n in range(40)],
    'de': [f'der {n} Hund läuft nach Hause' for n in range(40)],
}
SPLITS = {'train': slice(0, 24), 'validation': slice(24, 32), 'test': slice(32, 40)}
DECODER, ENCODER, BOTH = 'decoder', 'encoder', 'encoder_decoder'
NEEDS = {DECODER: 'a causal probe', ENCODER: 'a labelling probe', BOTH: 'a translation set'}
FORMS = {
    'text': 'text in one language',
    'parallel': 'a translation set',
    'causal': 'a causal probe',
    'labelling': 'a labelling probe',
}
ROWS = {
    (DECODER, 'text'): LanguageRows,
    (DECODER, 'causal'): CausalProbeRows,
    (ENCODER, 'text'): MaskedRows,
    (ENCODER, 'labelling'): LabellingProbeRows,
    (BOTH, 'parallel'): TranslationRows,
}
LENGTHS = {'text': 40, 'parallel': 40, 'causal': 7, 'labelling': 4}


@pytest.fixture
def config_of(tmp_path):
    """config_of('encoder', 'text', **fields): own files and caches in two directories."""
    path = tmp_path / 'files'
    path.mkdir()
    for split, part in SPLITS.items():
        for language, lines in LINES.items():
            text = ''.join(f'{line}\n' for line in lines[part])
            (path / f'{split}.{language}').write_text(text, encoding='utf-8')
        (path / f'{split}.txt').write_text('\n'.join(LINES['en'][part]), encoding='utf-8')
    own = {
        'text': {'name': 'text', 'path': str(path)},
        'parallel': {'name': 'parallel', 'path': str(path), 'languages': 'en-de'},
        'causal': {'name': 'recall(pairs=2, keys=4, values=4)'},
        'labelling': {'name': 'successor(keys=4, payloads=2)'},
    }

    def make(kind: str, what: str, **fields) -> Config:
        model = {'kind': kind, 'context': LENGTHS[what], 'vocab_size': 300}
        data = own[what] | {'data_dir': str(tmp_path / 'cache')}
        for field, value in fields.items():
            (model if hasattr(ModelConfig, field) else data)[field] = value
        return Config(model=ModelConfig(**model), data=DataConfig(**data))

    return make


@pytest.mark.parametrize(('kind', 'what'), [*itertools.product(NEEDS, FORMS)])
def test_the_kind_of_model_says_what_the_rows_are(config_of, kind, what):
    config = config_of(kind, what, **({'source_context': 60} if kind == BOTH else {}))
    if (kind, what) not in ROWS:
        needs = f".*model.kind='{kind}' needs .*{NEEDS[kind]}"
        with refused(f"^data.name='{config.data.name[:5]}.*' is {FORMS[what]}, {needs}"):
            rows_of(config)
        return
    rows = rows_of(config)
    assert type(rows) is ROWS[kind, what] is task_of(config)
    assert type(rows) in TASKS.values()
    assert rows.splits == tuple(SPLITS)
    batch = read_rows(rows, 'validation', [0, 0])
    lengths = dict.fromkeys(('tokens_BT', 'targets_BT', 'loss_weights_BT'), LENGTHS[what])
    if kind == BOTH:
        lengths |= {'segments_BT': 40, 'source_BS': 60, 'source_segments_BS': 60}
    assert {name: array.shape[1] for name, array in batch.items()} == lengths
    stated = rows.array_shapes(config.model)
    assert {name: (a.shape[1], a.dtype) for name, a in batch.items()} == stated
    assert batch['loss_weights_BT'].any()


@pytest.mark.parametrize(
    ('kind', 'what', 'fields', 'says'),
    [
        (DECODER, 'causal', {'context': 8}, 'model.context=8 must equal .*, 7.$'),
        (ENCODER, 'labelling', {'context': 3}, 'model.context=3 must equal .*, 4.$'),
        (DECODER, 'causal', {'vocab_size': 7}, 'vocab_size=7 is too small .*recall.* 8 '),
        (ENCODER, 'text', {'vocab_size': 256}, 'vocab_size=256 is too small .* at least 257'),
        (DECODER, 'text', {'tokenizer': 'bpe', 'tokenizer_size': 5000}, 'tokenizer_size=5000'),
        (DECODER, 'causal', {'lowercase': True}, 'data.lowercase=True has no effect'),
        (ENCODER, 'labelling', {'path': 'x.txt'}, "data.path='x.txt' has no effect"),
        (DECODER, 'causal', {'tokenizer': 'bpe'}, "leave it 'bytes'"),
        (BOTH, 'parallel', {'source_context': 10, 'drop_long': True}, "'train' .* no sentence"),
        (DECODER, 'text', {'context': 300}, "context=300 is too long for split 'valid"),
        (ENCODER, 'text', {'context': 300}, "context=300 is too long for split 'valid"),
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_the_data_is_one_sentence(config_of, kind, what, fields, says):
    with refused(says):
        rows_of(config_of(kind, what, **fields))


def test_both_sides_of_a_translation_share_a_vocabulary_of_the_training_split(config_of):
    data = config_of(BOTH, 'parallel', tokenizer='characters').data
    pairs = load(data)
    assert isinstance(pairs, PairDataset)
    assert pairs.source.tokenizer.vocab_size == pairs.target.tokenizer.vocab_size
    decode = pairs.source.tokenizer.decode
    for language, sentences in zip(('en', 'de'), pairs.sentences('test'), strict=True):
        assert [decode(ids) for ids in sentences] == LINES[language][32:]
    # The other way round it is the same text, and another dataset.
    other = load(dataclasses.replace(data, languages='de-en'))
    assert [decode(ids) for ids in other.sentences('test')[0]] == LINES['de'][32:]
    assert other.identity() != pairs.identity()


def test_settings_reach_the_rows(config_of):
    text = config_of(DECODER, 'text').data
    assert load(dataclasses.replace(text, lowercase=True)).version.endswith('-lower')
    assert rows_of(config_of(DECODER, 'text', shift_windows=True)).shift
    masked = rows_of(config_of(ENCODER, 'text', mask_rate=0.5))
    assert read_rows(masked, 'train', np.arange(3))['loss_weights_BT'].sum() == 3 * 20

"""Caches of corpora, and the rows of every kind of model on every form of data."""

import concurrent.futures
import hashlib
import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.cache import data_root, read_or_prepare
from qkattn.data.load import load
from qkattn.data.tasks import repeats
from qkattn.data.tasks.language import DocumentRows, LanguageRows, MaskedRows
from qkattn.data.tasks.probe_tasks import CausalProbeRows, LabellingProbeRows
from qkattn.data.tasks.task_registry import rows_of, task_of
from qkattn.data.tasks.translation import TranslationRows
from tests.damages import PICKLE
from tests.data.datasets import read_rows, register
from tests.refusals import refused


def test_data_root_prefers_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'environment'))
    monkeypatch.setenv('HOME', str(tmp_path))
    assert data_root(tmp_path / 'argument') == tmp_path / 'argument'
    assert data_root() == data_root('') == tmp_path / 'environment'
    monkeypatch.delenv('QKATTN_DATA')
    assert data_root() == tmp_path / '.cache' / 'qkattn'
    with refused('data.data_dir=gs://bucket/x is a URL, but token files'):
        data_root('gs://bucket/x')


def test_of_several_that_race_one_prepares_at_a_time_until_one_succeeds(tmp_path):
    """Of three, the first fails, the second prepares the file, and the third finds it."""
    prepared = []

    def prepare():
        prepared.append(len(prepared))
        time.sleep(0.1)
        if prepared == [0]:
            raise KeyError
        (tmp_path / 'file').write_text('sound')

    def open_or_failed(_):
        try:
            return read_or_prepare(
                tmp_path / 'file', (tmp_path / 'file').read_text, prepare, root=tmp_path
            )
        except KeyError:
            return 'failed'

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert sorted(threads.map(open_or_failed, range(3))) == ['failed', 'sound', 'sound']
    assert prepared == [0, 1]


LINES = {
    'en': [f'the {n} dog{"s" * (n > 1)} run home' for n in range(40)],
    'de': [f'der {n} Hund läuft nach Hause' for n in range(40)],
}
SPLITS = {'train': slice(0, 24), 'validation': slice(24, 32), 'test': slice(32, 40)}
# Forms of data, each with a source of that form.
TEXT, PAIRS, CAUSAL, LABELS = FORMS = {
    'text in one language': {'name': 'text', 'path': '.'},
    'a translation set': {'name': 'parallel', 'path': '.', 'languages': 'en-de'},
    'a causal probe': {'name': 'recall(pairs=2, keys=4, values=4)'},
    'a labelling probe': {'name': 'successor(keys=4, payloads=2)'},
}
LENGTHS = {TEXT: 40, PAIRS: 40, CAUSAL: 7, LABELS: 4}
ROWS = {
    'decoder': {TEXT: LanguageRows, CAUSAL: CausalProbeRows},
    'encoder': {TEXT: MaskedRows, LABELS: LabellingProbeRows},
    'encoder_decoder': {PAIRS: TranslationRows},
}


@pytest.fixture
def letters(tmp_path, monkeypatch):
    texts = {'train': [b'aab', b'c'], 'validation': [b'abcd'], 'test': [b'']}
    register(monkeypatch, 'letters', texts)
    return DataConfig(name='letters', data_dir=str(tmp_path / 'data'))


def test_the_cache_holds_a_file_per_split_in_the_narrowest_dtype(letters, warnings):
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
    # The fingerprint is a digest of the stored ids, and is in results and checkpoints.
    assert info.fingerprint == hashlib.sha256(b'aab\0c\0').hexdigest()
    assert dataset.document_names('validation') == ['validation 0']
    assert info.document_names is None
    (index,) = Path(letters.data_dir).rglob('tokens.json')
    stamps = {path: path.stat().st_mtime_ns for path in index.parent.iterdir()}
    files = {f'{split}.bin' for split in dataset.splits}
    assert {path.name for path in stamps} == {'lock', 'tokens.json'} | files
    assert index.parent.parts[-4:] == ('tokens', 'letters', '1', 'bytes')
    # Opened again, also by path, it is not written again.
    for config in (letters, DataConfig(name='tokens', path=str(index.parent))):
        assert load(config).identity() == dataset.identity()
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert not warnings


def test_a_damaged_cache_is_written_again(letters, warnings):
    identity = load(letters).identity()
    (index,) = Path(letters.data_dir).rglob('tokens.json')
    # The file, how its bytes are changed, and what the warning says.
    for file, damage, message in (
        ('train.bin', lambda data: b'b' + data[1:], 'or does not hold'),
        ('validation.bin', lambda data: data[:-1], 'or does not hold'),
        ('tokens.json', lambda data: b'{', 'it is not JSON'),
        ('tokens.json', lambda data: PICKLE, 'tokens.json'),
    ):
        path = index.with_name(file)
        content = path.read_bytes()
        path.write_bytes(damage(content))
        after = load(letters)
        assert after.identity() == identity
        assert path.read_bytes() == content
        assert np.asarray(after.split('train')).tobytes() == b'aab\0c\0'
        assert message in warnings.pop()


def config_of(kind: str, form: str, **fields) -> Config:
    """A config of this kind of model on this form of data; fields are of the model or the data."""
    model = {'kind': kind, 'context': LENGTHS[form], 'vocab_size': 257}
    data = FORMS[form] | {'data_dir': 'cache'}
    for field, value in fields.items():
        (model if hasattr(ModelConfig, field) else data)[field] = value
    return Config(model=ModelConfig(**model), data=DataConfig(**data))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Text and parallel text in the working directory."""
    monkeypatch.chdir(tmp_path)
    for split, part in SPLITS.items():
        for language, lines in LINES.items():
            text = ''.join(f'{line}\n' for line in lines[part])
            Path(f'{split}.{language}').write_text(text, encoding='utf-8')
        Path(f'{split}.txt').write_text('\n'.join(LINES['en'][part]), encoding='utf-8')


def test_the_kind_of_model_and_the_form_of_data_decide_the_rows(files):
    for kind, form in itertools.product(ROWS, FORMS):
        config = config_of(kind, form)
        if form not in ROWS[kind]:
            needs = f".*model.kind='{kind}' needs .*{[*ROWS[kind]][-1]}"
            with refused(f"^data.name='{config.data.name[:5]}.*' is {form}, {needs}"):
                rows_of(config)
            continue

        # `ROWS` has the class of rows for each pair that is valid.
        rows = rows_of(config)
        assert type(rows) is ROWS[kind][form] is task_of(config)
        assert rows.splits == tuple(SPLITS)
        shapes = {n: (a.shape[1], a.dtype) for n, a in read_rows(rows, 'validation', [0]).items()}
        assert shapes == rows.array_shapes(config.model)


def test_a_setting_that_does_not_fit_the_data_is_one_sentence(files):
    # The kind of model, the data, a setting of either, and what the refusal says.
    for kind, form, fields, says in (
        ('decoder', CAUSAL, {'context': 8}, 'model.context=8 must equal .*, 7.$'),
        ('decoder', CAUSAL, {'vocab_size': 7}, 'vocab_size=7 must be at least 8 .*recall'),
        ('decoder', CAUSAL, {'lowercase': True}, 'data.lowercase=True has no effect'),
        ('decoder', CAUSAL, {'mask_rate': 0.5}, 'data.mask_rate=0.5 has no effect'),
        ('decoder', TEXT, {'drop_long': True}, 'data.drop_long=True has no effect on a decoder'),
        ('decoder', TEXT, {'tokenizer_size': 300}, "size=300 .*'bytes'; leave it at 8192"),
        ('encoder', TEXT, {'shift_windows': True}, 'data.shift_windows=True .* on an encoder'),
        ('encoder', TEXT, {'cross_documents': False}, 'cross_documents=False .* on an encoder;'),
        ('encoder_decoder', PAIRS, {'cross_documents': False}, '=False .* on an encoder-decoder'),
        ('decoder', CAUSAL, {'cross_documents': False}, 'data.cross_documents=False has no effect'),
        ('encoder_decoder', PAIRS, {'mask_rate': 0.5}, 'mask_rate=0.5 .* on an encoder-decoder'),
    ):
        with refused(says):
            rows_of(config_of(kind, form, **fields))


def test_text_is_read_by_document_where_attention_does_not_cross_documents(files):
    # None: the task follows from the data and the model.
    for task in (None, 'language'):
        config = config_of('decoder', TEXT, cross_documents=False, task=task)
        rows = rows_of(config)
        assert type(rows) is DocumentRows is task_of(config)

        # Rows say which tokens belong to which document.
        segments_BT = read_rows(rows, 'train', [0, 1])['segments_BT']
        assert rows.array_shapes(config.model)['segments_BT'] == (40, segments_BT.dtype)
        assert repeats.sequences(rows) is not None  # they are measured for induction


def test_both_sides_share_a_vocabulary_of_the_training_split(files):
    pairs = load(config_of('encoder_decoder', PAIRS, tokenizer='characters').data)
    assert pairs.source.tokenizer is pairs.target.tokenizer
    decode = pairs.source.tokenizer.decode
    for language, sentences in zip(('en', 'de'), pairs.sentences('test'), strict=True):
        assert [decode(ids) for ids in sentences] == LINES[language][32:]


def test_settings_reach_the_rows(files):
    assert rows_of(config_of('decoder', TEXT, shift_windows=True)).shift
    masked = rows_of(config_of('encoder', TEXT, mask_rate=0.5))
    assert read_rows(masked, 'train', np.arange(3))['loss_weights_BT'].sum() == 3 * 20

"""Caches of corpora, and the rows of every kind of model on every form of data."""

import concurrent.futures
import hashlib
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
    assert data_root() == tmp_path / 'environment'
    assert data_root('') == tmp_path / 'environment'

    monkeypatch.delenv('QKATTN_DATA')
    assert data_root() == tmp_path / '.cache' / 'qkattn'


def test_a_url_is_no_data_root():
    with refused('data.data_dir=gs://bucket/x is a URL, but token files'):
        data_root('gs://bucket/x')


def test_one_of_three_threads_prepares_at_a_time(tmp_path):
    """Only one thread prepares a missing file at a time.

    The first of three threads fails, the second prepares the file, and the third finds it.
    """
    path = tmp_path / 'file'
    num_calls = 0

    def prepare():
        """Writes the file, but fails when it is called for the first time."""
        nonlocal num_calls
        num_calls += 1
        time.sleep(0.1)  # time in which another thread could call `prepare`
        if num_calls == 1:
            raise KeyError
        path.write_text('sound')

    def read_in_thread(_):
        try:
            return read_or_prepare(path, path.read_text, prepare, root=tmp_path)
        except KeyError:
            return 'failed'

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        results = list(threads.map(read_in_thread, range(3)))

    assert sorted(results) == ['failed', 'sound', 'sound']
    # The third thread did not prepare the file again.
    assert num_calls == 2


# 40 lines, each with its translation.
LINES = {
    'en': [f'the {n} dog{"s" if n > 1 else ""} run home' for n in range(40)],
    'de': [f'der {n} Hund läuft nach Hause' for n in range(40)],
}
SPLITS = {'train': slice(0, 24), 'validation': slice(24, 32), 'test': slice(32, 40)}
# A source of data of each form.
FORMS = {
    'text in one language': {'name': 'text', 'path': '.'},
    'a translation set': {'name': 'parallel', 'path': '.', 'languages': 'en-de'},
    'a causal probe': {'name': 'recall(pairs=2, keys=4, values=4)'},
    'a labelling probe': {'name': 'successor(keys=4, payloads=2)'},
}
TEXT, PAIRS, CAUSAL, LABELS = FORMS
# The length of a row of each form.
LENGTHS = {TEXT: 40, PAIRS: 40, CAUSAL: 7, LABELS: 4}
# The class of the rows, by kind of model and form of data. Other pairs are refused.
ROWS = {
    'decoder': {TEXT: LanguageRows, CAUSAL: CausalProbeRows},
    'encoder': {TEXT: MaskedRows, LABELS: LabellingProbeRows},
    'encoder_decoder': {PAIRS: TranslationRows},
}


@pytest.fixture
def letters(tmp_path, monkeypatch):
    """Settings of a dataset of four short documents, in tokens of bytes."""
    texts = {'train': [b'aab', b'c'], 'validation': [b'abcd'], 'test': [b'']}
    register(monkeypatch, 'letters', texts)
    return DataConfig(name='letters', data_dir=str(tmp_path / 'data'))


def tokens_directory(config):
    """The directory of the cached tokens."""
    return Path(config.data_dir, 'tokens/letters/1/bytes')


def test_tokens_of_bytes_are_cached_in_a_byte_each(letters):
    dataset = load(letters)

    # Byte 0 separates the documents, which are 'aab' and 'c' in train.
    for split, content in (
        ('train', b'aab\0c\0'),
        ('validation', b'abcd\0'),
        ('test', b'\0'),
    ):
        assert np.asarray(dataset.split(split)).tobytes() == content
        assert (tokens_directory(letters) / f'{split}.bin').read_bytes() == content


def test_a_dataset_knows_the_counts_of_its_splits(letters):
    """`letters` has the train documents 'aab' and 'c'. A byte 0 follows each document."""
    dataset = load(letters)
    train_ids = b'aab\0c\0'

    info = dataset.info('train')
    assert info.num_documents == 2
    assert info.num_tokens == len(train_ids)
    assert info.num_bytes == len(train_ids)
    assert info.fingerprint == hashlib.sha256(train_ids).hexdigest()

    # The frequencies are 2/6 for 'a' and for byte 0, and 1/6 for 'b' and for 'c'.
    entropy = 2 * (2 / 6) * math.log(6 / 2) + 2 * (1 / 6) * math.log(6)
    assert info.unigram_nats_per_token == pytest.approx(entropy, rel=1e-12)

    # The names of train documents are not stored.
    assert info.document_names is None
    assert dataset.document_names('validation') == ['validation 0']


def test_cached_tokens_are_not_written_again(letters, cache_warnings):
    """The first `load` writes the tokens of a dataset into a cache. Later calls read the cache."""
    identity = load(letters).identity()
    directory = tokens_directory(letters)
    write_times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert write_times.keys() == {'lock', 'tokens.json', 'train.bin', 'validation.bin', 'test.bin'}

    # Settings may name the dataset, or the directory of its tokens.
    by_path = DataConfig(name='tokens', path=str(directory))
    assert load(letters).identity() == identity
    assert load(by_path).identity() == identity

    for name, write_time in write_times.items():
        assert (directory / name).stat().st_mtime_ns == write_time
    assert not cache_warnings


@pytest.mark.parametrize(
    ('file', 'damage', 'message'),
    [
        pytest.param(
            'train.bin', lambda content: b'b' + content[1:], 'or does not hold', id='other tokens'
        ),
        pytest.param(
            'validation.bin', lambda content: content[:-1], 'or does not hold', id='cut tokens'
        ),
        pytest.param('tokens.json', lambda content: b'{', 'it is not JSON', id='cut index'),
        pytest.param('tokens.json', lambda content: PICKLE, 'tokens.json', id='a pickle'),
    ],
)
def test_a_damaged_cache_is_written_again(letters, cache_warnings, file, damage, message):
    """The first `load` writes the tokens of a dataset into a cache.

    If a file of the cache is damaged, a later `load` replaces it, with a warning.
    """
    identity = load(letters).identity()
    path = tokens_directory(letters) / file
    content = path.read_bytes()

    path.write_bytes(damage(content))
    dataset = load(letters)

    assert dataset.identity() == identity
    assert path.read_bytes() == content
    # The documents 'aab' and 'c', each with a byte 0 after it.
    assert np.asarray(dataset.split('train')).tobytes() == b'aab\0c\0'
    assert message in cache_warnings[-1]


def config_of(kind: str, form: str, **fields) -> Config:
    """A config of a kind of model, such as 'decoder', on a form of data, such as TEXT.

    `fields` are settings of the model or of the data, as in shift_windows=True. By default, rows
    have LENGTHS[form] tokens, and the model has 257 ids.
    """
    model = {'kind': kind, 'context': LENGTHS[form], 'vocab_size': 257}
    data = FORMS[form] | {'data_dir': 'cache'}
    for field, value in fields.items():
        if hasattr(ModelConfig, field):
            model[field] = value
        else:
            data[field] = value
    return Config(model=ModelConfig(**model), data=DataConfig(**data))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes LINES into the working directory, as text and as parallel text."""
    monkeypatch.chdir(tmp_path)
    for split, lines_of_split in SPLITS.items():
        for language, lines in LINES.items():
            text = ''.join(f'{line}\n' for line in lines[lines_of_split])
            Path(f'{split}.{language}').write_text(text, encoding='utf-8')
        english = '\n'.join(LINES['en'][lines_of_split])
        Path(f'{split}.txt').write_text(english, encoding='utf-8')


VALID_PAIRS = [(kind, form) for kind in ROWS for form in ROWS[kind]]
INVALID_PAIRS = [(kind, form) for kind in ROWS for form in FORMS if form not in ROWS[kind]]


@pytest.mark.parametrize(('kind', 'form'), VALID_PAIRS)
def test_the_kind_of_model_and_the_form_of_data_decide_the_rows(files, kind, form):
    """A decoder on text trains on LanguageRows, for example, and an encoder on MaskedRows.

    ROWS has the class for each kind of model and form of data.
    """
    config = config_of(kind, form)
    row_class = ROWS[kind][form]
    assert task_of(config) is row_class

    rows = rows_of(config)
    assert type(rows) is row_class
    assert rows.splits == ('train', 'validation', 'test')

    # `array_shapes` has (length, dtype) of one row of each array.
    batch = read_rows(rows, 'validation', [0])
    shapes = {}
    for name, array_BT in batch.items():
        _, length = array_BT.shape
        shapes[name] = (length, array_BT.dtype)
    assert shapes == rows.array_shapes(config.model)


@pytest.mark.parametrize(('kind', 'form'), INVALID_PAIRS)
def test_data_that_the_kind_of_model_does_not_read_are_refused(files, kind, form):
    config = config_of(kind, form)
    name = config.data.name.partition('(')[0]
    last_valid_form = list(ROWS[kind])[-1]
    needed = f"model.kind='{kind}' needs .*{last_valid_form}"
    with refused(f"^data.name='{name}.*' is {form}, .*{needed}"):
        rows_of(config)


@pytest.mark.parametrize(
    ('kind', 'form', 'setting', 'message'),
    [
        ('decoder', CAUSAL, {'context': 8}, 'model.context=8 must equal .*, 7.$'),
        ('decoder', CAUSAL, {'vocab_size': 7}, 'vocab_size=7 must be at least 8 .*recall'),
        ('decoder', CAUSAL, {'lowercase': True}, 'data.lowercase=True has no effect'),
        ('decoder', CAUSAL, {'mask_rate': 0.5}, 'data.mask_rate=0.5 has no effect'),
        ('decoder', CAUSAL, {'cross_documents': False}, 'data.cross_documents=False has no effect'),
        ('decoder', TEXT, {'drop_long': True}, 'data.drop_long=True has no effect on a decoder'),
        ('decoder', TEXT, {'tokenizer_size': 300}, "size=300 .*'bytes'; leave it at 8192"),
        ('encoder', TEXT, {'shift_windows': True}, 'data.shift_windows=True .* on an encoder'),
        ('encoder', TEXT, {'cross_documents': False}, 'cross_documents=False .* on an encoder;'),
        (
            'encoder_decoder',
            PAIRS,
            {'cross_documents': False},
            'cross_documents=False .* on an encoder-decoder',
        ),
        ('encoder_decoder', PAIRS, {'mask_rate': 0.5}, 'mask_rate=0.5 .* on an encoder-decoder'),
    ],
)
def test_a_setting_that_does_not_fit_the_data_is_refused(files, kind, form, setting, message):
    with refused(message):
        rows_of(config_of(kind, form, **setting))


@pytest.mark.parametrize('task', [None, 'language'], ids=['task of the model', 'named task'])
def test_text_is_read_by_document_if_attention_does_not_cross_documents(files, task):
    # Without a named task, a decoder on text has the task 'language'.
    config = config_of('decoder', TEXT, cross_documents=False, task=task)

    # With cross_documents=True, the class would be LanguageRows.
    assert task_of(config) is DocumentRows
    rows = rows_of(config)
    assert type(rows) is DocumentRows

    # The segment of a token is the number of its document in the row.
    batch = read_rows(rows, 'train', [0, 1])
    segments_BT = batch['segments_BT']
    context = config.model.context
    assert segments_BT.shape == (2, context)

    # `array_shapes` has (length, dtype) of one row of each array.
    stated_shapes = rows.array_shapes(config.model)
    assert stated_shapes['segments_BT'] == (context, segments_BT.dtype)

    # Induction is measured on these rows. On other rows, `sequences` returns None.
    assert repeats.sequences(rows) is not None


def test_both_sides_of_a_translation_share_a_vocabulary(files):
    pairs = load(config_of('encoder_decoder', PAIRS, tokenizer='characters').data)
    tokenizer = pairs.source.tokenizer
    assert pairs.target.tokenizer is tokenizer

    # The last 8 of 40 lines are the test split.
    english, german = pairs.sentences('test')
    assert [tokenizer.decode(ids) for ids in english] == LINES['en'][32:]
    assert [tokenizer.decode(ids) for ids in german] == LINES['de'][32:]


def test_shift_windows_reaches_the_rows(files):
    assert rows_of(config_of('decoder', TEXT, shift_windows=True)).shift


def test_mask_rate_reaches_the_rows(files):
    rows = rows_of(config_of('encoder', TEXT, mask_rate=0.5))
    batch = read_rows(rows, 'train', [0, 1, 2])
    # In each of 3 rows, 0.5 * 40 = 20 tokens are masked.
    assert batch['loss_weights_BT'].sum() == 3 * 20

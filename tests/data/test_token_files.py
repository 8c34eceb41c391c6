"""Tokens in memory, and on disk: what is written, after stops and damages too, and read."""

import dataclasses
import itertools
import json
import os
import re
import runpy
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from qkattn.config import Config, DataConfig
from qkattn.convert import loading
from qkattn.data import encoding, token_files, tokens
from qkattn.data.load import load_text, prepare, tokenizer_of
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.subwords import FileTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import PairDataset, TokenDataset
from qkattn.train.loop import train
from tests.damages import PICKLE
from tests.data.datasets import contents, numbers, register, token_dataset, write_texts
from tests.processes import ROOT
from tests.refusals import refused


def test_windows_are_consecutive_tokens():
    windows_BT = numbers(train=100).windows('train', np.array([0, 83]), 17)
    assert windows_BT.dtype == np.int32
    assert windows_BT[:, 0].tolist() == [0, 83]
    assert (np.diff(windows_BT) == 1).all()


def test_blocks_of_ids_have_at_most_the_block_size(monkeypatch):
    monkeypatch.setattr(tokens, 'BLOCK', 12)
    assert [len(block) for block in tokens.blocks(np.arange(30))] == [12, 12, 6]


def test_a_dataset_has_the_identity_of_its_parts(monkeypatch):
    monkeypatch.setattr(tokens, 'BLOCK', 3)
    # Documents 'aab' and 'c', each with an end; files are read in blocks of 3 tokens.
    text = {'train': np.frombuffer(b'aab\0c\0', np.uint8)}
    source, target = (token_dataset(name, ByteTokenizer(), text) for name in 'ab')
    assert source.document_ends('train').tolist() == [4, 6]
    assert source.document_names('train') == ['0', '1']
    assert source.bytes_per_token('train') == 2
    with refused("split='val' is not in dataset 'a'; valid: 'train'"):
        source.split('val')

    # A dataset of files from different sources has the fingerprint of each.
    infos = {'train': source.info('train'), 'test': target.info('train')}
    carved = TokenDataset('a', '1', ByteTokenizer(), infos, {}, {'test': 0.1}).identity()
    fingerprints = carved.pop('fingerprints')
    assert list(fingerprints.items()) == [('test', 'btrain'), ('train', 'atrain')]
    assert carved == {'name': 'a', 'version': '1', 'tokenizer': 'bytes', 'carved': {'test': 0.1}}
    assert 'carved' not in source.identity()

    # A dataset of pairs has the identities of its two sides.
    pairs = PairDataset(source, target)
    assert pairs.identity() == {'source': source.identity(), 'target': target.identity()}
    assert [ids.tobytes() for ids in pairs.sentences('train')[0]] == [b'aab', b'c']


def config_of_tokens(path, **fields):
    return DataConfig(name='tokens', path=str(path), **fields)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """A folder of texts as a dataset."""
    root = tmp_path_factory.mktemp('text')
    path = str(write_texts(root / 'files'))
    return DataConfig(name='text', path=path, data_dir=str(root / 'cache'))


@pytest.fixture(scope='module')
def prepared(text, tmp_path_factory):
    """The directory of the tokens that are prepared of `text`."""
    out = tmp_path_factory.mktemp('tokens')
    prepare(text, str(out))
    return out


def test_prepared_tokens_are_the_dataset_that_they_were_made_of(text, prepared):
    before = load_text(text)
    after = load_text(config_of_tokens(prepared))
    assert after.splits == before.splits
    assert after.identity() == before.identity()
    for split in before.splits:
        assert np.array_equal(after.split(split), before.split(split))
        assert after.info(split) == before.info(split)
    ids = np.fromfile(prepared / 'test.bin', np.uint8)  # without a header
    assert np.array_equal(ids, before.split('test'))


def test_preparing_that_is_stopped_at_a_write_can_begin_again(
    text, prepared, tmp_path, monkeypatch
):
    replace = os.replace

    def replace_until_stopped(*paths):
        if next(counter) == num_writes:
            raise KeyboardInterrupt
        return replace(*paths)

    for num_writes in (0, 2, 3):  # of three splits and the index
        out = tmp_path / str(num_writes)
        counter = itertools.count()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, 'replace', replace_until_stopped)
            prepare(text, str(out))
        with refused('tokens.json cannot be read'):
            load_text(config_of_tokens(out))
        prepare(text, str(out))
        assert contents(out) == contents(prepared)


def test_a_finished_directory_is_left_as_it_is(text, prepared, monkeypatch):
    identity = load_text(text).identity()
    monkeypatch.setattr(token_files, 'write_atomic', None)
    assert prepare(text, str(prepared)).identity() == identity


def test_a_damaged_directory_is_made_again(text, prepared, tmp_path, caplog):
    copy = shutil.copytree(prepared, tmp_path / 'copy')
    path = copy / 'train.bin'
    path.write_bytes(path.read_bytes()[:-1] + b'x')
    assert load_text(config_of_tokens(copy))  # which reads no tokens
    prepare(text, str(copy))
    assert contents(copy) == contents(prepared)
    assert 'train.bin is missing, or does not hold what tokens.json describes; prep' in caplog.text


def unreadable_texts():
    yield b'a'
    raise OSError('lost')


@pytest.mark.parametrize(
    ('fields', 'texts', 'message'),
    [
        ({'tokenizer': 'characters'}, None, 'holds tokens of text .* bytes; give another'),
        ({'name': 'tokens'}, None, "data.name='tokens' is already tokenized; name the text"),
        ({'name': 'cldr', 'languages': 'en-de'}, None, 'is a translation set; prepare_data'),
        ({}, [b'a', b'b\0'], "document 2 of split 'train' of x cannot be encoded: "),
        ({}, unreadable_texts(), "split 'train' of x cannot be read .OSError: lost.; restore"),
        ({}, [], "split 'train' of x has no document; it must hold text"),
        ({'tokenizer': 'bpe', 'tokenizer_size': 257}, [b'\xe4'] * 40, 'cannot be tokenized: '),
    ],
)
def test_data_that_cannot_be_prepared_are_refused(
    text, prepared, tmp_path, monkeypatch, fields, texts, message
):
    data = dataclasses.replace(text, **fields)
    # The directory has tokens already, or is empty.
    out = prepared
    if texts is not None:
        register(monkeypatch, 'x', {'train': texts, 'validation': [b'a']})
        data = dataclasses.replace(data, name='x', path=None)
        out = tmp_path
    with refused(message):
        prepare(data, str(out))


@pytest.mark.parametrize('tokenizer', ['bpe', 'words.json', 'nibbles:Nibbles'])
def test_the_number_of_workers_does_not_change_the_tokens(
    text, tmp_path, outside, monkeypatch, tokenizer
):
    monkeypatch.setattr(encoding, 'BATCH_DOCUMENTS', 7)  # of 60 in train
    monkeypatch.chdir(tmp_path)
    write_vocabulary(tmp_path / 'words.json')
    data = dataclasses.replace(text, tokenizer=tokenizer)
    if tokenizer == 'bpe':
        data = dataclasses.replace(data, tokenizer_size=280)
    for workers in (1, 2):
        prepare(data, f'{workers}', workers)
    assert contents(tmp_path / '1') == contents(tmp_path / '2')


def test_a_document_that_a_worker_cannot_encode_is_named(text, tmp_path, monkeypatch):
    register(monkeypatch, 'x', {'train': [b'a'] * 9 + [b'\0'] + [b'a'] * 9, 'validation': [b'a']})
    with refused("document 10 of split 'train' of x cannot be encoded: text holds byte 0"):
        prepare(dataclasses.replace(text, name='x', path=None), str(tmp_path / 'out'), 2)


def test_a_worker_that_is_killed_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, '_batches', lambda texts: [9])
    monkeypatch.setattr(encoding, '_encode_batch', os._exit)
    with refused('a process that tokenizes was killed, .*; give fewer --workers'):
        prepare(text, str(tmp_path / 'out'), 2)


def test_progress_says_how_many_tokens_a_second(text, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(token_files, 'SECONDS_PER_LOG', 0)
    caplog.set_level('INFO')
    prepare(text, str(tmp_path / 'out'))
    assert re.search(r'train: [\d,]+ tokens, [\d,]+ tokens/s', caplog.text)


@pytest.mark.parametrize('name', ['train.bin', 'tokenizer.json'])
def test_files_of_the_user_are_not_replaced(text, tmp_path, name):
    (tmp_path / name).write_text('{}')
    with refused('holds files that are no tokens; give another directory'):
        prepare(dataclasses.replace(text, tokenizer='characters'), str(tmp_path))
    assert (tmp_path / name).read_text() == '{}'


@pytest.mark.parametrize(
    ('ids', 'message'),
    [
        ([300], 'it has ids outside of 0 .. 255'),
        ([-1], 'it has ids outside of 0 .. 255'),
        ([5, 0, 5], 'its ids hold the separator, 0'),
    ],
)
def test_a_tokenizer_that_gives_wrong_ids_is_refused(text, tmp_path, monkeypatch, ids, message):
    monkeypatch.setattr(ByteTokenizer, 'encode', lambda *_: np.array(ids))
    with refused(f'cannot be encoded: .*{message}'):
        load_text(dataclasses.replace(text, data_dir=str(tmp_path)))


def test_the_vocabulary_comes_with_the_tokens(text, tmp_path):
    data = dataclasses.replace(text, tokenizer='characters')
    prepare(data, str(tmp_path))
    assert tokenizer_of(config_of_tokens(tmp_path)).name == tokenizer_of(data).name

    # Another vocabulary than that of the tokens, and one that was cut.
    path = tmp_path / 'tokenizer.json'
    content = path.read_text()
    for damaged, message in (
        (content.replace(': "', ': "!'), 'was tokenized with characters-.* is characters-'),
        (content[:-9], 'tokenizer.json cannot be read .*; copy it or prepare_data again'),
    ):
        path.write_text(damaged)
        with refused(message):
            load_text(config_of_tokens(tmp_path))


def with_fields(**fields):
    """A damage of tokens.json that sets these fields."""
    return lambda text: json.dumps(json.loads(text) | fields)


def test_a_damaged_or_missing_file_is_named(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / 'copy')
    # The file, how its text is changed (None: it is removed), and what the refusal says.
    for file, damage, message in (
        ('train.bin', None, 'train.bin is missing, or does not .*; copy it or prepare_data again'),
        ('test.bin', lambda text: text[:-1], 'test.bin is missing, or does not'),
        ('tokens.json', None, 'tokens.json cannot be read .No such file'),
        ('tokens.json', lambda text: PICKLE.decode('latin-1'), 'tokens.json'),
        ('tokens.json', with_fields(dtype='int64'), "field 'dtype' is 'int64', expected"),
        ('tokens.json', with_fields(tokenizer_name='x'), 'was tokenized with x, but .* bytes'),
        ('tokens.json', lambda t: t.replace('"num_tokens": ', '"num_tokens": 1'), 'is missing, or'),
    ):
        content = (copy / file).read_text('latin-1')
        (copy / file).unlink()
        if damage:
            (copy / file).write_text(damage(content), 'latin-1')
        with refused(message):
            load_text(config_of_tokens(copy))
        (copy / file).write_text(content, 'latin-1')


def test_settings_that_do_not_fit_are_refused(prepared):
    for fields, message in (
        ({'lowercase': True}, 'data.lowercase=True has no effect on tokens'),
        ({'tokenizer': 'bpe'}, "data.tokenizer='bpe' has no effect .* made with bytes .*; set it"),
        ({'path': 'gs://b/x'}, 'data.path=gs://b/x is a URL, but .* local or mounted directory'),
    ):
        with refused(message):
            rows_of(Config(data=dataclasses.replace(config_of_tokens(prepared), **fields)))


def test_a_test_split_is_carved_before_tokens_are_made(text, prepared, tmp_path):
    assert load_text(config_of_tokens(prepared, carve_test=True)).splits == (
        'train',
        'validation',
        'test',
    )
    path = shutil.copytree(text.path, tmp_path / 'files')
    shutil.rmtree(path / 'test')
    prepare(dataclasses.replace(text, path=str(path)), str(tmp_path / 'tokens'))
    with refused('data.carve_test=True has no effect on tokens, .*; set it when prepare_data'):
        load_text(config_of_tokens(tmp_path / 'tokens', carve_test=True))


# A module that shows that it was imported.
EVIL = """
import pathlib
pathlib.Path('imported').touch()
class Cls:
    name, vocab_size, separator = 'evil', 4, 3
    encode = decode = num_bytes = None
"""


def with_fields_of_train(text, **fields):
    """The index with other counts of its train split."""
    index = json.loads(text)
    index['splits']['train'] |= fields
    return json.dumps(index)


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (
            with_fields(tokenizer='evil:Cls'),
            "tokens.json names the tokenizer 'evil:Cls', which is code, and data.tokenizer='bytes' "
            'does not; set data.tokenizer=evil:Cls to import it',
        ),
        (with_fields(tokenizer='evil:Cls(a=1)'), 'set data.tokenizer=evil:Cls.a=1. to import it'),
        (
            with_fields(tokenizer='/etc/x.json'),
            'tokenizer.json, the vocabulary of ./etc/x.json., is miss',
        ),
        (with_fields(tokenizer='characters'), "the vocabulary of 'characters', is missing"),
        (with_fields(tokenizer='words'), "the vocabulary of 'words', is missing"),
        (with_fields(splits={'../x': {}}), "split '../x' is none of train, validation, test"),
        (with_fields(splits={'test': {}}), 'it has no train split'),
        (
            lambda t: with_fields_of_train(t, num_documents=10**15),
            'train has 1000000000000000 documents',
        ),
        (lambda t: with_fields_of_train(t, num_documents=0), 'train has 0 documents in'),
        (lambda t: with_fields_of_train(t, num_bytes=0), 'train has 0 bytes'),
        (
            lambda t: with_fields_of_train(t, document_names=['a']),
            'train has 1 document_names of 60',
        ),
        (
            lambda t: with_fields_of_train(t, num_tokens=10**15),
            'train.bin is missing, or does not hold',
        ),
    ],
)
def test_a_wrong_index_is_refused_before_anything_it_names_is_used(
    prepared, tmp_path, monkeypatch, damage, message
):
    copy = shutil.copytree(prepared, tmp_path / 'copy')
    # Importing evil.py would write the file `imported`.
    (tmp_path / 'evil.py').write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    index = copy / 'tokens.json'
    index.write_text(damage(index.read_text()))
    with refused(message):
        load_text(config_of_tokens(copy)).document_names('train')
    assert not (tmp_path / 'imported').exists()


def test_a_class_from_outside_is_imported_where_the_config_names_it_too(text, tmp_path, outside):
    data = dataclasses.replace(text, tokenizer='nibbles:Nibbles')
    # Tokens of a tokenizer that is a class of the user: the files alone do not import it.
    prepare(data, str(tmp_path / 'tokens'))
    for requested in ('bytes', 'nibbles:Other', 'characters'):
        with refused('set data.tokenizer=nibbles:Nibbles to import it'):
            load_text(config_of_tokens(tmp_path / 'tokens', tokenizer=requested))
    opened = load_text(config_of_tokens(tmp_path / 'tokens', tokenizer='nibbles:Nibbles'))
    assert opened.identity() == load_text(data).identity()


def test_ids_of_a_vocabulary_file_are_bounded_before_tables_of_them_are_made(text, tmp_path):
    file = tmp_path / 'huge.json'
    model = {'type': 'WordLevel', 'vocab': {'a': 0, 'b': 4_000_000_000}, 'unk_token': 'a'}
    file.write_text(json.dumps({'version': '1.0', 'added_tokens': [], 'model': model}))
    with refused('huge.json. cannot be read .*it has the id 4000000000; ids must be below 1048576'):
        load_text(dataclasses.replace(text, tokenizer=str(file)))


def write_vocabulary(path):
    """A tokenizer.json of 401 ids, the last of which ends texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = {'[UNK]': 0} | {f'word{number}': number for number in range(1, 400)}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token='[UNK]'))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(['<|endoftext|>'])
    library.save(str(path))
    return path


def test_tokens_with_an_added_separator_keep_it(text, tmp_path, monkeypatch):
    """Earlier versions added an id to a vocabulary that has one that ends texts.

    Such tokens and those of today are both opened with the separator that they were written with,
    and preparing them again leaves them as they are.
    """
    data = dataclasses.replace(text, tokenizer=str(write_vocabulary(tmp_path / 'v/words.json')))
    prepare(data, str(tmp_path / 'ends'))
    with monkeypatch.context() as patch:
        patch.setattr(FileTokenizer, '_end_of_text', lambda self: None)
        prepare(data, str(tmp_path / 'added'))
    separators = {'ends': (400, 401), 'added': (401, 402)}
    names = set()
    for name, (separator, vocab_size) in separators.items():
        before = contents(tmp_path / name)
        for requested in ('bytes', data.tokenizer):
            dataset = load_text(config_of_tokens(tmp_path / name, tokenizer=requested))
            assert (dataset.tokenizer.separator, dataset.vocab_size) == (separator, vocab_size)
            assert len(dataset.document_ends('train')) == 60
        assert prepare(data, str(tmp_path / name)).identity() == dataset.identity()
        assert contents(tmp_path / name) == before
        names.add(dataset.tokenizer.name)
    assert len(names) == 2


@pytest.mark.slow
def test_a_run_with_an_added_separator_resumes_with_it(tiny, text, tmp_path, monkeypatch):
    fields = {'tokenizer': str(write_vocabulary(tmp_path / 'v/words.json')), 'eval_sequences': None}
    data = vars(dataclasses.replace(text, **fields))
    config = tiny(model={'num_layers': 1, 'vocab_size': 402}, data=data, trials={'seeds': (0,)})
    with monkeypatch.context() as patch:
        patch.setattr(FileTokenizer, '_end_of_text', lambda self: None)
        (first,) = train(config, tmp_path / 'run')
    (tmp_path / 'run/result.json').unlink()
    (again,) = train(config, tmp_path / 'run')
    assert again['data'] == first['data']
    assert again['test_loss'] == first['test_loss']
    source = loading.load(tmp_path / 'run')
    assert loading.tokenizer_for(source, '', '--prompt_tokens').separator == 401
    # A run that begins today has the separator of the file, 400, so that 401 ids suffice.
    model = dataclasses.replace(config.model, vocab_size=401)
    assert rows_of(dataclasses.replace(config, model=model)).vocab_size == 401


def test_the_writer_that_the_page_shows_writes_tokens(tmp_path, monkeypatch):
    # The program that docs/data.md shows is run as it is.
    page = (ROOT / 'docs/data.md').read_text('utf-8')
    (program,) = re.findall(r'```python\n(import hashlib.*?)```', page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'tokens').mkdir()
    (tmp_path / 'writer.py').write_text(program)
    runpy.run_path('writer.py')
    dataset = load_text(config_of_tokens(tmp_path / 'tokens'))
    assert bytes(dataset.split('train')) == b'one text\0another\0'

    # Its files pass the comparison with their fingerprints.
    index = token_files.read_index(tmp_path / 'tokens')
    assert token_files.open_index(
        tmp_path / 'tokens', index, dataset.tokenizer, compare=True
    ).splits == ('train', 'validation')
    expected = tokens.entropy(np.bincount(dataset.split('train')))
    assert dataset.unigram_nats('train') == pytest.approx(expected)

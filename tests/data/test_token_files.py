"""Tokens in memory, and on disk: what is written, after stops and damages too, and read."""

import contextlib
import dataclasses
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
    # A token is its position.
    windows_BT = numbers(train=100).windows('train', np.array([0, 83]), 17)
    assert windows_BT.dtype == np.int32
    assert windows_BT.tolist() == [list(range(0, 17)), list(range(83, 100))]


def test_blocks_of_ids_have_at_most_the_block_size(monkeypatch):
    monkeypatch.setattr(tokens, 'BLOCK', 12)
    assert [len(block) for block in tokens.blocks(np.arange(30))] == [12, 12, 6]


@pytest.fixture
def aab_and_c():
    """A dataset 'a' of the documents 'aab' and 'c', in bytes, each with a separator after it."""
    ids = np.frombuffer(b'aab\0c\0', np.uint8)
    return token_dataset('a', ByteTokenizer(), {'train': ids})


def test_a_dataset_describes_its_documents(aab_and_c, monkeypatch):
    monkeypatch.setattr(tokens, 'BLOCK', 3)  # the split is read in two blocks

    assert aab_and_c.document_ends('train').tolist() == [4, 6]
    assert aab_and_c.document_names('train') == ['0', '1']
    assert aab_and_c.bytes_per_token('train') == 2
    with refused("split='val' is not in dataset 'a'; valid: 'train'"):
        aab_and_c.split('val')


def test_a_dataset_has_the_fingerprints_of_its_splits(aab_and_c):
    """Results record the identity of a dataset, which has a fingerprint of each split.

    A fingerprint is a hash of a split's tokens. This test uses short texts instead.
    """
    train_info = dataclasses.replace(aab_and_c.info('train'), fingerprint='of train')
    test_info = dataclasses.replace(train_info, fingerprint='of test')
    infos = {'train': train_info, 'test': test_info}
    dataset = TokenDataset('a', '1', ByteTokenizer(), infos, tokens={}, carved={'test': 0.1})

    identity = dataset.identity()

    assert identity == {
        'name': 'a',
        'version': '1',
        'tokenizer': 'bytes',
        'fingerprints': {'test': 'of test', 'train': 'of train'},
        'carved': {'test': 0.1},
    }
    assert list(identity['fingerprints']) == ['test', 'train']  # sorted

    # This dataset has no carved split.
    assert 'carved' not in aab_and_c.identity()


def test_a_dataset_of_pairs_has_two_sides(aab_and_c):
    target = token_dataset('b', ByteTokenizer(), {'train': aab_and_c.split('train')})
    pairs = PairDataset(aab_and_c, target)

    assert pairs.identity() == {'source': aab_and_c.identity(), 'target': target.identity()}
    sources, _ = pairs.sentences('train')
    assert [ids.tobytes() for ids in sources] == [b'aab', b'c']


def config_of_tokens(path, **fields):
    """Settings that read a directory of tokens."""
    return DataConfig(name='tokens', path=str(path), **fields)


@pytest.fixture(scope='module')
def text_config(tmp_path_factory):
    """Settings of a folder of texts, with 60 documents in train."""
    root = tmp_path_factory.mktemp('text')
    path = str(write_texts(root / 'files'))
    return DataConfig(name='text', path=path, data_dir=str(root / 'cache'))


@pytest.fixture(scope='module')
def prepared_dir(text_config, tmp_path_factory):
    """The directory of the tokens that are prepared from `text_config`, in bytes."""
    directory = tmp_path_factory.mktemp('tokens')
    prepare(text_config, str(directory))
    return directory


def test_prepared_tokens_are_the_dataset_that_they_were_made_of(text_config, prepared_dir):
    """Reading the directory that `prepare` wrote gives the same dataset as reading the texts.

    The texts are tokenized in bytes, so an id takes one byte.
    """
    from_texts = load_text(text_config)
    from_files = load_text(config_of_tokens(prepared_dir))

    assert from_files.splits == from_texts.splits
    assert from_files.identity() == from_texts.identity()
    for split in from_texts.splits:
        assert np.array_equal(from_files.split(split), from_texts.split(split))
        assert from_files.info(split) == from_texts.info(split)

    # The file holds only the ids.
    ids_of_file = np.fromfile(prepared_dir / 'test.bin', np.uint8)
    assert np.array_equal(ids_of_file, from_texts.split('test'))


@pytest.mark.parametrize('num_files', [0, 2, 3])
def test_preparing_that_was_stopped_can_begin_again(
    text_config, prepared_dir, tmp_path, monkeypatch, num_files
):
    """`prepare` writes a file for each of three splits, and then the index tokens.json.

    Here it stops after `num_files` files, and the directory without an index is refused. After a
    second `prepare`, the directory has the same files as `prepared_dir`.
    """
    replace = os.replace
    num_written = 0

    def replace_or_stop(*paths):
        """Replaces `os.replace`, which finishes each file. It stops after `num_files` files."""
        nonlocal num_written
        if num_written == num_files:
            raise KeyboardInterrupt
        num_written += 1
        return replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', replace_or_stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(text_config, str(tmp_path))
    with refused('tokens.json cannot be read'):
        load_text(config_of_tokens(tmp_path))

    prepare(text_config, str(tmp_path))
    assert contents(tmp_path) == contents(prepared_dir)


def test_a_vocabulary_that_a_stopped_preparation_left_is_not_used(
    text_config, tmp_path, monkeypatch
):
    """`prepare` writes the vocabulary first. Here it stops before it writes a split."""

    def stop(*_):
        raise KeyboardInterrupt

    data = dataclasses.replace(text_config, tokenizer='characters')
    with monkeypatch.context() as patch:
        patch.setattr(token_files, '_write_split', stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, str(tmp_path))
    assert (tmp_path / 'tokenizer.json').exists()

    prepare(text_config, str(tmp_path))

    # Bytes have no vocabulary, so these tokens can only be read without the file of characters.
    assert load_text(config_of_tokens(tmp_path)).tokenizer.name == 'bytes'


def test_a_finished_directory_is_left_as_it_is(text_config, prepared_dir, monkeypatch):
    identity = load_text(text_config).identity()
    monkeypatch.setattr(token_files, 'write_atomic', None)  # a write would fail
    assert prepare(text_config, str(prepared_dir)).identity() == identity


def test_a_damaged_directory_is_made_again(text_config, prepared_dir, tmp_path, caplog):
    """`prepare` compares the tokens in a directory with the hashes in their index, tokens.json.

    If a file differs, it tokenizes the texts again, with a warning.
    """
    copy = shutil.copytree(prepared_dir, tmp_path / 'copy')
    path = copy / 'train.bin'
    content = path.read_bytes()
    path.write_bytes(b'\0' + content[1:])
    load_text(config_of_tokens(copy))  # does not fail, because it reads only the last token

    prepare(text_config, str(copy))

    assert contents(copy) == contents(prepared_dir)
    assert 'train.bin is missing, or does not hold what tokens.json describes; prep' in caplog.text


def unreadable_texts():
    yield b'a'
    raise OSError('lost')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        pytest.param(
            {'tokenizer': 'characters'},
            'holds tokens of text .* bytes; give another',
            id='directory of another tokenizer',
        ),
        pytest.param(
            {'name': 'tokens'},
            "data.name='tokens' is already tokenized; name the text",
            id='tokens',
        ),
        pytest.param(
            {'name': 'cldr', 'languages': 'en-de'},
            'is a translation set; prepare_data',
            id='translation set',
        ),
    ],
)
def test_data_that_cannot_be_prepared_are_refused(text_config, prepared_dir, fields, message):
    # The directory holds tokens in bytes of a text in one language.
    with refused(message):
        prepare(dataclasses.replace(text_config, **fields), str(prepared_dir))


@pytest.mark.parametrize(
    ('train', 'fields', 'message'),
    [
        pytest.param(
            [b'a', b'b\0'],
            {},
            "document 2 of split 'train' of x cannot be encoded: ",
            id='a byte 0',
        ),
        pytest.param(
            unreadable_texts(),
            {},
            "split 'train' of x cannot be read .OSError: lost.; restore",
            id='unreadable',
        ),
        pytest.param(
            [], {}, "split 'train' of x has no document; it must hold text", id='no document'
        ),
        pytest.param(
            [b'\xe4'] * 40,
            {'tokenizer': 'bpe', 'tokenizer_size': 257},
            'cannot be tokenized: ',
            id='no UTF-8',
        ),
    ],
)
def test_texts_that_cannot_be_tokenized_are_refused(
    text_config, tmp_path, monkeypatch, train, fields, message
):
    # By default, the dataset 'x' is tokenized in bytes, with byte 0 as the separator.
    register(monkeypatch, 'x', {'train': train, 'validation': [b'a']})
    data = dataclasses.replace(text_config, name='x', path=None, **fields)
    with refused(message):
        prepare(data, str(tmp_path))


@pytest.mark.parametrize('tokenizer', ['bpe', 'words.json', 'nibbles:Nibbles'])
def test_the_number_of_workers_does_not_change_the_tokens(
    text_config, tmp_path, outside, monkeypatch, tokenizer
):
    """Two workers write the same files as one worker. Workers are processes that tokenize batches.

    The tokenizer is learned from the text, read from a file, or imported as a class.
    """
    # The 60 documents of train make 9 batches of at most 7 documents.
    monkeypatch.setattr(encoding, 'BATCH_DOCUMENTS', 7)
    monkeypatch.chdir(tmp_path)
    write_vocabulary(tmp_path / 'words.json')
    size = {'tokenizer_size': 280} if tokenizer == 'bpe' else {}
    data = dataclasses.replace(text_config, tokenizer=tokenizer, **size)

    prepare(data, 'by_one', workers=1)
    prepare(data, 'by_two', workers=2)

    assert contents(tmp_path / 'by_two') == contents(tmp_path / 'by_one')


def test_a_document_that_a_worker_cannot_encode_is_named(text_config, tmp_path, monkeypatch):
    train = [b'a'] * 9 + [b'\0'] + [b'a'] * 9
    register(monkeypatch, 'x', {'train': train, 'validation': [b'a']})
    data = dataclasses.replace(text_config, name='x', path=None)
    with refused("document 10 of split 'train' of x cannot be encoded: text holds byte 0"):
        prepare(data, str(tmp_path / 'out'), workers=2)


def test_a_worker_that_is_killed_is_named(text_config, tmp_path, monkeypatch):
    # The worker gets the batch 9 and calls os._exit(9).
    monkeypatch.setattr(encoding, '_batches', lambda texts: [9])
    monkeypatch.setattr(encoding, '_encode_batch', os._exit)
    with refused('a process that tokenizes was killed, .*; give fewer --workers'):
        prepare(text_config, str(tmp_path / 'out'), workers=2)


def test_progress_says_how_many_tokens_a_second(text_config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(token_files, 'SECONDS_PER_LOG', 0)
    caplog.set_level('INFO')
    prepare(text_config, str(tmp_path / 'out'))
    assert re.search(r'train: [\d,]+ tokens, [\d,]+ tokens/s', caplog.text)


@pytest.mark.parametrize('name', ['train.bin', 'tokenizer.json'])
def test_files_of_the_user_are_not_replaced(text_config, tmp_path, name):
    file = tmp_path / name
    file.write_text('{}')
    with refused('holds files that are no tokens; give another directory'):
        prepare(dataclasses.replace(text_config, tokenizer='characters'), str(tmp_path))
    assert file.read_text() == '{}'


@pytest.mark.parametrize(
    ('ids', 'message'),
    [
        ([300], 'it has ids outside of 0 .. 255'),
        ([97.5], 'its ids are float64; they must be of an integer type'),
        ([-1], 'it has ids outside of 0 .. 255'),
        ([5, 0, 5], 'its ids hold the separator, 0'),
    ],
)
def test_a_tokenizer_that_gives_wrong_ids_is_refused(
    text_config, tmp_path, monkeypatch, ids, message
):
    # Valid ids of bytes are 1 to 255, because 0 is the separator.
    monkeypatch.setattr(ByteTokenizer, 'encode', lambda *_: np.array(ids))
    with refused(f'cannot be encoded: .*{message}'):
        load_text(dataclasses.replace(text_config, data_dir=str(tmp_path)))


def test_the_vocabulary_comes_with_the_tokens(text_config, tmp_path):
    data = dataclasses.replace(text_config, tokenizer='characters')
    prepare(data, str(tmp_path))
    assert tokenizer_of(config_of_tokens(tmp_path)).name == tokenizer_of(data).name


def test_a_wrong_vocabulary_is_named(text_config, tmp_path):
    """The name of a tokenizer of characters ends in a hash of its characters."""
    prepare(dataclasses.replace(text_config, tokenizer='characters'), str(tmp_path))
    vocabulary_file = tmp_path / 'tokenizer.json'

    # Add the character '!' to the vocabulary, which changes the hash.
    content = vocabulary_file.read_text()
    vocabulary_file.write_text(content.replace(': "', ': "!'))

    with refused('was tokenized with characters-.* is characters-'):
        load_text(config_of_tokens(tmp_path))


def test_a_damaged_vocabulary_is_named(text_config, tmp_path):
    prepare(dataclasses.replace(text_config, tokenizer='characters'), str(tmp_path))
    vocabulary_file = tmp_path / 'tokenizer.json'

    # Cut the end of the file, so that it is not JSON.
    content = vocabulary_file.read_text()
    vocabulary_file.write_text(content[:-9])

    with refused('tokenizer.json cannot be read .*; copy it or prepare_data again'):
        load_text(config_of_tokens(tmp_path))


def with_fields(**fields):
    """A function that sets these fields in the text of tokens.json."""
    return lambda text: json.dumps(json.loads(text) | fields)


def with_fields_of_train(**fields):
    """A function that sets these fields of the train split in the text of tokens.json."""

    def damage(text):
        index = json.loads(text)
        index['splits']['train'] |= fields
        return json.dumps(index)

    return damage


@pytest.mark.parametrize(
    ('file', 'message'),
    [
        (
            'train.bin',
            'train.bin is missing, or does not .*; copy it or prepare_data again',
        ),
        ('tokens.json', 'tokens.json cannot be read .No such file'),
    ],
)
def test_a_missing_file_is_named(prepared_dir, tmp_path, file, message):
    copy = shutil.copytree(prepared_dir, tmp_path / 'copy')
    (copy / file).unlink()
    with refused(message):
        load_text(config_of_tokens(copy))


@pytest.mark.parametrize(
    ('file', 'damage', 'message'),
    [
        pytest.param(
            'test.bin', lambda text: text[:-1], 'test.bin is missing, or does not', id='cut tokens'
        ),
        pytest.param(
            'tokens.json', lambda text: PICKLE.decode('latin-1'), 'tokens.json', id='a pickle'
        ),
        pytest.param(
            'tokens.json',
            with_fields(dtype='int64'),
            "field 'dtype' is 'int64', expected",
            id='unknown dtype',
        ),
        pytest.param(
            'tokens.json',
            with_fields(tokenizer_name='x'),
            'was tokenized with x, but .* bytes',
            id='another tokenizer',
        ),
        pytest.param(
            'tokens.json',
            lambda text: text.replace('"num_tokens": ', '"num_tokens": 1'),
            'is missing, or',
            id='too many tokens',
        ),
    ],
)
def test_a_damaged_file_is_named(prepared_dir, tmp_path, file, damage, message):
    # `prepared_dir` holds tokens in bytes, in a file per split, and the index tokens.json.
    copy = shutil.copytree(prepared_dir, tmp_path / 'copy')
    content = (copy / file).read_text('latin-1')
    (copy / file).write_text(damage(content), 'latin-1')
    with refused(message):
        load_text(config_of_tokens(copy))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'lowercase': True}, 'data.lowercase=True has no effect on tokens'),
        ({'tokenizer': 'bpe'}, "data.tokenizer='bpe' has no effect .* made with bytes .*; set it"),
        ({'path': 'gs://b/x'}, 'data.path=gs://b/x is a URL, but .* local or mounted directory'),
    ],
)
def test_settings_that_have_no_effect_on_tokens_are_refused(prepared_dir, fields, message):
    data = dataclasses.replace(config_of_tokens(prepared_dir), **fields)
    with refused(message):
        rows_of(Config(data=data))


def test_another_size_of_the_vocabulary_of_tokens_is_refused(text_config, tmp_path):
    bpe = {'tokenizer': 'bpe', 'tokenizer_size': 280}
    prepare(dataclasses.replace(text_config, **bpe), str(tmp_path))

    # The setting may repeat what the tokens are.
    assert load_text(config_of_tokens(tmp_path, **bpe)).vocab_size == 280

    with refused('data.tokenizer_size=300 has no effect on tokens, .* made with byte-bpe280-'):
        load_text(config_of_tokens(tmp_path, tokenizer='bpe', tokenizer_size=300))


def test_prepared_tokens_may_have_a_test_split(prepared_dir):
    dataset = load_text(config_of_tokens(prepared_dir, carve_test=True))
    assert dataset.splits == ('train', 'validation', 'test')


def test_a_test_split_is_not_carved_from_prepared_tokens(text_config, tmp_path):
    texts_without_test = shutil.copytree(text_config.path, tmp_path / 'files')
    shutil.rmtree(texts_without_test / 'test')
    config_without_test = dataclasses.replace(text_config, path=str(texts_without_test))
    prepare(config_without_test, str(tmp_path / 'tokens'))

    with refused('data.carve_test=True has no effect on tokens, .*; set it when prepare_data'):
        load_text(config_of_tokens(tmp_path / 'tokens', carve_test=True))


# A module with a tokenizer. Importing the module writes the file `imported`.
EVIL = """
import pathlib
pathlib.Path('imported').touch()
class Cls:
    name, vocab_size, separator = 'evil', 4, 3
    encode = decode = num_bytes = None
"""


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        pytest.param(
            with_fields(tokenizer='evil:Cls'),
            "tokens.json names the tokenizer 'evil:Cls', which is code, and data.tokenizer='bytes' "
            'does not; set data.tokenizer=evil:Cls to import it',
            id='import path',
        ),
        pytest.param(
            with_fields(tokenizer='evil:Cls(a=1)'),
            'set data.tokenizer=evil:Cls.a=1. to import it',
            id='import path with options',
        ),
        pytest.param(
            with_fields(tokenizer='/etc/x.json'),
            'tokenizer.json, the vocabulary of ./etc/x.json., is miss',
            id='file',
        ),
        pytest.param(
            with_fields(tokenizer='characters'),
            "the vocabulary of 'characters', is missing",
            id='characters',
        ),
        pytest.param(
            with_fields(tokenizer='words'),
            "the vocabulary of 'words', is missing",
            id='unknown tokenizer',
        ),
        pytest.param(
            with_fields(splits={'../x': {}}),
            "split '../x' is none of train, validation, test",
            id='path for a split',
        ),
        pytest.param(
            with_fields(splits={'test': {}}), 'it has no train split', id='missing train split'
        ),
        pytest.param(
            with_fields_of_train(num_documents=10**15),
            'train has 1000000000000000 documents',
            id='too many documents',
        ),
        pytest.param(
            with_fields_of_train(num_documents=0), 'train has 0 documents in', id='no documents'
        ),
        pytest.param(with_fields_of_train(num_bytes=0), 'train has 0 bytes', id='no bytes'),
        pytest.param(
            with_fields_of_train(document_names=['a']),
            'train has 1 document_names of 60',
            id='too few names',
        ),
        pytest.param(
            with_fields_of_train(num_tokens=10**15),
            'train.bin is missing, or does not hold',
            id='too many tokens',
        ),
    ],
)
def test_a_wrong_index_is_refused_before_anything_it_names_is_used(
    prepared_dir, tmp_path, monkeypatch, damage, message
):
    """The index of a directory of tokens, tokens.json, may be damaged or come from someone else.

    Each case sets fields of a valid index, whose train split has 60 documents. The class evil:Cls
    must not be imported, because the user's settings do not name it.
    """
    copy = shutil.copytree(prepared_dir, tmp_path / 'copy')
    index = copy / 'tokens.json'
    index.write_text(damage(index.read_text()))
    # Importing evil.py would write the file `imported`.
    (tmp_path / 'evil.py').write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    with refused(message):
        load_text(config_of_tokens(copy)).document_names('train')

    assert not (tmp_path / 'imported').exists()


def test_a_class_is_imported_only_if_the_config_names_it(text_config, tmp_path, outside):
    """A directory of tokens names the class of its tokenizer.

    The directory may come from someone else. So the class is imported only if the user's settings
    name it, too.
    """
    tokens_directory = tmp_path / 'tokens'
    data = dataclasses.replace(text_config, tokenizer='nibbles:Nibbles')
    prepare(data, str(tokens_directory))

    # These settings name other tokenizers.
    for requested in ('bytes', 'nibbles:Other', 'characters'):
        with refused('set data.tokenizer=nibbles:Nibbles to import it'):
            load_text(config_of_tokens(tokens_directory, tokenizer=requested))

    # These settings name the class.
    opened = load_text(config_of_tokens(tokens_directory, tokenizer='nibbles:Nibbles'))
    assert opened.identity() == load_text(data).identity()


def test_a_vocabulary_file_with_a_huge_id_is_refused(text_config, tmp_path):
    file = tmp_path / 'huge.json'
    model = {'type': 'WordLevel', 'vocab': {'a': 0, 'b': 4_000_000_000}, 'unk_token': 'a'}
    file.write_text(json.dumps({'version': '1.0', 'added_tokens': [], 'model': model}))
    with refused('huge.json. cannot be read .*it has the id 4000000000; ids must be below 1048576'):
        load_text(dataclasses.replace(text_config, tokenizer=str(file)))


def write_vocabulary(path):
    """Writes a vocabulary file of words, in the format of the Hugging Face library `tokenizers`.

    Id 0 is for unknown words. Ids 1 to 399 are 'word1' to 'word399', and 400 ends a text. Returns
    the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = {'[UNK]': 0}
    for number in range(1, 400):
        vocabulary[f'word{number}'] = number
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(['<|endoftext|>'])
    library.save(str(path))
    return path


@contextlib.contextmanager
def as_earlier_versions(monkeypatch):
    """Adds a separator id to every vocabulary, even if it has an end of text."""
    with monkeypatch.context() as patch:
        patch.setattr(FileTokenizer, '_end_of_text', lambda self: None)
        yield


@pytest.mark.parametrize(
    ('separator', 'end_of_name'),
    [pytest.param(400, '-end400', id='end of text'), pytest.param(401, '', id='added id')],
)
def test_tokens_with_an_added_separator_keep_it(
    text_config, tmp_path, monkeypatch, separator, end_of_name
):
    """Tokens are read with the same separator with which they were written.

    The vocabulary has the ids 0 to 400. Its end of text, 400, is the separator. Earlier versions of
    the program added the id 401 as separator.
    """
    vocabulary = str(write_vocabulary(tmp_path / 'v/words.json'))
    data = dataclasses.replace(text_config, tokenizer=vocabulary)
    directory = tmp_path / 'tokens'
    is_added = separator == 401
    with as_earlier_versions(monkeypatch) if is_added else contextlib.nullcontext():
        prepare(data, str(directory))

    # Settings may name the vocabulary, or leave the tokenizer at its default.
    for requested in ('bytes', vocabulary):
        dataset = load_text(config_of_tokens(directory, tokenizer=requested))
        assert dataset.tokenizer.separator == separator
        assert dataset.vocab_size == separator + 1
        # The train split has 60 documents.
        assert len(dataset.document_ends('train')) == 60
        # The name of the tokenizer tells the two separators apart.
        name_without_end, _, _ = dataset.tokenizer.name.partition('-end')
        assert dataset.tokenizer.name == name_without_end + end_of_name

    # Preparing the tokens again leaves them as they are.
    files_before = contents(directory)
    assert prepare(data, str(directory)).identity() == dataset.identity()
    assert contents(directory) == files_before


@pytest.mark.slow
def test_a_run_with_an_added_separator_resumes_with_it(tiny, text_config, tmp_path, monkeypatch):
    """A run that was started with an added separator keeps this separator when it resumes.

    The vocabulary has the ids 0 to 400. New runs use its end of text, 400, as separator. Earlier
    versions overlooked the end of text and added the id 401.
    """
    end_of_text = 400
    added_separator = 401
    vocabulary = str(write_vocabulary(tmp_path / 'v/words.json'))
    data = dataclasses.replace(text_config, tokenizer=vocabulary, eval_sequences=None)
    model = {'num_layers': 1, 'vocab_size': added_separator + 1}
    config = tiny(model=model, data=vars(data), trials={'seeds': (0,)})
    run = tmp_path / 'run'

    # An earlier version trains the run to its end.
    with as_earlier_versions(monkeypatch):
        (result_of_earlier_version,) = train(config, run)
    # Without its result, the run resumes at its last checkpoint and is measured again.
    (run / 'result.json').unlink()
    (result,) = train(config, run)

    # `data` has the name of the tokenizer, which depends on the separator.
    assert result['data'] == result_of_earlier_version['data']
    assert result['test_loss'] == result_of_earlier_version['test_loss']

    # Loading the run gives a tokenizer with the added separator, too.
    loaded_run = loading.load(run)
    tokenizer = loading.tokenizer_for(loaded_run, data='', otherwise='--prompt_tokens')
    assert tokenizer.separator == added_separator

    # A new run uses the end of text as separator, so the ids 0 to 400 suffice.
    model_of_other_run = dataclasses.replace(config.model, vocab_size=end_of_text + 1)
    other_config = dataclasses.replace(config, model=model_of_other_run)
    assert rows_of(other_config).vocab_size == end_of_text + 1


def test_tokens_whose_last_document_does_not_end_are_refused(prepared_dir, tmp_path):
    """Another program may write tokens with a separator before each document, not after it."""
    copy = shutil.copytree(prepared_dir, tmp_path / 'copy')
    content = (copy / 'test.bin').read_bytes()
    (copy / 'test.bin').write_bytes(content[-1:] + content[:-1])
    with refused(r'test.bin ends with the id \d+; each document must end with the separator 0'):
        load_text(config_of_tokens(copy))


def test_the_writer_that_the_page_shows_writes_tokens(tmp_path, monkeypatch):
    """docs/data.md shows a program that writes a directory of tokens.

    Its train split has two documents, each followed by the separator 0.
    """
    # Run the program of the page without changes.
    page = (ROOT / 'docs/data.md').read_text('utf-8')
    programs = re.findall(r'```python\n(import hashlib.*?)```', page, re.DOTALL)
    assert len(programs) == 1
    directory = tmp_path / 'tokens'
    (tmp_path / 'writer.py').write_text(programs[0])
    monkeypatch.chdir(tmp_path)
    runpy.run_path('writer.py')

    dataset = load_text(config_of_tokens(directory))
    train_ids = dataset.split('train')
    assert bytes(train_ids) == b'one text\0another\0'

    # The program computes the entropy of the ids itself and writes it into the index.
    expected_nats = tokens.entropy(np.bincount(train_ids))
    assert dataset.unigram_nats('train') == pytest.approx(expected_nats)

    # With compare=True, a file whose hash differs from the index would be refused.
    index = token_files.read_index(directory)
    compared = token_files.open_index(directory, index, dataset.tokenizer, compare=True)
    assert compared.splits == ('train', 'validation')

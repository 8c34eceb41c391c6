"""Corpora: splits, files of one's own, downloads, catalogues, translations of CLDR, Python."""

import collections
import dataclasses
import gzip
import hashlib
import json
import platform
import random
import sys

import babel
import numpy as np
import pytest
import requests
import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.corpora import catalogues, cldr, downloads, python_text
from qkattn.data.corpora.corpus import (
    Corpus,
    cap_documents,
    carve_missing_splits,
    largest_size,
    split_of,
)
from qkattn.data.corpora.corpus_registry import CORPORA, SETTINGS, Source, find
from tests.data.datasets import documents
from tests.refusals import refused

TEXTS = [f'document {number}\n'.encode() for number in range(200)]  # 200 documents


def corpus_of(texts=TEXTS, names=None, languages=(), **others) -> Corpus:
    """A corpus of the given texts, with the name 'fox' and the version '1'.

    Args:
        texts: The documents of the train split.
        names: A function that returns the names of a split's documents. None means no names.
        languages: The languages of a corpus of translations, such as ('en', 'de'). A document in
            English is a text with b'en' before it, as in b'endocument 0'.
        others: The documents of other splits, as in test=[b'text'].
    """
    splits = {'train': texts, **others}

    def documents_in(language):
        """The documents of every split, each with the language before it. None adds nothing."""
        prefix = (language or '').encode()
        prefixed = {}
        for split, split_texts in splits.items():
            prefixed[split] = iter([prefix + text for text in split_texts])
        return prefixed

    return Corpus(
        name='fox',
        version='1',
        splits=tuple(splits),
        languages=languages,
        documents=documents_in,
        names=names,
    )


def carved_documents(corpus):
    """The documents by split, after missing validation and test splits were carved from train."""
    return documents(carve_missing_splits(corpus, test=False))


def test_a_tenth_of_the_documents_is_carved_for_each_missing_split():
    """A corpus that has only a train split gets its other splits from train.

    Test gets the tenth of the documents with the smallest hashes. Validation gets the next tenth.
    """
    all_texts = [f'document {number}\n'.encode() for number in range(200)]

    corpus = carve_missing_splits(corpus_of(all_texts), test=False)

    assert corpus.carved == {'validation': 0.1, 'test': 0.1}
    # '1' is the version of the corpus, and 'carved2' is version 2 of the carving rule.
    assert corpus.version == '1-carved2-validation-test'

    # Every document is in exactly one split.
    texts = documents(corpus)
    assert list(texts) == ['train', 'validation', 'test']
    assert len(texts['train']) == 160
    assert len(texts['validation']) == 20
    assert len(texts['test']) == 20
    assert sorted(texts['train'] + texts['validation'] + texts['test']) == sorted(all_texts)

    # The training documents keep their order.
    assert texts['train'] == [text for text in all_texts if text in texts['train']]

    # Published results use these splits, so the same documents must stay in test.
    assert texts['test'][:2] == [b'document 9\n', b'document 11\n']


def test_the_order_of_documents_does_not_change_the_splits():
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))

    in_order = carved_documents(corpus_of(TEXTS))
    in_another_order = carved_documents(corpus_of(shuffled))

    for split, texts in in_order.items():
        assert set(in_another_order[split]) == set(texts)


@pytest.mark.parametrize(
    ('present', 'missing'), [('test', 'validation'), ('validation', 'test')], ids=str
)
def test_a_split_that_the_corpus_has_is_not_carved(present, missing):
    """Only the missing split is carved from train.

    It gets the same documents as when both splits are missing.
    """
    both_carved = carve_missing_splits(corpus_of(TEXTS), test=False)
    with_one_split = corpus_of(TEXTS, **{present: [b'x\n']})

    # If the corpus has a validation split, a test split is carved only with test=True.
    carved = carve_missing_splits(with_one_split, test=missing == 'test')

    # '1' is the version of the corpus, and 'carved2' is version 2 of the carving rule.
    assert carved.version == f'1-carved2-{missing}'
    assert carved.carved == {missing: 0.1}
    texts = documents(carved)
    assert texts[present] == [b'x\n']
    assert texts[missing] == documents(both_carved)[missing]


def test_a_test_split_beside_validation_is_carved_only_if_asked():
    corpus = carve_missing_splits(corpus_of(TEXTS, validation=[b'x\n']), test=False)
    assert corpus.splits == ('train', 'validation')


def test_equal_documents_are_in_one_split():
    three_of_each = [text for text in TEXTS[:95] for _ in range(3)]

    splits = carved_documents(corpus_of(three_of_each))

    # A tenth of 285 documents, 28.5, is rounded up to a multiple of 3.
    assert len(splits['test']) == 30
    assert not set(splits['train']) & set(splits['test'])


def test_equal_documents_of_different_names_are_in_one_split():
    two_of_each = TEXTS + TEXTS

    def names(split):
        """Every document is named by its number, so that equal documents have different names."""
        return [str(number) for number in range(len(two_of_each))]

    splits = carved_documents(corpus_of(two_of_each, names=names))

    # Test gets a tenth of 2 * 200 documents.
    assert len(splits['test']) == 40
    assert not set(splits['train']) & set(splits['test'])


@pytest.mark.parametrize('others', [{}, {'test': [b'x']}], ids=['train', 'train and test'])
def test_carving_keeps_the_names_of_documents(others):
    """Every document has the same name before and after its split is carved."""

    def names(split):
        """Every document is named by its text."""
        texts = TEXTS if split == 'train' else others[split]
        return [text.decode() for text in texts]

    corpus = carve_missing_splits(corpus_of(TEXTS, names=names, **others), test=False)

    for split, texts in documents(corpus).items():
        assert corpus.names(split) == [text.decode() for text in texts]


def test_both_sides_of_a_translation_are_carved_alike():
    """A text and its translation are in the same split, at the same place.

    In this corpus, the text b'x' is b'enx' in English and b'dex' in German.
    """
    from_english = carve_missing_splits(corpus_of(TEXTS, languages=('en', 'de')), test=False)
    from_german = carve_missing_splits(corpus_of(TEXTS, languages=('de', 'en')), test=False)

    english = documents(from_english, 'en')
    german = documents(from_english, 'de')
    for split in ('train', 'validation', 'test'):
        english_texts = [text.removeprefix(b'en') for text in english[split]]
        german_texts = [text.removeprefix(b'de') for text in german[split]]
        assert english_texts == german_texts

    # Test gets a tenth of the 200 documents.
    assert len(english['test']) == 20

    # The splits stay the same if source and target change places.
    assert documents(from_german, 'en') == english


def test_few_documents_are_cut_at_line_ends():
    """With fewer than 20 documents, each document is cut into train, validation and test.

    Each cut moves to the end of its line.
    """
    lines = [b'%03d\n' % number for number in range(100)]  # of 4 bytes each
    text = b''.join(lines)

    splits = carved_documents(corpus_of([text, text]))

    # The text has 400 bytes. Byte 320, after 80 percent, is the first of line '080'. So the cut
    # moves to the end of this line, which is in train. In the same way, validation gets line '090'.
    assert splits == {
        'train': [b''.join(lines[:81])] * 2,
        'validation': [b''.join(lines[81:91])] * 2,
        'test': [b''.join(lines[91:])] * 2,
    }


def test_few_documents_beside_a_test_split_are_cut_once():
    """If only validation is missing, each document of train is cut after 90 percent."""
    lines = [b'%03d\n' % number for number in range(100)]  # of 4 bytes each
    text = b''.join(lines)

    splits = carved_documents(corpus_of([text, text], test=[b'x']))

    # The text has 400 bytes. Byte 360, after 90 percent, is the first of line '090'. So the cut
    # moves to the end of this line.
    assert splits == {
        'train': [b''.join(lines[:91])] * 2,
        'validation': [b''.join(lines[91:])] * 2,
        'test': [b'x'],
    }


def test_each_part_of_a_cut_document_has_its_name():
    one_document = corpus_of([b'x'], names=lambda split: ['a'])
    carved = carve_missing_splits(one_document, test=False)
    assert carved.names('test') == ['a']


def test_a_document_with_too_few_lines_is_refused():
    two_lines = corpus_of([b'a\nb\n'])
    with refused('fox has too few lines'):
        carved_documents(two_lines)


@pytest.mark.parametrize('num_documents', [20, 50])
def test_no_document_is_more_than_5_percent_of_an_evaluation(num_documents):
    """`largest_size` returns the size to which long documents are cut.

    After the cut, none has more than 5 percent of all bytes.
    """
    rng = np.random.default_rng(0)
    sizes = (10 ** rng.uniform(1, 6, num_documents)).astype(int)  # 10 to a million bytes

    limit = largest_size(sizes.tolist())

    cut_sizes = np.minimum(sizes, limit)
    assert cut_sizes.max() <= 0.05 * cut_sizes.sum()

    # The limit is as large as possible. With two bytes more, a document has over 5 percent.
    longer_sizes = np.minimum(sizes, limit + 2)
    assert longer_sizes.max() > 0.05 * longer_sizes.sum()


def test_documents_that_need_not_or_cannot_be_cut_have_no_limit():
    # Each of 20 equal documents is 5 percent.
    assert largest_size([7] * 20) is None
    # Each of 19 documents is more than 5 percent, however short it is cut.
    assert largest_size([9] * 19 + [0] * 9) is None


def test_long_documents_of_evaluation_splits_are_cut():
    long = 'ä'.encode() * 100
    short = [b'b' * 9] * 20
    corpus = corpus_of([long, *short], validation=[long, *short])

    capped = documents(cap_documents(corpus))

    # The limit is 9 bytes, because 9 / (9 + 20 * 9) is just below 5 percent. 'ä' has two bytes.
    assert capped == {'train': [long, *short], 'validation': ['ä'.encode() * 4, *short]}


def test_text_in_lower_case_has_another_version(monkeypatch):
    corpus = corpus_of(['Ärger, ΣΑΣ\n'.encode()], validation=[], test=[])
    monkeypatch.setitem(CORPORA, 'stdlib', Source(lambda config: corpus))

    lowercase = find(DataConfig(name='stdlib', lowercase=True))

    assert lowercase.version == '1-lower'
    assert documents(lowercase)['train'] == ['ärger, σας\n'.encode()]


def test_documents_that_are_equal_in_lower_case_are_in_one_split(monkeypatch):
    """Texts become lower case before splits are carved, so equal texts are in one split."""
    different_texts = [f'document {number}\n'.encode() for number in range(95)]
    upper_case_copies = [text.upper() for text in different_texts]
    corpus = corpus_of(different_texts + upper_case_copies)
    # `find` opens this corpus in place of the registered 'stdlib'.
    monkeypatch.setitem(CORPORA, 'stdlib', Source(lambda config: corpus))

    splits = documents(find(DataConfig(name='stdlib', lowercase=True)))

    num_different = 0
    for split_texts in splits.values():
        assert split_texts
        num_different += len(set(split_texts))
    # A text that was in two splits would be counted twice.
    assert num_different == len(different_texts)


def test_settings_that_a_dataset_does_not_read_are_refused():
    for name, source in CORPORA.items():
        required = dict.fromkeys(source.required, 'x-y')
        for field in set(SETTINGS) - set(source.required) - set(source.optional):
            with refused(f"data.{field}='' has no effect"):
                find(DataConfig(name=name, **required, **{field: ''}))


def test_settings_that_a_dataset_needs_are_asked_for():
    for name, source in CORPORA.items():
        required = dict.fromkeys(source.required, 'x-y')
        for field in source.required:
            without_field = required | {field: ''}
            with refused(f'needs data.{field}'):
                find(DataConfig(name=name, **without_field))


PAIRS = {
    'train.en': 'one\ntwo\n',
    'train.de': 'eins\nzwei\n',
    'validation.en': 'three\n',
    'validation.de': 'drei\n',
}


def written_corpus(directory, files, name='text', **settings):
    """Writes files, given as {name: text or bytes}, and opens their directory as a corpus."""
    for file, content in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = {'path': str(directory)} | settings
    return find(DataConfig(name=name, **settings))


def test_a_text_file_is_cut_at_line_ends_into_90_5_and_5_percent(tmp_path):
    """A single text file gives one document per split. Each cut moves to the end of its line."""
    # The last of these 200 lines has no line end.
    lines = [f'line {i:03d}\n'.encode() for i in range(199)] + [b'line 199']
    path = tmp_path / 'a.txt'

    corpus = written_corpus(tmp_path, {'a.txt': b''.join(lines)}, path=str(path))

    train, validation, test = documents(corpus).values()
    # The cuts after 90 and 95 percent fall into the lines 'line 179' and 'line 189'.
    assert train == [b''.join(lines[:180])]
    assert validation == [b''.join(lines[180:190])]
    assert test == [b''.join(lines[190:])]


BYTE_ORDER_MARK = '\ufeff'  # not part of the text
SPLITS = {
    'train.txt': f'{BYTE_ORDER_MARK}a\n',
    'validation/b.txt': 'b\n',
    'validation/a.txt': 'a\n',
}


def test_a_split_is_a_file_or_a_folder(tmp_path):
    """The text of a split is in one file, or in the .txt files below a folder.

    Each file is a document.
    """
    files = {
        'train.txt': 'a\n',
        'validation/a.txt': 'a\n',
        'validation/b.txt': 'b\n',
        'validation/sub/d.txt': 'd\n',
        'validation/c.md': 'not read',
    }

    corpus = written_corpus(tmp_path, files)

    assert documents(corpus) == {'train': [b'a\n'], 'validation': [b'a\n', b'b\n', b'd\n']}

    # If a split is one file, its document has the name of the split. Otherwise, names are paths.
    assert corpus.names('train') == ['train']
    assert corpus.names('validation') == [
        'validation/a.txt',
        'validation/b.txt',
        'validation/sub/d.txt',
    ]


def test_a_byte_order_mark_is_no_text(tmp_path):
    corpus = written_corpus(tmp_path, SPLITS)
    assert documents(corpus)['train'] == [b'a\n']


def test_a_split_that_is_unclear_is_refused(tmp_path):
    with refused("test' holds no .txt file"):
        written_corpus(tmp_path / 'a', {**SPLITS, 'test/a.text': 'a\n'})
    with refused('holds both validation and validation.txt; keep one'):
        written_corpus(tmp_path / 'b', {**SPLITS, 'validation.txt': 'e\n'})


@pytest.mark.parametrize(
    ('train', 'validation'),
    [
        ('train.txt', 'valid.txt'),
        ('training.txt', 'dev/a.txt'),
        ('train/a.txt', 'val.txt.gz'),
        ('ptb.train.txt', 'ptb.valid.txt'),
        ('wiki-train.txt', 'wiki_dev.txt'),
        ('PTB.Train.txt', 'validation.txt'),
    ],
)
def test_other_words_and_the_ends_of_names_say_the_split(tmp_path, train, validation):
    validation_text = gzip.compress(b'b\n') if validation.endswith('.gz') else b'b\n'

    corpus = written_corpus(tmp_path, {train: 'a\n', validation: validation_text})

    assert documents(corpus) == {'train': [b'a\n'], 'validation': [b'b\n']}


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        (
            ['a.txt', 'ptb.valid.txt', 'ptb.train.txt'],
            r"a.txt' names no split, but 'ptb.train.txt' ends with one; rename one of them",
        ),
        # Only one of several titles ends with the word.
        (['folder/a.txt', 'acid-test.txt'], r"a.txt' names no split, but 'acid-test.txt' ends"),
        (['ptb.train.txt', 'wiki.train.txt'], 'holds both ptb.train.txt and wiki.train.txt; keep'),
    ],
)
def test_names_that_may_end_with_a_split_by_chance_are_refused(tmp_path, names, message):
    with refused(message):
        written_corpus(tmp_path, dict.fromkeys(names, 'a\n'))


@pytest.mark.parametrize(
    'name', ['validation.jsonl', 'my.valid.jsonl', 'test.TXT', 'ptb.test.TXT', 'valid/b.TXT']
)
def test_text_of_a_split_that_would_not_be_read_is_refused(tmp_path, name):
    """Otherwise, the split would be carved from train, beside the text that the user gives."""
    with refused(f"{name.partition('/')[0]}.*' is not read"):
        written_corpus(tmp_path, {'train.txt': 'a\n' * 40, name: 'b\n'})


def test_files_that_name_no_split_are_not_read_beside_splits(tmp_path):
    # A folder of the name of a split may hold other files than text. macOS writes '._train.txt'.
    files = {'train.txt': 'a\n' * 40, 'notes.txt': 'b\n', 'dev/a.md': 'b\n', '._train.txt': 'b\n'}
    corpus = written_corpus(tmp_path, files)
    assert b''.join(sum(documents(corpus).values(), [])) == b'a\n' * 40


def test_a_suffix_in_upper_case_is_refused(tmp_path):
    with refused("train/b.TXT' is not read; write its suffix in lower case, or move it"):
        written_corpus(tmp_path, {'train/a.txt': 'a\n', 'train/b.TXT': 'b\n'})


def test_every_change_of_a_text_changes_its_version(tmp_path):
    """A corpus gets a new version if a file is changed, added or read in another order.

    Each call of `written_corpus` replaces only the files that it names.
    """
    files = {'train.txt': 'a\n', 'validation/b.txt': 'b\n', 'validation/a.txt': 'a\n'}
    original = written_corpus(tmp_path, files).version
    other_train = written_corpus(tmp_path, {'train.txt': 'b\n'}).version
    other_validation = written_corpus(tmp_path, {'validation/b.txt': 'B\n'}).version
    with_test = written_corpus(tmp_path, {'test.txt': 'e\n'}).version
    # Files are read in the order of their names. As 0.txt, this file comes before a.txt.
    (tmp_path / 'validation/b.txt').rename(tmp_path / 'validation/0.txt')
    other_order = written_corpus(tmp_path, {}).version

    # All five are different.
    versions = {original, other_train, other_validation, with_test, other_order}
    assert len(versions) == 5


def test_text_in_a_bucket_is_a_file_per_split(tmp_path, bucket):
    bucket.put('runs', 'files/train.txt', b'a\n')
    bucket.put('runs', 'folder/train/a.txt', b'a\n')

    corpus = written_corpus(tmp_path, {}, path='gs://runs/files')

    assert corpus.names('train') == ['train']
    with refused("folder/train' cannot be read .* give its text as a file"):
        written_corpus(tmp_path, {}, path='gs://runs/folder')


def test_lines_of_parallel_files_are_documents(tmp_path):
    corpus = written_corpus(tmp_path, PAIRS, name='parallel', languages='de-en')

    assert corpus.name == 'parallel-de-en'
    assert documents(corpus, 'en') == {'train': [b'one', b'two'], 'validation': [b'three']}
    assert documents(corpus, 'de') == {'train': [b'eins', b'zwei'], 'validation': [b'drei']}


def test_only_line_feeds_end_the_lines_of_parallel_files(tmp_path):
    """Other characters that Unicode counts as line ends stay in the text."""
    files = {
        'train.en': f'{BYTE_ORDER_MARK}a\u2028b\x85\x0cc\rd\r\ntwo\n',
        'train.de': f'{BYTE_ORDER_MARK}eins\nzwei\n',
        'validation.en': 'three\n',
        'validation.de': 'drei\n',
    }

    corpus = written_corpus(tmp_path, files, name='parallel', languages='de-en')

    assert documents(corpus, 'en')['train'] == ['a\u2028b\x85\x0cc\rd'.encode(), b'two']
    assert documents(corpus, 'de')['train'] == [b'eins', b'zwei']


def test_pairs_with_a_blank_side_are_left_out(tmp_path):
    """Line i of train.de translates line i of train.en. If either is blank, both are left out."""
    train_pairs = [
        ('one', 'eins'),
        ('', '\r'),  # both are blank
        ('two', 'zwei'),
        (' ', '\u3000'),  # both are blank: a space and an ideographic space
        ('blank', '\u3000'),  # only the translation is blank
    ]
    files = {
        'train.en': '\n'.join(english for english, _ in train_pairs) + '\n',
        'train.de': '\n'.join(german for _, german in train_pairs),  # without a last line end
        'validation.en': 'three\n',
        'validation.de': 'drei\n',
    }

    corpus = written_corpus(tmp_path, files, name='parallel', languages='de-en')

    assert documents(corpus, 'en')['train'] == [b'one', b'two']
    assert documents(corpus, 'de')['train'] == [b'eins', b'zwei']


@pytest.mark.parametrize(
    ('settings', 'files', 'message'),
    [
        pytest.param(
            {'path': '/absent/x'},
            {},
            "x' does not exist; give a file or a directory of text",
            id='missing path',
        ),
        pytest.param(
            {},
            {'validation.txt': 'x'},
            r'holds neither train.txt nor train/\*.txt',
            id='missing train split',
        ),
        pytest.param(
            {}, {'train.txt': ''}, "data.path: .*train.txt' is empty", id='empty train split'
        ),
        pytest.param(
            {},
            {'train.txt': b'a\nb\n' * 20 + b'\xc3'},
            'cannot be read .*0xc3 in position 80',
            id='half a character',
        ),
        pytest.param(
            {'name': 'parallel', 'languages': 'en-de'},
            PAIRS | {'validation.de': 'd\nv\nf'},
            'equal numbers of lines, not 1 and 3',
            id='unequal numbers of lines',
        ),
        pytest.param(
            {'name': 'parallel', 'languages': 'en-de'},
            PAIRS | {'test.en': 'x'},
            "test.de' does not exist; ",
            id='missing side of a split',
        ),
        pytest.param(
            {'name': 'parallel', 'languages': '../x-de'},
            {},
            "data.languages='../x-de' must be two lang",
            id='a path for a language',
        ),
        pytest.param(
            {'name': 'parallel', 'languages': 'en-en'},
            {},
            "data.languages='en-en' must be two languages",
            id='equal languages',
        ),
    ],
)
def test_missing_empty_or_unequal_files_are_named(tmp_path, settings, files, message):
    with refused(message):
        documents(written_corpus(tmp_path, files, **settings), 'en')


LINES = b'{"text": "one"}\n' * 40


@pytest.mark.parametrize('suffix', ['.json', '.npy', '.bin', '.gz', '.zst', '.tar.gz', '.CSV'])
def test_files_of_other_formats_are_not_trained_on(tmp_path, suffix):
    name = f'a{suffix}'
    last_suffix = suffix.split('.')[-1]
    with refused(f'is a .{last_suffix} file, which is not read; give plain text'):
        written_corpus(tmp_path, {name: LINES}, path=str(tmp_path / name))


def test_files_that_hold_no_text_are_not_trained_on(tmp_path):
    # 40 lines of 4 bytes come before byte 0.
    with_byte_0 = b'one\n' * 40 + b'\0'
    with refused('a.txt. holds byte 0 at byte 160, so it is not text; give'):
        written_corpus(tmp_path, {'a.txt': with_byte_0}, path=str(tmp_path / 'a.txt'))

    gzip_header = b'\x1f\x8b\x08\x00'  # is not UTF-8
    with refused('a. cannot be read .*; give a file of UTF-8'):
        written_corpus(tmp_path, {'a': gzip_header * 40}, path=str(tmp_path / 'a'))


def test_any_language_may_end_the_name_of_a_parallel_file(tmp_path):
    """The suffix .pt means Portuguese here, although PyTorch files have it, too."""
    files = {
        'train.en': 'one\ntwo\n',
        'train.pt': 'um\ndois\n',
        'validation.en': 'three\n',
        'validation.pt': 'três\n',
    }

    corpus = written_corpus(tmp_path, files, name='parallel', languages='en-pt')

    assert documents(corpus, 'pt')['train'] == [b'um', b'dois']

    # The content still has to be text.
    with refused('train.pt. holds byte 0 at byte 1'):
        written_corpus(tmp_path, {'train.pt': b'a\0\nb'}, name='parallel', languages='en-pt')


TEXT = b'one\ntwo\n'
URL = 'https://files.example.org/lines.txt'


@pytest.fixture
def internet(monkeypatch):
    """Replaces the internet by a dictionary of answers, which is empty at first.

    A test adds the status and the content of an answer, as in internet[URL] = (200, TEXT). Without
    any answer, there is no network. The declared sha256 of the file at URL is the hash of TEXT.
    """
    answers = {}

    def get(url, timeout):
        """Replaces `requests.get`: it answers from the dictionary."""
        if not answers:
            raise requests.ConnectionError('Name or service not known')
        response = requests.Response()
        response.status_code, response._content = answers[url]
        return response

    monkeypatch.setattr(requests, 'get', get)
    monkeypatch.setitem(downloads.SHA256, 'lines.txt', hashlib.sha256(TEXT).hexdigest())
    return answers


def fetch_lines(data_dir, **settings):
    """Downloads lines.txt, or copies it from settings['manual_dir']."""
    config = DataConfig(data_dir=str(data_dir), **settings)
    return downloads.fetch_file('lines', URL, config)


@pytest.mark.parametrize(
    ('answers', 'refusal'),
    [
        pytest.param({}, 'cannot be read .*ConnectionError', id='no network'),
        pytest.param({URL: (200, b'ten\n')}, 'has sha256 .*, not', id='content of another sha256'),
        pytest.param({URL: (404, TEXT)}, 'cannot be read .*404', id='right content, status 404'),
    ],
)
def test_a_file_that_cannot_be_downloaded_is_refused(internet, tmp_path, answers, refusal):
    """A file is refused if it cannot be read or its sha256 is not the hash of TEXT.

    `answers` has the status and the content of each URL. Without any answer, there is no network.
    """
    internet.update(answers)

    # Every message begins with the URL and gives this advice.
    advice = f'put {URL}, unchanged, into a directory and name it in data.manual_dir'
    with refused(f'^{URL} {refusal}.*; {advice}'):
        fetch_lines(tmp_path)

    # Only the lock file of the download is left.
    kept_files = [file.name for file in (tmp_path / 'downloads/lines').iterdir()]
    assert kept_files == ['lock']


def test_a_damaged_download_is_downloaded_again(internet, tmp_path, cache_warnings):
    """If the stored file has a wrong hash, it is downloaded again, with one warning.

    `fetch_lines` downloads lines.txt once, stores it, and returns its content.
    """
    internet[URL] = (200, TEXT)
    kept_file = tmp_path / 'downloads/lines/lines.txt'
    assert fetch_lines(tmp_path) == TEXT
    assert kept_file.read_bytes() == TEXT

    # Damage the stored file, so that its hash is wrong.
    kept_file.write_bytes(b'one\n')

    assert fetch_lines(tmp_path) == TEXT
    assert kept_file.read_bytes() == TEXT
    assert len(cache_warnings) == 1
    assert f'{kept_file} has sha256 ' in cache_warnings[0]


def test_a_kept_download_is_read_without_network_and_lock(internet, tmp_path):
    """A file that was downloaded before is read even offline and from a read-only disk.

    `fetch_lines` downloads lines.txt once, stores it, and returns its content.
    """
    internet[URL] = (200, TEXT)
    fetch_lines(tmp_path)
    lock = tmp_path / 'downloads/lines/lock'

    lock.unlink()
    internet.clear()  # there is no network from here on

    assert fetch_lines(tmp_path) == TEXT
    # Writing a lock would fail on a read-only disk.
    assert not lock.exists()


def test_a_file_in_manual_dir_is_read_in_place_of_a_download(internet, tmp_path):
    """A user without network puts the file into the directory of the setting `manual_dir`.

    The file must have the declared hash, the hash of TEXT. `internet` is empty, so there is no
    network.
    """
    manual_file = tmp_path / 'lines.txt'

    # The directory does not hold the file yet.
    with refused(f'^{manual_file} does not exist; put {URL}'):
        fetch_lines(tmp_path, manual_dir=str(tmp_path))

    # A file with another content is refused. Only the lock file is left.
    manual_file.write_bytes(b'ten\n')
    with refused('has sha256 .*, not'):
        fetch_lines(tmp_path, manual_dir=str(tmp_path))
    kept_names = [file.name for file in (tmp_path / 'downloads/lines').iterdir()]
    assert kept_names == ['lock']

    # The right file is read.
    manual_file.write_bytes(TEXT)
    assert fetch_lines(tmp_path, manual_dir=str(tmp_path)) == TEXT


@pytest.fixture
def put_into_manual_dir(tmp_path, monkeypatch):
    """A function put_into_manual_dir(name, content), which writes a file into data.manual_dir.

    A corpus reads the file instead of downloading it. The function returns the fields of DataConfig
    that name the directory.
    """

    def put(name: str, content: bytes) -> dict[str, str]:
        manual_dir = tmp_path
        (manual_dir / name).write_bytes(content)

        # A corpus refuses a file without the declared sha256.
        sha256_of_content = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(downloads.SHA256, name, sha256_of_content)

        return {'data_dir': str(tmp_path / 'data'), 'manual_dir': str(manual_dir)}

    return put


def test_documents_of_multi30k_are_lines(tmp_path, put_into_manual_dir):
    """Multi30k has a file for each split and language. Each line of a file is a document."""
    for part in ('train', 'val', 'test_2016_flickr'):
        for language in ('de', 'fr'):
            # U+2028, a line separator of Unicode, does not end a line here.
            lines = [f'{part}.{language}\u2028{number}\n' for number in range(3)]
            content = gzip.compress(''.join(lines).encode())
            settings = put_into_manual_dir(f'{part}.{language}.gz', content)

    corpus = find(DataConfig(name='multi30k', languages='fr-de', **settings))

    assert corpus.name == 'multi30k-fr-de'
    # Opening the corpus reads no file, so none is copied into the data directory yet.
    assert not (tmp_path / 'data').exists()
    # The file of the validation split is val.fr.gz.
    assert documents(corpus, 'fr')['validation'] == [
        'val.fr\u20280'.encode(),
        'val.fr\u20281'.encode(),
        'val.fr\u20282'.encode(),
    ]


def test_multi30k_has_three_languages():
    with refused("'en-es' must be two of de, en and fr"):
        find(DataConfig(name='multi30k', languages='en-es'))


def test_tiny_shakespeare_is_cut_by_characters(put_into_manual_dir):
    # Of 101 characters, int(0.9 * 101) = 90 are train. Each has two bytes.
    train = 'ä' * 90
    validation = 'ö' * 11
    settings = put_into_manual_dir('input.txt', (train + validation).encode())

    corpus = find(DataConfig(name='tiny_shakespeare', **settings))

    assert documents(corpus) == {'train': [train.encode()], 'validation': [validation.encode()]}


SENTENCES = [{'en': f'number {i}', 'de': f'Nummer {i}', 'fr': f'le {i}'} for i in range(40)]
# The values of each feature, in 40 rows.
VALUES = {
    'en': [sentence['en'] for sentence in SENTENCES],
    'de': [sentence['de'] for sentence in SENTENCES],
    'fr': [sentence['fr'] for sentence in SENTENCES],
    'n': list(range(40)),
    'sentences': SENTENCES,
}
# The features of each set, whose values are in VALUES, and the splits of the set.
FEATURES_AND_SPLITS = {
    'own': (('en', 'n'), ('train', 'dev')),
    'texts': (('en', 'de'), ('train', 'test')),
    'inner': (('fr', 'sentences'), ('train', 'test')),
    'sides': (('de', 'en', 'fr'), ('train', 'validation', 'test')),
    'no_train': (('en',), ('validation', 'test')),
}


class BuilderWithoutTensorFlow(tfds.dataset_builders.AdhocBuilder, skip_registration=True):
    def _split_generators(self, dl_manager):  # without TensorFlow
        return {split: enumerate(examples) for split, examples in self._split_datasets.items()}


def write_tfds_set(directory, name, version='2.1.0', config=None):
    """Writes a set of TensorFlow Datasets as `tfds build` does, with 40 rows in every split.

    Args:
        directory: The data directory.
        name: A key of FEATURES_AND_SPLITS.
        version: The version of the set.
        config: The name of a variant of the set. None if there are no variants.

    Returns:
        The settings that read the set.
    """
    feature_names, splits = FEATURES_AND_SPLITS[name]
    translation = tfds.features.Translation(languages=['de', 'en', 'fr'])
    special_kinds = {'n': tfds.features.Scalar(np.int64), 'sentences': translation}

    if name == 'sides':  # each row is one translation
        features = translation
    else:
        kinds = {}
        for feature in feature_names:
            kinds[feature] = special_kinds.get(feature, tfds.features.Text())
        features = tfds.features.FeaturesDict(kinds)

    rows = []
    for number in range(40):
        rows.append({feature: VALUES[feature][number] for feature in feature_names})

    builder = BuilderWithoutTensorFlow(
        name=name,
        version=version,
        config=config,
        features=features,
        split_datasets=dict.fromkeys(splits, rows),
        data_dir=directory,
        disable_shuffling=True,
    )
    builder.download_and_prepare(file_format='array_record')
    return DataConfig(name=f'tfds:{name}', data_dir=str(directory))


def write_hf_set(directory, name, **changes):
    """Saves a set with Hugging Face's library `datasets`, with 40 rows in every split.

    Args:
        directory: The parent of the set's folder. `load_from_directory` lets corpora read it.
        name: A key of FEATURES_AND_SPLITS.
        changes: Other values of features than in VALUES, as in en=['one', ...].

    Returns:
        The settings that read the set.
    """
    library = pytest.importorskip('datasets', reason="pip install 'qkattn[datasets]' to run it")
    library.disable_progress_bars()

    features, splits = FEATURES_AND_SPLITS[name]
    values = VALUES | changes
    rows = library.Dataset.from_dict({feature: values[feature] for feature in features})

    # Every split has the same rows.
    dataset = library.DatasetDict(dict.fromkeys(splits, rows))
    dataset.save_to_disk(directory / name)
    return DataConfig(name=f'hf:{name}')


def load_from_directory(patch, directory):
    """Makes Hugging Face's `load_dataset` load sets from a directory instead of the Hub."""
    library = pytest.importorskip('datasets')
    patch.setattr(library, 'load_dataset', lambda name: library.load_from_disk(directory / name))


@pytest.fixture(scope='module', params=[write_tfds_set, write_hf_set], ids=['tfds', 'hf'])
def config(request, tmp_path_factory):
    """A function config(name, **fields), which returns the settings that read a small set.

    `name` is a key of FEATURES_AND_SPLITS. `fields` replace settings, as in feature='n'. Tests run
    once with sets of TensorFlow Datasets and once with sets of Hugging Face.
    """
    write_set = request.param
    directory = tmp_path_factory.mktemp('sets')
    config_of_set = {name: write_set(directory, name) for name in FEATURES_AND_SPLITS}

    def settings(name, **fields):
        return dataclasses.replace(config_of_set[name], **fields)

    with pytest.MonkeyPatch.context() as patch:
        if write_set is write_hf_set:
            load_from_directory(patch, directory)
        yield settings


def texts_of(corpus, language=None):
    """The documents by split, as str."""
    texts = {}
    for split, split_texts in documents(corpus, language).items():
        texts[split] = [text.decode() for text in split_texts]
    return texts


def test_the_only_text_of_a_set_is_read(config):
    # The set has the features 'en', a text, and 'n', a number.
    corpus = find(config('own'))
    assert texts_of(corpus) == {'train': VALUES['en'], 'validation': VALUES['en']}


def test_the_named_text_of_a_set_is_read(config):
    # The set has the features 'en' and 'de', and the splits train and test.
    corpus = find(config('texts', feature='de'))
    assert corpus.name in ('tfds-texts-de', 'hf-texts-de')
    assert corpus.carved == {'validation': 0.1}
    assert texts_of(corpus)['test'] == VALUES['de']


@pytest.mark.parametrize('name', ['sides', 'inner'])
def test_the_named_languages_of_a_set_are_read(config, name):
    corpus = find(config(name, languages='fr-en'))
    assert corpus.name in (f'tfds-{name}-fr-en', f'hf-{name}-fr-en')
    assert texts_of(corpus, 'fr')['test'] == VALUES['fr']
    assert texts_of(corpus, 'en')['test'] == VALUES['en']


@pytest.mark.parametrize(
    ('name', 'fields', 'message'),
    [
        pytest.param(
            'texts',
            {},
            r'data.feature=None and .* do not name one .* texts are de, en',
            id='several texts',
        ),
        pytest.param(
            'own', {'feature': 'n'}, "data.feature='n' .* texts are en", id='feature of numbers'
        ),
        pytest.param(
            'inner',
            {'languages': 'en-es'},
            r"'en-es' .* translations sentences \(de, en, fr\)",
            id='missing language',
        ),
        pytest.param(
            'inner',
            {'languages': 'en-de', 'feature': 'fr'},
            "data.feature='fr' and",
            id='languages and a feature',
        ),
        pytest.param(
            'no_train',
            {},
            'has no train split; its splits are validation, test',
            id='missing train split',
        ),
    ],
)
def test_settings_that_do_not_fit_a_set_are_refused(config, name, fields, message):
    with refused(message):
        find(config(name, **fields))


def test_a_set_that_is_not_prepared_is_refused(tmp_path):
    with refused('run `tfds build own --data_dir=/'):
        find(DataConfig(name='tfds:own', data_dir=str(tmp_path)))


def test_the_newest_whole_version_of_a_prepared_set_is_read(tmp_path):
    """The newest complete version of a set on disk is read.

    The set of TensorFlow Datasets has the name 'own' and the configuration 'small.1'.
    """
    for version in ('11.0.0', '10.0.0', '9.0.0'):
        write_tfds_set(tmp_path, 'own', version, config='small.1')
    # TensorFlow Datasets gives an incomplete version such a name.
    directory = tmp_path / 'own' / 'small.1'
    (directory / '11.0.0').rename(directory / 'incomplete.A_11.0.0')

    corpus = find(DataConfig(name='tfds:own/small.1', data_dir=str(tmp_path)))

    # The name ends with 'en', the only feature with text.
    assert corpus.name == 'tfds-own-small.1-en'
    # Versions are compared as numbers, so 10 is newer than 9.
    assert corpus.version == '10.0.0'


def test_a_damaged_file_of_a_prepared_set_is_refused(tmp_path):
    config = write_tfds_set(tmp_path, 'own', version='10.0.0')
    directory = tmp_path / 'own' / '10.0.0'

    # The file of the train split is cut.
    files = list(directory.glob('*-train.array_record*'))
    assert len(files) == 1
    files[0].write_bytes(files[0].read_bytes()[:100])

    with refused(f'{directory} cannot be read .*; delete it and prepare it again'):
        texts_of(find(config))


def test_rows_of_hugging_face_without_text_are_left_out(tmp_path, monkeypatch):
    load_from_directory(monkeypatch, tmp_path)
    # The first two of the 40 rows have no text.
    english = [None, '', *VALUES['en'][2:]]

    corpus = find(write_hf_set(tmp_path, 'own', en=english))

    assert texts_of(corpus)['train'] == VALUES['en'][2:]


def test_pairs_of_hugging_face_without_a_side_are_left_out(tmp_path, monkeypatch):
    load_from_directory(monkeypatch, tmp_path)
    sentences = [{'en': '', 'de': 'a'}, {'en': None, 'de': 'b'}, *SENTENCES[2:]]

    config = write_hf_set(tmp_path, 'inner', sentences=sentences)
    corpus = find(dataclasses.replace(config, languages='en-de'))

    assert texts_of(corpus, 'de')['test'] == VALUES['de'][2:]


@pytest.fixture
def nothing_loads(monkeypatch):
    """Makes a test fail if Hugging Face's library would load a set."""
    library = pytest.importorskip('datasets')
    monkeypatch.setattr(library, 'load_dataset', lambda *names: pytest.fail(f'{names} is loaded'))


@pytest.mark.parametrize('name', ['json', 'parquet', 'text', 'csv'])
def test_a_loader_of_hugging_face_is_no_published_set(name, nothing_loads):
    with refused(f"data.name='hf:{name}' names a loader, which reads whatever lies in the work"):
        find(DataConfig(name=f'hf:{name}'))


def test_all_loaders_of_hugging_face_are_known():
    library = pytest.importorskip('datasets')
    loaders = library.packaged_modules._PACKAGED_DATASETS_MODULES
    assert loaders.keys() <= set(catalogues.LOADERS)


@pytest.mark.parametrize('name', ['owner/set', 'owner/set/config', 'a.jsonl', 'owner'])
def test_files_of_the_working_directory_are_no_published_set(
    name, nothing_loads, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'owner/set').mkdir(parents=True)
    (tmp_path / 'a.jsonl').write_bytes(LINES)

    with refused(f"data.name='hf:{name}' would read '.*' of the working directory; give a set"):
        find(DataConfig(name=f'hf:{name}'))


def test_a_published_set_is_asked_for_by_its_full_name(tmp_path, monkeypatch):
    """'hf:owner/set/config' is the set 'owner/set' of Hugging Face in the variant 'config'."""
    datasets = pytest.importorskip('datasets')
    write_hf_set(tmp_path, 'own')

    def load_dataset(*names):
        """Replaces the function that downloads a set: it reads the set on disk."""
        assert names == ('owner/set', 'config')
        return datasets.load_from_disk(str(tmp_path / 'own'))

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)

    corpus = find(DataConfig(name='hf:owner/set/config'))

    # The name ends with 'en', the only feature with text.
    assert corpus.name == 'hf-owner-set-config-en'
    # The set has no version, hence None. 'train' is the directory of its first file.
    assert corpus.version == 'None-train'


def test_a_published_set_that_cannot_be_loaded_is_refused(monkeypatch):
    datasets = pytest.importorskip('datasets')

    def load_dataset(name):
        """Replaces the function that downloads a set: there is no network."""
        raise ConnectionError("Couldn't reach it\non the Hub.")

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)

    with refused(r"hf:squad' cannot be read \(ConnectionError: .*on the Hub\); check name"):
        find(DataConfig(name='hf:squad'))


def test_the_missing_library_of_hugging_face_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with refused(r"datasets needs the package datasets: pip install -e '.\[datasets\]'"):
        find(DataConfig(name='hf:owner/set'))


@pytest.fixture(scope='module')
def pairs():
    """All (category, English text, German text) of CLDR."""
    return list(cldr.pairs('en', 'de'))


def test_cldr_has_many_pairs_of_every_category(pairs):
    sizes = collections.Counter(category for category, _, _ in pairs)
    assert set(sizes) == set(cldr.CATEGORIES)
    assert min(sizes.values()) > 800
    assert len(pairs) > 40_000
    assert len(pairs) < 65_000


def test_texts_of_cldr_are_short_unique_and_without_extra_spaces(pairs):
    """CLDR is Unicode's data on how languages write dates, amounts and names.

    `pairs` has the category, the English text and the German text of each.
    """
    english_texts = [english for _, english, _ in pairs]
    assert len(set(english_texts)) == len(english_texts)

    for _, english, german in pairs:
        assert english != german
        for text in (english, german):
            assert text
            # Longer texts are left out of the corpus.
            assert len(text.encode()) <= 120
            # Words have single spaces between them. No space is at an end.
            assert text == ' '.join(text.split())


def test_texts_of_cldr_do_not_change_under_the_same_version(pairs):
    if babel.__version__ == '2.18.0':
        digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
        assert digest == 'cfc420ea1d450ea950bfbf583cf003794b80a2008a6af4197871c769c3096796'


@pytest.fixture(scope='module')
def cldr_texts(pairs):
    """The texts of CLDR from English to German, by language ('en', 'de') and split."""
    with pytest.MonkeyPatch.context() as patch:
        # Making the pairs takes long, so they are made only once.
        patch.setattr(cldr, 'pairs', lambda *languages: iter(pairs))
        cldr._pairs_by_split.cache_clear()
        corpus = find(DataConfig(name='cldr', languages='en-de'))
        return {'en': texts_of(corpus, 'en'), 'de': texts_of(corpus, 'de')}


def test_a_cldr_corpus_is_named_by_its_languages():
    corpus = find(DataConfig(name='cldr', languages='EN-de'))
    assert corpus.name == 'cldr-en-de'
    assert corpus.version == f'babel{babel.__version__}-1.0.0'
    assert find(DataConfig(name='cldr', languages='en-zh_CN')).name == 'cldr-en-zh_Hans_CN'


@pytest.mark.parametrize(
    'languages', ['en-xx', 'english-de', 'en-EN', 'en-de-fr', 'en - de', '../x-de']
)
def test_cldr_needs_two_different_languages(languages):
    with refused(f"data.languages='{languages}'"):
        find(DataConfig(name='cldr', languages=languages))


def test_the_hash_of_its_source_decides_the_split_of_a_cldr_pair(pairs, cldr_texts):
    """A pair is in the split that `split_of` finds by the hash of its English text.

    About 90 percent of the pairs are in train, and 5 percent each in validation and test.
    """
    share_of_split = {'train': 0.9, 'validation': 0.05, 'test': 0.05}
    for split, share in share_of_split.items():
        expected_pairs = set()
        for _, english, german in pairs:
            if split_of(english, train=90, validation=5) == split:
                expected_pairs.add((english, german))
        # Hashes give the shares only approximately.
        assert len(expected_pairs) == pytest.approx(share * len(pairs), rel=0.2)

        # Source i of a split is translated by target i.
        sources = cldr_texts['en'][split]
        targets = cldr_texts['de'][split]
        assert len(sources) == len(expected_pairs)
        assert set(zip(sources, targets, strict=True)) == expected_pairs


def test_categories_of_cldr_are_mixed(pairs, cldr_texts):
    category_of = {source: category for category, source, _ in pairs}
    all_categories = set(category_of.values())

    for texts in cldr_texts['en'].values():
        # All categories are among the first 150 texts.
        assert {category_of[text] for text in texts[:150]} == all_categories


def test_stdlib_is_the_library_without_its_tests():
    """The corpus 'stdlib' has the source files of Python's standard library.

    It leaves out the tests and the generated tables of encodings.
    """
    paths = list(python_text.modules())  # such as 'json/decoder.py'
    assert paths == sorted(paths)
    assert len(paths) > 200
    for path in paths:
        folders = path.split('/')
        assert 'test' not in folders
        assert 'encodings' not in folders

    # The text depends on the version of Python. The rule that selects files has version 2.0.0.
    corpus = find(DataConfig(name='stdlib'))
    assert corpus.version == f'py{platform.python_version()}-2.0.0'


def test_the_splits_of_stdlib_do_not_change():
    """The hash of a module's dotted name, such as json.tool, decides its split.

    The splits must not change, because published results depend on them.
    """
    corpus = find(DataConfig(name='stdlib'))
    assert 'json/decoder.py' in corpus.names('train')
    assert 'argparse.py' in corpus.names('validation')
    assert 'json/tool.py' in corpus.names('test')

    # The dotted name of json/__init__.py is json.
    split_of_json = split_of('json', train=40, validation=30)
    assert 'json/__init__.py' in corpus.names(split_of_json)

    # If the split of any of these 4000 names changes, the digest changes, too.
    splits = [split_of(f'package.module_{i}', train=40, validation=30) for i in range(4000)]
    digest = hashlib.sha256(' '.join(splits).encode()).hexdigest()
    assert digest[:12] == '144b30107758'

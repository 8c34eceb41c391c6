"""Texts of one's own: records, compressed files, folders, and long texts cut into documents."""

import dataclasses
import gzip
import json
import sys

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import records
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.divided import divide_texts
from qkattn.data.load import load_text
from tests.data.datasets import documents
from tests.data.test_corpora import written_corpus
from tests.refusals import refused

pyarrow = pytest.importorskip('pyarrow', reason="Parquet needs pip install -e '.[datasets]'")
parquet = pytest.importorskip('pyarrow.parquet')

TEXTS = [f'Text {number}\nof more lines, naïve.\n' for number in range(40)]


def json_lines(texts, field='text'):
    """As pandas.to_json(lines=True) and most corpora are written."""
    return ''.join(json.dumps({'id': 1, field: text}) + '\n' for text in texts).encode()


def zstd(content):
    # In two frames, as pzstd writes them.
    """Compresses bytes by zstd."""
    half = len(content) // 2
    parts = [content[:half], content[half:]]
    return b''.join(pyarrow.compress(part, codec='zstd', asbytes=True) for part in parts)


def parquet_file(texts, field='text'):
    """The bytes of a parquet file of these texts, in groups of 7 rows, and their numbers as ids."""
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({'id': range(len(texts)), field: pyarrow.array(texts, pyarrow.string())})
    parquet.write_table(table, sink, row_group_size=7)
    return sink.getvalue().to_pybytes()


CONTENTS = {
    'a.jsonl': json_lines(TEXTS),
    'a.JSONL': json_lines(TEXTS),
    'a.ndjson': json_lines(TEXTS),
    'a.jsonl.gz': gzip.compress(json_lines(TEXTS)),
    'a.jsonl.zst': zstd(json_lines(TEXTS)),
    'a.parquet': parquet_file(TEXTS),
}


@pytest.mark.parametrize('name', CONTENTS)
def test_a_document_is_the_text_of_a_record(tmp_path, name):
    corpus = written_corpus(tmp_path, {name: CONTENTS[name]}, path=str(tmp_path / name))
    assert corpus.carved == {'validation': 0.1, 'test': 0.1}
    texts = sum(documents(corpus).values(), [])
    assert sorted(texts) == sorted(text.encode() for text in TEXTS)


def test_records_without_text_are_left_out(tmp_path):
    texts = ['a', '', None, 'b'] * 10
    for name, content in (
        ('a.jsonl', json_lines(texts) + b'\n'),
        ('a.parquet', parquet_file(texts)),
    ):
        corpus = written_corpus(tmp_path, {name: content}, path=str(tmp_path / name))
        assert sorted(sum(documents(corpus).values(), [])) == [b'a'] * 10 + [b'b'] * 10


def test_data_feature_names_the_field(tmp_path):
    files = {'a.jsonl': json_lines(TEXTS, field='content')}
    corpus = written_corpus(tmp_path, files, path=str(tmp_path / 'a.jsonl'), feature='content')
    assert sum(map(len, documents(corpus).values())) == 40
    # A field of numbers.
    other = written_corpus(tmp_path, {}, path=str(tmp_path / 'a.jsonl'), feature='id')
    assert other.version != corpus.version
    with refused("line 1 of .*a.jsonl' has 1 in the field 'id', which is no text; .* id, content"):
        documents(other)


def test_files_of_records_are_the_splits_that_their_names_say(tmp_path):
    files = {
        'data/train-00001-of-00002.parquet': parquet_file(['c']),
        'data/train-00000-of-00002.parquet': parquet_file(['a', 'b']),
        'data/validation-00000-of-00001.parquet': parquet_file(['d']),
        'README.txt': 'not read\n',
    }
    corpus = written_corpus(tmp_path, files)
    assert documents(corpus) == {'train': [b'a', b'b', b'c'], 'validation': [b'd']}

    # The version changes with the content of a file.
    first_version = corpus.version
    files['data/validation-00000-of-00001.parquet'] = parquet_file(['dd'])
    assert written_corpus(tmp_path, files).version != first_version


def test_files_of_records_that_name_no_split_are_all_train(tmp_path):
    files = {f'{part}.jsonl.gz': gzip.compress(json_lines(TEXTS[part::2])) for part in range(2)}
    corpus = written_corpus(tmp_path, files)
    assert corpus.carved
    assert sum(map(len, documents(corpus).values())) == 40


def test_each_file_of_a_flat_folder_is_a_document(tmp_path):
    files = {f'{number:02d}.txt': text for number, text in enumerate(TEXTS)}
    files |= {'40.txt.gz': gzip.compress(b'packed\n'), 'notes.md': 'no text'}
    corpus = written_corpus(tmp_path, files)
    texts = documents(corpus)
    assert sorted(sum(texts.values(), [])) == sorted([b'packed\n', *(t.encode() for t in TEXTS)])
    assert len(corpus.names('test')) == len(texts['test'])


@pytest.mark.parametrize(('suffix', 'compress'), [('.gz', gzip.compress), ('.zst', zstd)])
def test_compressed_text_is_the_text_that_was_compressed(tmp_path, suffix, compress):
    text = ''.join(TEXTS).encode()
    plain = written_corpus(tmp_path, {'a.txt': text}, path=str(tmp_path / 'a.txt'))
    name = f'a.txt{suffix}'
    packed = written_corpus(tmp_path, {name: compress(text)}, path=str(tmp_path / name))
    assert documents(packed) == documents(plain)
    splits = {f'train.txt{suffix}': compress(text), 'validation.txt': text}
    assert documents(written_corpus(tmp_path / 'splits', splits))['train'] == [text]


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.jsonl', json_lines(TEXTS) + b'{"x": 1}\n', "line 41 of .*a.jsonl' has no field 'text'"),
        ('a.jsonl', b'{"text": "a"}\n{"text"\n', "line 2 of .*a.jsonl' cannot be read: it is not"),
        ('a.jsonl', b'["a"]\n', "line 1 of .*a.jsonl' is no JSON object but"),
        ('a.jsonl', b'{"text": "\\ud800"}\n', 'line 1 of .* has text that is not Unicode'),
        ('a.jsonl', b'', "a.jsonl' is empty; it must hold text"),
        ('a.jsonl.gz', CONTENTS['a.jsonl.gz'][:-20], "a.jsonl.gz' cannot be read .EOFError"),
        ('a.jsonl.gz', json_lines(TEXTS), "a.jsonl.gz' cannot be read .BadGzipFile"),
        (
            'a.jsonl.zst',
            CONTENTS['a.jsonl.zst'][:-20],
            "a.jsonl.zst' cannot be read .OSError: Trun",
        ),
        ('a.txt.gz', gzip.compress(b'a\n' * 99)[:-9], "a.txt.gz' cannot be read .EOFError"),
        ('a.parquet', CONTENTS['a.parquet'][:-9], "a.parquet' cannot be read .ArrowInvalid"),
        ('a.parquet', parquet_file([]), "a.parquet' has no rows; it must hold text"),
        ('a.parquet', parquet_file(TEXTS, 'content'), "has no column 'text'; .* id, content"),
    ],
    # Of compressed contents, which hold a time, workers of pytest would have different names.
    ids=lambda value: '' if isinstance(value, bytes) else value,
)
def test_a_damaged_or_empty_file_of_records_is_named(tmp_path, name, content, message):
    with refused(message):
        documents(written_corpus(tmp_path, {name: content}, path=str(tmp_path / name)))


def test_a_column_that_is_no_text_is_named(tmp_path):
    files = {'a.parquet': CONTENTS['a.parquet']}
    with refused("column 'id' of .*a.parquet' holds int64, which is no text; set data.feature to"):
        documents(written_corpus(tmp_path, files, path=str(tmp_path / 'a.parquet'), feature='id'))
    with refused("data.feature='id' has no effect on plain text"):
        written_corpus(tmp_path, {'a.txt': 'a\n'}, path=str(tmp_path / 'a.txt'), feature='id')


@pytest.mark.parametrize('name', ['a.jsonl.zst', 'a.parquet'])
def test_a_missing_library_is_named_with_its_extra(tmp_path, name, monkeypatch):
    for module in ('pyarrow', 'pyarrow.parquet'):
        monkeypatch.setitem(sys.modules, module, None)
    with refused(rf"{name}' cannot be read: .* needs the package pyarrow.*'\.\[datasets\]'"):
        documents(written_corpus(tmp_path, {name: CONTENTS[name]}, path=str(tmp_path / name)))


def test_records_are_read_one_at_a_time(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(json_lines(TEXTS) + b'damaged\n')
    # The first comes before the damaged line is read.
    assert next(records.texts(path, 'text')) == TEXTS[0].encode()


def corpus_of_one_document(text):
    """A corpus whose training split is one document."""
    return Corpus(
        name='long',
        version='1',
        splits=('train',),
        documents=lambda language: {'train': [text]},
        names=lambda split: ['long'],
    )


PLAY = b'\n\nACT I\nto be\n\n  \nor not\nto be\n\nACT II\nthat is\r\n\r\nthe question\n\n'


@pytest.mark.parametrize(
    ('rule', 'expected'),
    [
        (
            'blank_line',
            [
                b'\n\nACT I\nto be\n\n  \n',
                b'or not\nto be\n\n',
                b'ACT II\nthat is\r\n\r\n',
                b'the question\n\n',
            ],
        ),
        (
            '^ACT ',
            [b'\n\nACT I\nto be\n\n  \nor not\nto be\n\n', PLAY[PLAY.index(b'ACT II') :]],
        ),
        ('nowhere', [PLAY]),
    ],
)
def test_a_long_text_is_cut_into_documents(rule, expected):
    corpus = divide_texts(corpus_of_one_document(PLAY), rule)
    assert documents(corpus) == {'train': expected}
    assert corpus.names is None
    assert corpus.version != '1'
    assert corpus.version != divide_texts(corpus_of_one_document(PLAY), 'kB=1').version


def test_blocks_end_at_line_ends():
    # With the ends of lines, the first block has 1,000 bytes.
    blocks = [[400, 500, 97], [300, 2500], [10, 999], [1, 1]]
    texts = [b''.join(b'x' * size + b'\n' for size in sizes) for sizes in blocks]
    assert (
        documents(divide_texts(corpus_of_one_document(b''.join(texts)), 'kB=1'))['train'] == texts
    )


def test_a_regular_expression_matches_characters_of_any_length():
    text = 'ä ä\nÜ ö\nÜ x\n'.encode()
    cut = documents(divide_texts(corpus_of_one_document(text), '^[Ü]'))['train']
    assert cut == ['ä ä\n'.encode(), 'Ü ö\n'.encode(), 'Ü x\n'.encode()]


@pytest.mark.parametrize(
    ('rule', 'message'),
    [
        ('(', r"data.documents='\(' is no regular expression .missing \)"),
        ('kB=0', "data.documents='kB=0' must be 'blank_line', 'kB=N' with N at least 1"),
        ('tokens=9', "data.documents='tokens=9' must be 'blank_line'"),
    ],
)
def test_a_rule_that_divides_no_text_is_refused(rule, message):
    with refused(message):
        divide_texts(corpus_of_one_document(PLAY), rule)


def test_one_file_of_many_paragraphs_has_as_many_documents_as_a_verdict_needs(tmp_path):
    path = tmp_path / 'book.txt'
    path.write_text(''.join(f'{text}\n' for text in TEXTS * 60))
    data = DataConfig(name='text', path=str(path), data_dir=str(tmp_path / 'cache'))
    assert load_text(data).info('test').num_documents == 1
    dataset = load_text(dataclasses.replace(data, documents='blank_line'))
    # The splits are cut at ends of lines, inside of two paragraphs.
    assert [dataset.info(split).num_documents for split in dataset.splits] == [2161, 121, 120]

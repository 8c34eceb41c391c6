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

TEXTS = [f'Text {number}\nof more lines, naïve.\n' for number in range(40)]  # 40 texts


def corpus_of_file(directory, name, content, **settings):
    """The corpus of a single file of this name and content, which is written into the directory."""
    return written_corpus(directory, {name: content}, path=str(directory / name), **settings)


def all_documents(corpus):
    """The documents of all splits, sorted."""
    return sorted(text for texts in documents(corpus).values() for text in texts)


def json_lines(texts, field='text'):
    """Records as JSON Lines, with the fields 'id' and `field`."""
    lines = [json.dumps({'id': 1, field: text}) + '\n' for text in texts]
    return ''.join(lines).encode()


def zstd(content):
    """Compresses bytes by zstd, in two frames, as pzstd does."""
    half = len(content) // 2
    frames = []
    for part in (content[:half], content[half:]):
        frames.append(pyarrow.compress(part, codec='zstd', asbytes=True))
    return b''.join(frames)


def parquet_file(texts, field='text'):
    """Records as a Parquet file, with the columns 'id' and `field`, in groups of 7 rows."""
    columns = {'id': range(len(texts)), field: pyarrow.array(texts, pyarrow.string())}
    file = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), file, row_group_size=7)
    return file.getvalue().to_pybytes()


# The 40 TEXTS as a file of each format.
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
    corpus = corpus_of_file(tmp_path, name, CONTENTS[name])
    assert corpus.carved == {'validation': 0.1, 'test': 0.1}
    assert all_documents(corpus) == sorted(text.encode() for text in TEXTS)


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
def test_records_without_text_are_left_out(tmp_path, name):
    texts = ['a', '', None, 'b'] * 10
    contents = {
        'a.jsonl': json_lines(texts) + b'\n',  # ends with a blank line
        'a.parquet': parquet_file(texts),
    }
    corpus = corpus_of_file(tmp_path, name, contents[name])
    assert all_documents(corpus) == [b'a'] * 10 + [b'b'] * 10


def test_data_feature_names_the_field(tmp_path):
    """Each record of a file is a document. The setting data.feature names the field of its text."""
    # Each of 40 records has the fields 'id', the number 1, and 'content', a text.
    content = json_lines(TEXTS, field='content')

    corpus = corpus_of_file(tmp_path, 'a.jsonl', content, feature='content')
    assert len(all_documents(corpus)) == 40

    # Another field gives the corpus another version. Its numbers are refused when they are read.
    corpus_of_numbers = corpus_of_file(tmp_path, 'a.jsonl', content, feature='id')
    assert corpus_of_numbers.version != corpus.version
    with refused("line 1 of .*a.jsonl' has 1 in the field 'id', which is no text; .* id, content"):
        documents(corpus_of_numbers)


def test_names_of_files_of_records_say_their_splits(tmp_path):
    """The names of Parquet files contain their splits, as on the Hugging Face Hub.

    The files of a split are read in the order of their names.
    """
    files = {
        'data/train-00001-of-00002.parquet': parquet_file(['c']),
        'data/train-00000-of-00002.parquet': parquet_file(['a', 'b']),
        'data/validation-00000-of-00001.parquet': parquet_file(['d']),
        'README.txt': 'not read\n',
    }
    corpus = written_corpus(tmp_path, files)
    assert documents(corpus) == {'train': [b'a', b'b', b'c'], 'validation': [b'd']}

    # The version changes with the content of any file.
    files['data/validation-00000-of-00001.parquet'] = parquet_file(['dd'])
    changed_corpus = written_corpus(tmp_path, files)
    assert changed_corpus.version != corpus.version


def test_files_of_records_that_name_no_split_are_all_train(tmp_path):
    # Each file has half of the 40 texts.
    files = {
        '0.jsonl.gz': gzip.compress(json_lines(TEXTS[0::2])),
        '1.jsonl.gz': gzip.compress(json_lines(TEXTS[1::2])),
    }
    corpus = written_corpus(tmp_path, files)
    assert corpus.carved  # validation and test come from train
    assert len(all_documents(corpus)) == 40


def test_each_file_of_a_flat_folder_is_a_document(tmp_path):
    files = {f'{number:02d}.txt': text for number, text in enumerate(TEXTS)}
    files['40.txt.gz'] = gzip.compress(b'packed\n')
    files['notes.md'] = 'not read'

    corpus = written_corpus(tmp_path, files)

    expected = [text.encode() for text in TEXTS] + [b'packed\n']
    assert all_documents(corpus) == sorted(expected)
    assert len(corpus.names('test')) == len(documents(corpus)['test'])


@pytest.mark.parametrize(
    ('suffix', 'compress'), [('.gz', gzip.compress), ('.zst', zstd)], ids=['gzip', 'zstd']
)
def test_compressed_text_is_the_text_that_was_compressed(tmp_path, suffix, compress):
    text = ''.join(TEXTS).encode()
    compressed_text = compress(text)

    # A single file is cut into splits after it is decompressed.
    plain = corpus_of_file(tmp_path, 'a.txt', text)
    compressed = corpus_of_file(tmp_path, f'a.txt{suffix}', compressed_text)
    assert documents(compressed) == documents(plain)

    # The file of a split may be compressed as well.
    files = {f'train.txt{suffix}': compressed_text, 'validation.txt': text}
    corpus = written_corpus(tmp_path / 'splits', files)
    assert documents(corpus)['train'] == [text]


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        pytest.param(
            'a.jsonl',
            json_lines(TEXTS) + b'{"x": 1}\n',
            "line 41 of .*a.jsonl' has no field 'text'",
            id='missing field',
        ),
        pytest.param(
            'a.jsonl',
            b'{"text": "a"}\n{"text"\n',
            "line 2 of .*a.jsonl' cannot be read: it is not",
            id='no JSON',
        ),
        pytest.param(
            'a.jsonl', b'["a"]\n', "line 1 of .*a.jsonl' is no JSON object but", id='list'
        ),
        pytest.param(
            'a.jsonl',
            b'{"text": "\\ud800"}\n',
            'line 1 of .* has text that is not Unicode',
            id='half a surrogate pair',
        ),
        pytest.param('a.jsonl', b'', "a.jsonl' is empty; it must hold text", id='empty JSON Lines'),
        pytest.param(
            'a.jsonl.gz',
            CONTENTS['a.jsonl.gz'][:-20],
            "a.jsonl.gz' cannot be read .EOFError",
            id='cut JSON Lines in gzip',
        ),
        pytest.param(
            'a.jsonl.gz',
            json_lines(TEXTS),
            "a.jsonl.gz' cannot be read .BadGzipFile",
            id='JSON Lines not in gzip',
        ),
        pytest.param(
            'a.jsonl.zst',
            CONTENTS['a.jsonl.zst'][:-20],
            "a.jsonl.zst' cannot be read .OSError: Trun",
            id='cut JSON Lines in zstd',
        ),
        pytest.param(
            'a.txt.gz',
            gzip.compress(b'a\n' * 99)[:-9],
            "a.txt.gz' cannot be read .EOFError",
            id='cut text in gzip',
        ),
        pytest.param(
            'a.parquet',
            CONTENTS['a.parquet'][:-9],
            "a.parquet' cannot be read .ArrowInvalid",
            id='cut Parquet',
        ),
        pytest.param(
            'a.parquet',
            parquet_file([]),
            "a.parquet' has no rows; it must hold text",
            id='empty Parquet',
        ),
        pytest.param(
            'a.parquet',
            parquet_file(TEXTS, 'content'),
            "has no column 'text'; .* id, content",
            id='missing column',
        ),
    ],
)
def test_a_damaged_or_empty_file_of_records_is_named(tmp_path, name, content, message):
    with refused(message):
        documents(corpus_of_file(tmp_path, name, content))


def test_a_column_that_is_no_text_is_named(tmp_path):
    corpus = corpus_of_file(tmp_path, 'a.parquet', CONTENTS['a.parquet'], feature='id')
    with refused("column 'id' of .*a.parquet' holds int64, which is no text; set data.feature to"):
        documents(corpus)


def test_plain_text_has_no_features(tmp_path):
    with refused("data.feature='id' has no effect on plain text"):
        corpus_of_file(tmp_path, 'a.txt', 'a\n', feature='id')


@pytest.mark.parametrize('name', ['a.jsonl.zst', 'a.parquet'])
def test_a_missing_library_is_named_with_its_extra(tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    with refused(rf"{name}' cannot be read: .* needs the package pyarrow.*'\.\[datasets\]'"):
        documents(corpus_of_file(tmp_path, name, CONTENTS[name]))


def test_records_are_read_one_at_a_time(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(json_lines(TEXTS) + b'damaged\n')
    # The first text is returned before the damaged line is read.
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


# A play of two acts. The first act has two scenes.
FIRST_SCENE = b'\n\nACT I\nto be\n\n  \n'
SECOND_SCENE = b'or not\nto be\n\n'
SECOND_ACT = b'ACT II\nthat is\r\n\r\n'
END = b'the question\n\n'
PLAY = FIRST_SCENE + SECOND_SCENE + SECOND_ACT + END


@pytest.mark.parametrize(
    ('rule', 'expected'),
    [
        ('blank_line', [FIRST_SCENE, SECOND_SCENE, SECOND_ACT, END]),
        ('^ACT ', [FIRST_SCENE + SECOND_SCENE, SECOND_ACT + END]),
        ('nowhere', [PLAY]),
    ],
)
def test_a_long_text_is_cut_into_documents(rule, expected):
    corpus = divide_texts(corpus_of_one_document(PLAY), rule)
    assert documents(corpus) == {'train': expected}
    assert corpus.names is None


@pytest.mark.parametrize('rule', ['blank_line', '^ACT ', 'nowhere'])
def test_the_rule_that_cuts_a_text_changes_its_version(rule):
    whole = corpus_of_one_document(PLAY)
    cut = divide_texts(whole, rule)
    cut_by_another_rule = divide_texts(whole, 'kB=1')
    assert cut.version != whole.version
    assert cut.version != cut_by_another_rule.version


def test_blocks_end_at_line_ends():
    """With documents='kB=1', a block ends with the line by which it has 1,000 bytes or more."""
    # The lengths of the lines in each block, without line ends of 1 byte.
    line_lengths_of_blocks = [
        [400, 500, 97],  # exactly 1,000 bytes, with 3 line ends
        [300, 2500],  # 301 bytes are too few. A long line is not cut
        [10, 999],  # 11 bytes are too few
        [1, 1],  # the rest of the text
    ]
    blocks = []
    for lengths in line_lengths_of_blocks:
        blocks.append(b''.join(length * b'x' + b'\n' for length in lengths))

    corpus = divide_texts(corpus_of_one_document(b''.join(blocks)), 'kB=1')

    assert documents(corpus)['train'] == blocks


def test_a_regular_expression_matches_characters_of_several_bytes():
    text = 'ä ä\nÜ ö\nÜ x\n'
    corpus = divide_texts(corpus_of_one_document(text.encode()), '^[Ü]')
    assert documents(corpus)['train'] == ['ä ä\n'.encode(), 'Ü ö\n'.encode(), 'Ü x\n'.encode()]


@pytest.mark.parametrize(
    ('rule', 'message'),
    [
        ('(', r"data.documents='\(' is no regular expression .missing \)"),
        ('kB=0', "data.documents='kB=0' must be 'blank_line', 'kB=N' with N at least 1"),
        ('tokens=9', "data.documents='tokens=9' must be 'blank_line'"),
        ('blank_lines', "data.documents='blank_lines' is no rule; did you mean 'blank_line'"),
    ],
)
def test_a_rule_that_divides_no_text_is_refused(rule, message):
    with refused(message):
        divide_texts(corpus_of_one_document(PLAY), rule)


def test_paragraphs_of_one_file_are_documents_if_asked(tmp_path):
    """A text file is cut into 90, 5 and 5 percent. By default, each part is one document.

    With documents='blank_line', each paragraph is a document.
    """
    # 60 * 40 = 2400 paragraphs of two lines, each followed by a blank line.
    path = tmp_path / 'book.txt'
    path.write_text(''.join(f'{text}\n' for text in TEXTS * 60))
    data = DataConfig(name='text', path=str(path), data_dir=str(tmp_path / 'cache'))

    one_document = load_text(data)
    assert one_document.info('test').num_documents == 1

    # Each cut moves to the end of the first line of a paragraph. So the splits on both sides get
    # a part of this paragraph as a document. The splits have 0.9, 0.05 and 0.05 of 2400.
    paragraphs = load_text(dataclasses.replace(data, documents='blank_line'))
    assert paragraphs.info('train').num_documents == 2160 + 1
    assert paragraphs.info('validation').num_documents == 120 + 1
    assert paragraphs.info('test').num_documents == 120

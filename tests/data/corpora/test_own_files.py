import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus_registry import find
from tests.data.datasets import documents
from tests.refusals import refused

PAIRS = {'train.en': 'one\ntwo\n', 'train.de': 'eins\nzwei\n'}
PAIRS |= {'validation.en': 'three\n', 'validation.de': 'drei\n'}


def opened(directory, files, name='text', **settings):
    """The corpus of a directory into which these texts or bytes are written."""
    for file, content in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return find(DataConfig(name=name, **{'path': str(directory)} | settings))


def test_file_is_cut_at_line_ends_90_5_5(tmp_path):
    lines = [f'line {i:03d}\n'.encode() for i in range(200)]
    corpus = opened(tmp_path, {'a.txt': b''.join(lines)[:-1]}, path=str(tmp_path / 'a.txt'))
    parts = [b''.join(lines[:180]), b''.join(lines[180:190]), b''.join(lines[190:])[:-1]]
    assert list(documents(corpus).values()) == [[part] for part in parts]


def test_a_split_is_a_file_or_a_folder_and_the_version_is_that_of_the_text(tmp_path, bucket):
    # A byte order mark is no text.
    files = {'train.txt': '\ufeffa\n', 'validation/b.txt': 'b\n', 'validation/a.txt': b'a\n'}
    corpus = opened(tmp_path, files | {'validation/c.md': 'c', 'validation/sub/d.txt': 'd\n'})
    assert documents(corpus) == {'train': [b'a\n'], 'validation': [b'a\n', b'b\n', b'd\n']}
    names = ['validation/a.txt', 'validation/b.txt', 'validation/sub/d.txt']
    assert (corpus.names('train'), corpus.names('validation')) == (['train'], names)
    versions = [corpus.version]
    for name, content in (('train.txt', 'b\n'), ('validation/b.txt', 'B\n'), ('test.txt', 'e\n')):
        versions.append(opened(tmp_path, {name: content}).version)
    (tmp_path / 'validation/b.txt').rename(tmp_path / 'validation/0.txt')
    assert len({*versions, opened(tmp_path, {}).version}) == 5
    for name in ('files/train.txt', 'folder/train/a.txt'):
        bucket.put('runs', name, b'a\n')
    assert opened(tmp_path, {}, path='gs://runs/files').names('train') == ['train']
    with refused("folder/train' cannot be read .* give its text as a file"):
        opened(tmp_path, {}, path='gs://runs/folder')
    with refused('holds both validation and validation.txt; keep one'):
        opened(tmp_path, {'validation.txt': 'e\n'})


def test_lines_of_parallel_files_are_documents(tmp_path):
    # Only line feeds end lines; pairs with a blank side are left out.
    source = '\ufeffa\u2028b\x85\x0cc\rd\r\n\ntwo\n \nblank\n'
    target = '\ufeffeins\n\r\nzwei\n\u3000\n\u3000'
    files = PAIRS | {'train.en': source, 'train.de': target}
    corpus = opened(tmp_path, files, 'parallel', languages='de-en')
    english = {'train': ['a\u2028b\x85\x0cc\rd'.encode(), b'two'], 'validation': [b'three']}
    assert documents(corpus, 'en') == english and corpus.name == 'parallel-de-en'
    assert documents(corpus, 'de') == {'train': [b'eins', b'zwei'], 'validation': [b'drei']}


@pytest.mark.parametrize(
    ('path', 'files', 'says'),
    [
        ('x', {}, "x' cannot be read .*FileNotFound"),
        ('', {'validation.txt': 'x'}, 'has no train split; its splits are validation'),
        ('', {'train.txt': ''}, "train.txt' is empty"),
        ('x', {'x': b'a\nb\n' * 20 + b'\xc3'}, 'cannot be read .*0xc3 in position 80'),
        (None, {'validation.de': 'd\nv\nf'}, 'equal numbers of lines, not 1 and 3'),
        (None, {'test.en': 'x'}, "test.de' cannot be read .*FileNotFound"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, path, files, says):
    """Of text, and where there is no path, of parallel text."""
    languages = {'name': 'parallel', 'languages': 'en-de'}
    settings = languages if path is None else {'path': str(tmp_path / path)}
    with refused(says):
        documents(opened(tmp_path, (PAIRS if path is None else {}) | files, **settings), 'en')

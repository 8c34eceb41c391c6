import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused


def write(directory, files):
    """Writes text or bytes; None is no file."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is not None:
            (directory / name).write_bytes(
                content.encode() if isinstance(content, str) else content
            )
    return directory


def text(path):
    return find(DataConfig(name='text', path=str(path)))


def parallel(path, languages='en-de'):
    return find(DataConfig(name='parallel', path=str(path), languages=languages))


def read(corpus, language=None):
    return {split: list(texts) for split, texts in corpus.documents(language).items()}


PAIRS = {
    **{'train.en': 'one\ntwo\n', 'train.de': 'eins\nzwei\n'},
    **{'validation.en': 'three\n', 'validation.de': 'drei\n'},
}


def test_file_is_cut_at_line_ends_90_5_5(tmp_path):
    lines = [f'line {i:03d}\n'.encode() for i in range(200)]
    corpus = text(write(tmp_path, {'book.txt': b''.join(lines)[:-1]}) / 'book.txt')
    parts = [b''.join(lines[:180]), b''.join(lines[180:190]), b''.join(lines[190:])[:-1]]
    assert list(read(corpus).values()) == [[part] for part in parts]


def test_a_split_is_a_file_or_a_folder_and_the_version_is_that_of_the_text(tmp_path):
    write(tmp_path, {'train.txt': '\ufeffa\n'})  # a byte order mark is no text
    write(tmp_path / 'validation', {'b.txt': 'b\n', 'a.txt': b'a\n', 'c.md': 'c'})
    write(tmp_path / 'validation' / 'sub', {'d.txt': 'd\n'})
    corpus = text(tmp_path)
    assert read(corpus) == {'train': [b'a\n'], 'validation': [b'a\n', b'b\n', b'd\n']}
    names = ['validation/a.txt', 'validation/b.txt', 'validation/sub/d.txt']
    assert (corpus.names('train'), corpus.names('validation')) == (['train'], names)
    versions = [corpus.version]
    for name, content in (('train.txt', 'b\n'), ('validation/b.txt', 'B\n'), ('test.txt', 'e\n')):
        write(tmp_path, {name: content})
        versions.append(text(tmp_path).version)
    (tmp_path / 'validation/b.txt').rename(tmp_path / 'validation/0.txt')
    versions.append(text(tmp_path).version)
    assert len(set(versions)) == 5
    write(tmp_path, {'validation.txt': 'e\n'})
    with refused('holds both validation and validation.txt; keep one'):
        text(tmp_path)


def test_lines_of_parallel_files_are_documents(tmp_path):
    corpus = parallel(write(tmp_path, PAIRS))
    assert read(corpus, 'en') == {'train': [b'one', b'two'], 'validation': [b'three']}
    assert read(corpus, 'de') == {'train': [b'eins', b'zwei'], 'validation': [b'drei']}
    assert (corpus.name, corpus.languages) == ('parallel-en-de', ('en', 'de'))
    assert parallel(tmp_path, 'de-en').version != corpus.version
    # Only line feeds end lines; pairs with a blank side are left out.
    source = '\ufeffa\u2028b\x85\x0cc\rd\r\n\ntwo\n \nblank\n'
    target = '\ufeffeins\n\r\nzwei\n\u3000\n\u3000'
    corpus = parallel(write(tmp_path, PAIRS | {'train.en': source, 'train.de': target}))
    assert read(corpus, 'en')['train'] == ['a\u2028b\x85\x0cc\rd'.encode(), b'two']
    assert read(corpus, 'de')['train'] == [b'eins', b'zwei']


@pytest.mark.parametrize(
    ('path', 'files', 'says'),
    [
        ('x', {}, "x' cannot be read .*FileNotFound"),
        ('', {'validation.txt': 'x'}, 'has no train split; its splits are validation'),
        ('', {'train.txt': ''}, "train.txt' is empty"),
        ('x', {'x': 'a\n' * 9}, "'.*x' has too few lines"),
        ('x', {'x': b'a\nb\n' * 20 + b'\xc3'}, 'cannot be read .*0xc3 in position 80'),
        (None, {'validation.de': 'd\nv\nf'}, 'equal numbers of lines, not 1 and 3'),
        (None, {'train.de': None}, "train.de' cannot be read .*FileNotFound"),
        (None, {'train.en': b'one\xff\ntwo\n'}, "train.en' cannot be read .*UTF-8"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, path, files, says):
    """Of text, and where there is no path, of parallel text."""
    write(tmp_path, files if path is not None else PAIRS | files)
    with refused(says):
        read(parallel(tmp_path), 'en') if path is None else read(text(tmp_path / path))

import gzip
import logging

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import own_files
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused


def write(directory, files):
    """Writes text or bytes; None is no file."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is not None:
            data = content if isinstance(content, bytes) else content.encode()
            (directory / name).write_bytes(data)
    return directory


def text(path, **options):
    return find(DataConfig(name='text', path=str(path), **options))


def parallel(path, languages='en-de'):
    return find(DataConfig(name='parallel', path=str(path), languages=languages))


def read(corpus, language=None):
    return {split: list(texts) for split, texts in corpus.documents(language).items()}


SPLIT = {'train.txt': 'a\nb\n', 'validation.txt': 'c\n'}
PAIRS = {
    'train.en': 'one\ntwo\n',
    'train.de': 'eins\nzwei\n',
    'validation.en': 'three\n',
    'validation.de': 'drei\n',
}


def test_file_is_cut_at_line_ends_90_5_5(tmp_path):
    lines = [f'line {i:03d}\n' for i in range(200)]
    corpus = text(write(tmp_path, {'book.txt': ''.join(lines)[:-1]}) / 'book.txt')
    assert (corpus.name, corpus.languages) == ('text', ())
    parts = {split: [part.decode() for part in texts] for split, texts in read(corpus).items()}
    cut = [''.join(lines[:180]), ''.join(lines[180:190]), ''.join(lines[190:])[:-1]]
    assert parts == {s: [c] for s, c in zip(('train', 'validation', 'test'), cut, strict=True)}


def test_a_split_may_be_a_folder_with_a_file_per_document(tmp_path):
    write(tmp_path, {'train.txt': 'a\n'})
    write(tmp_path / 'validation', {'b.txt': 'b\n', 'a.txt.gz': gzip.compress(b'a\n'), 'c.md': 'c'})
    write(tmp_path / 'validation' / 'sub', {'d.txt': 'd\n'})
    corpus = text(tmp_path)
    assert read(corpus) == {'train': [b'a\n'], 'validation': [b'a\n', b'b\n', b'd\n']}
    names = ['validation/a.txt.gz', 'validation/b.txt', 'validation/sub/d.txt']
    assert (corpus.names('train'), corpus.names('validation')) == (['train'], names)
    (tmp_path / 'validation/b.txt').rename(tmp_path / 'validation/0.txt')
    assert text(tmp_path).version != corpus.version
    write(tmp_path / 'test', {})
    with refused("test' holds no text files; name them"):
        text(tmp_path)
    write(tmp_path, {'test.txt': 'e\n'})
    with refused('holds both test.txt and test; keep one'):
        text(tmp_path)


def test_directory_has_a_file_per_split_and_its_version_is_that_of_the_text(tmp_path, monkeypatch):
    path = write(tmp_path / 'x', SPLIT)
    versions = [text(path).version]
    parts = {'train': [b'a\nb\n'], 'validation': [b'c\n']}
    assert read(text(path)) == parts and text(path).splits == tuple(parts)
    moved = {'test.txt': 'c\n', 'validation.txt': 'd'}
    for files in ({'train.txt': 'a\nB\n'}, {'test.txt': 'd'}, moved):
        versions.append(text(write(path, files)).version)
    assert len(set(versions)) == 4
    assert all(version.startswith('sha256-') and len(version) == 7 + 16 for version in versions)
    # Unchanged files are not read again.
    with monkeypatch.context() as patched:
        patched.setattr(own_files, '_opened', None)
        assert text(path).version == versions[-1]
    packed = {f'{name}.gz': gzip.compress(data.encode()) for name, data in SPLIT.items()}
    compressed = text(write(tmp_path / 'packed', packed))
    assert compressed.version == versions[0] and read(compressed) == parts
    # A byte order mark is no text; byte 0 is, for tokenizers that do not separate documents by it.
    marked = write(tmp_path / 'marked', {'train.txt': '\ufeffa\nb\n', 'test.txt': 'd\0'})
    corpus = own_files.text(DataConfig(path=str(marked), tokenizer='characters'))
    assert read(corpus) == {'train': [b'a\nb\n'], 'test': [b'd\0']}


def test_a_file_may_be_in_a_bucket(bucket, tmp_path):
    whole = 'one\ntwo\n' * 100
    files = {'train.txt': whole, 'validation.txt.gz': gzip.compress(whole.encode())}
    local = text(write(tmp_path, files))
    for name in files:
        bucket.put('runs', f'text/{name}', (tmp_path / name).read_bytes())
    there = text('gs://runs/text')
    assert (there.version, read(there)) == (local.version, read(local))
    bucket.put('runs', 'text/train.txt', b'other\n')
    assert text('gs://runs/text').version != local.version
    bucket.put('runs', 'folders/train/a.txt', b'a\n')
    with refused("'gs://runs/folders/train' is a folder in a bucket; give its text as one file"):
        read(text('gs://runs/folders'))


def test_lines_of_parallel_files_are_documents(tmp_path):
    corpus = parallel(write(tmp_path, PAIRS))
    assert (corpus.name, corpus.languages) == ('parallel-en-de', ('en', 'de'))
    assert corpus.splits == ('train', 'validation')
    assert read(corpus, 'en') == {'train': [b'one', b'two'], 'validation': [b'three']}
    assert read(corpus, 'de') == {'train': [b'eins', b'zwei'], 'validation': [b'drei']}
    assert parallel(tmp_path, 'de-en').name == 'parallel-de-en'
    assert parallel(write(tmp_path, {'test.en': 'x', 'test.de': 'y'})).splits[2] == 'test'


def test_marks_odd_line_breaks_and_blank_lines_of_parallel_files(tmp_path, caplog):
    """A byte order mark is no text, only line feeds end lines, blank pairs are counted."""
    source = '\ufeffa\u2028b\x85\x0cc\rd\r\n\ntwo\n \n'
    target = '\ufeffeins\n\r\nzwei\n\u3000'
    corpus = parallel(write(tmp_path, PAIRS | {'train.en': source, 'train.de': target}))
    with caplog.at_level(logging.INFO):
        assert read(corpus, 'en')['train'] == ['a\u2028b\x85\x0cc\rd'.encode(), b'two']
        assert read(corpus, 'de')['train'] == [b'eins', b'zwei']
    assert caplog.messages == ['Left out 2 pairs of blank lines of train']


PACKED = gzip.compress(b'some text ' * 100)
DAMAGED = (PACKED[:-20], b'not gzip', PACKED[:30] + b'????' + PACKED[34:])


@pytest.mark.parametrize(
    ('path', 'files', 'says'),
    [
        ('x', {}, "data.path='.*/x' does not exist"),
        ('', {}, r"train.txt' is missing; .* train.txt or train.txt.gz"),
        ('', {'validation.txt': 'x'}, "train.txt' is missing"),
        ('', SPLIT | {'train.txt.gz': PACKED}, 'both train.txt and train.txt.gz; keep one'),
        ('', SPLIT | {'train.txt': ''}, "train.txt' is empty"),
        ('', SPLIT | {'train.txt': 'a\nb\0\n'}, 'line 2, holds byte 0, .*another tokenizer'),
        *(
            ('x.gz', {'x.gz': data}, r"x.gz' cannot be read .*in gzip format\.$")
            for data in DAMAGED
        ),
        ('x', {'x': 'one line'}, r"'.*x' is too small .*\(8 bytes\); give more text"),
        ('x', {'x': 'a\n' * 9}, r'is too small .*\(18 bytes\); give more text'),
        (None, {'train.de': 'eins\n\n'}, "train.de', line 2, is blank, .*train.en' is not"),
        (None, {'train.en': '\n', 'train.de': '\n'}, 'holds blank lines only'),
        (None, {'validation.de': 'd\nv\nf'}, "1 in '.*validation.en' and 3 in '.*validation.de'"),
        (None, {'test.en': 'x'}, "holds 'test' in one language only; test.de is missing"),
        (None, {'train.de': None}, "train.de' is missing"),
        (None, {'train.de': ''}, "train.de' is empty"),
        (None, {'train.en': b'one\xff\ntwo\n'}, "train.en', line 1, is not UTF-8"),
        ('x', {'x': 'grün\nblau\n'.encode() + b'gelb\xe4\nrot\n'}, 'line 3, is not UTF-8'),
        ('x', {'x': b'a\nb\n' * 20 + b'\xc3'}, r'line 41, is not UTF-8 \(unexpected end'),
        (None, {'train.en': 'one\ntwo\0\n'}, "train.en', line 2, holds byte 0"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, path, files, says):
    """Of text, and where there is no path, of parallel text read in either language."""
    write(tmp_path, files if path is not None else PAIRS | files)
    for language in ('en', 'de'):
        with refused(says):
            read(parallel(tmp_path), language) if path is None else read(text(tmp_path / path))


def test_files_and_directories_are_not_confused(tmp_path):
    with refused(r'is a file; .* train.en, train.de, .* validation.de'):
        parallel(write(tmp_path, {'validation.txt': 'x'}) / 'validation.txt')
    (tmp_path / 'train.txt').mkdir()
    with refused(r"train.txt' cannot be read \(.*directory"):
        text(tmp_path)

import gzip
import logging

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import own_files
from qkattn.data.corpora.corpus_registry import find
from qkattn.errors import ConfigError


def write(directory, **files):
    """Writes files named train__en for 'train.en'; text or bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (directory / name.replace('__', '.')).write_bytes(data)
    return directory


def text(path, **options):
    return find(DataConfig(name='text', path=str(path), **options))


def parallel(path, languages='en-de', **options):
    return find(DataConfig(name='parallel', path=str(path), languages=languages, **options))


def read(corpus, language=None):
    return {split: list(texts) for split, texts in corpus.documents(language).items()}


SPLIT = {'train__txt': 'a\nb\n', 'validation__txt': 'c\n'}
PAIRS = {
    'train__en': 'one\ntwo\n',
    'train__de': 'eins\nzwei\n',
    'validation__en': 'three\n',
    'validation__de': 'drei\n',
}


def test_file_is_cut_at_line_ends_90_5_5(tmp_path):
    lines = [f'line {i:03d}\n'.encode() for i in range(200)]
    path = tmp_path / 'book.txt'
    path.write_bytes(b''.join(lines)[:-1])
    corpus = text(path)
    assert (corpus.name, corpus.languages) == ('text', ())
    assert corpus.splits == ('train', 'validation', 'test')
    documents = read(corpus)
    assert [len(d) for d in documents.values()] == [1, 1, 1]
    assert b''.join(d for (d,) in documents.values()) == b''.join(lines)[:-1]
    assert [d[0].count(b'\n') for d in documents.values()] == [180, 10, 9]
    assert documents['train'][0].endswith(b'\n')


@pytest.mark.parametrize('content', ['one line, however long it may be', 'a\nb\nc\n', 'a\n' * 9])
def test_file_too_small_for_three_splits_is_refused(tmp_path, content):
    (tmp_path / 'x.txt').write_text(content)
    with pytest.raises(ConfigError, match=r"x.txt' is too small .*\(\d+ bytes\); give more text"):
        text(tmp_path / 'x.txt').documents(None)


def test_directory_has_a_file_per_split(tmp_path):
    corpus = text(write(tmp_path, **SPLIT))
    assert corpus.splits == ('train', 'validation')
    assert read(corpus) == {'train': [b'a\nb\n'], 'validation': [b'c\n']}
    corpus = text(write(tmp_path, test__txt='d'))
    assert read(corpus) == {'train': [b'a\nb\n'], 'validation': [b'c\n'], 'test': [b'd']}


def test_compressed_files_are_the_same_text(tmp_path):
    plain = text(write(tmp_path / 'plain', **SPLIT))
    packed = {f'{name}__gz': gzip.compress(data.encode()) for name, data in SPLIT.items()}
    compressed = text(write(tmp_path / 'packed', **packed))
    assert compressed.version == plain.version
    assert read(compressed) == read(plain)


def test_version_changes_with_the_text(tmp_path):
    versions = {text(write(tmp_path, **SPLIT)).version}
    versions.add(text(write(tmp_path, train__txt='a\nB\n')).version)
    versions.add(text(write(tmp_path, test__txt='d')).version)
    versions.add(text(write(tmp_path, test__txt='c\n', validation__txt='d')).version)
    assert len(versions) == 4
    assert all(version.startswith('sha256-') and len(version) == 7 + 16 for version in versions)


def test_unchanged_files_are_not_read_again(tmp_path, monkeypatch):
    version = text(write(tmp_path, **SPLIT)).version
    monkeypatch.setattr(own_files, '_blocks', None)
    assert text(tmp_path).version == version


def test_signature_of_utf_8_is_no_text(tmp_path):
    signed = {name: b'\xef\xbb\xbf' + data.encode() for name, data in SPLIT.items()}
    assert read(text(write(tmp_path, **signed)))['train'] == [b'a\nb\n']
    signed = {name: b'\xef\xbb\xbf' + data.encode() for name, data in PAIRS.items()}
    assert read(parallel(write(tmp_path, **signed)), 'en')['train'] == [b'one', b'two']


def test_lines_of_parallel_files_are_documents(tmp_path):
    corpus = parallel(write(tmp_path, **PAIRS))
    assert (corpus.name, corpus.languages) == ('parallel-en-de', ('en', 'de'))
    assert corpus.splits == ('train', 'validation')
    assert read(corpus, 'en') == {'train': [b'one', b'two'], 'validation': [b'three']}
    assert read(corpus, 'de') == {'train': [b'eins', b'zwei'], 'validation': [b'drei']}
    assert parallel(tmp_path, 'de-en').name == 'parallel-de-en'
    assert parallel(write(tmp_path, test__en='x', test__de='y')).splits[2] == 'test'


def test_only_line_feeds_end_lines(tmp_path):
    files = PAIRS | {'train__en': 'a\u2028b\x85\x0cc\rd\r\ntwo', 'train__de': 'eins\nzwei'}
    documents = read(parallel(write(tmp_path, **files)), 'en')
    assert documents['train'] == ['a\u2028b\x85\x0cc\rd'.encode(), b'two']


def test_pairs_of_blank_lines_are_left_out_and_counted(tmp_path, caplog):
    files = PAIRS | {'train__en': '\none\n \n', 'train__de': '\r\neins\n\u3000\n'}
    corpus = parallel(write(tmp_path, **files))
    with caplog.at_level(logging.INFO):
        assert read(corpus, 'en')['train'] == [b'one']
        assert read(corpus, 'de')['train'] == [b'eins']
    assert [r.message for r in caplog.records] == ['Left out 2 pairs of blank lines of train']


@pytest.mark.parametrize(
    ('changed', 'says'),
    [
        ({'train__de': 'eins\n\n'}, r"train.de', line 2, is blank, .*train.en' is not"),
        ({'train__en': '\n', 'train__de': '\n'}, 'holds blank lines only'),
        (
            {'validation__de': 'drei\nvier\nfünf'},
            r"1 in '.*validation.en' and 3 in '.*validation.de'",
        ),
        ({'test__en': 'x'}, "holds 'test' in one language only; test.de is missing"),
        ({'train__de': None}, "train.de' is missing"),
        ({'train__en': None}, "train.en' is missing"),
        ({'train__de': ''}, "train.de' is empty"),
        ({'train__en': b'one\xff\ntwo\n'}, "train.en', line 1, is not UTF-8"),
        ({'train__en': 'one\ntwo\0\n'}, "train.en', line 2, holds byte 0"),
    ],
)
@pytest.mark.parametrize('language', ['en', 'de'])
def test_parallel_files_that_do_not_fit_are_named(tmp_path, changed, says, language):
    files = {name: data for name, data in (PAIRS | changed).items() if data is not None}
    with pytest.raises(ConfigError, match=says) as caught:
        read(parallel(write(tmp_path, **files)), language)
    assert '\n' not in str(caught.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data.path='/nowhere/x' does not exist"):
        text('/nowhere/x')
    with pytest.raises(ConfigError, match=r"train.txt' is missing; .* train.txt or train.txt.gz"):
        text(tmp_path)
    write(tmp_path, train__txt='x')
    with pytest.raises(ConfigError, match=r"validation.txt' is missing"):
        text(tmp_path)
    with pytest.raises(ConfigError, match=r'is a file; .* train.en, train.de, .* validation.de'):
        parallel(tmp_path / 'train.txt')
    write(tmp_path, **SPLIT, train__txt__gz=gzip.compress(b'x'))
    with pytest.raises(ConfigError, match=r'both train.txt and train.txt.gz; keep one'):
        text(tmp_path)


def test_empty_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"train.txt' is empty"):
        text(write(tmp_path / 'a', **(SPLIT | {'train__txt': ''})))
    packed = gzip.compress(b'some text ' * 100)
    for damaged in (packed[:-20], b'not gzip', packed[:30] + b'????' + packed[34:]):
        (tmp_path / 'x.gz').write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"x.gz' cannot be read .*in gzip format\.$"):
            text(tmp_path / 'x.gz')
    (tmp_path / 'b' / 'train.txt').mkdir(parents=True)
    write(tmp_path / 'b', validation__txt='x')
    with pytest.raises(ConfigError, match=r"train.txt' cannot be read \(.*directory"):
        text(tmp_path / 'b')


@pytest.mark.parametrize('block', [1, 3, 4, 1 << 20])
def test_line_that_is_not_utf_8_is_named(tmp_path, monkeypatch, block):
    monkeypatch.setattr(own_files, 'BLOCK', block)
    own_files._scan_blocks.cache_clear()
    (tmp_path / 'x.txt').write_bytes('grün\nblau\n'.encode() + b'gelb\xe4\nrot\n')
    with pytest.raises(ConfigError, match=r"x.txt', line 3, is not UTF-8"):
        text(tmp_path / 'x.txt')
    (tmp_path / 'x.txt').write_bytes(b'aa' + '€'.encode() + b'\xe4\nb\n')
    with pytest.raises(ConfigError, match=r"x.txt', line 1, is not UTF-8"):
        text(tmp_path / 'x.txt')
    (tmp_path / 'x.txt').write_bytes(b'a\nb\n' * 20 + 'ü'.encode()[:1])
    with pytest.raises(ConfigError, match=r"x.txt', line 41, is not UTF-8 \(unexpected end"):
        text(tmp_path / 'x.txt')


def test_byte_0_is_for_other_tokenizers(tmp_path):
    write(tmp_path, **(SPLIT | {'train__txt': 'a\nb\0\n'}))
    with pytest.raises(ConfigError, match=r"train.txt', line 2, holds byte 0, .*another tokenizer"):
        text(tmp_path)
    assert read(text(tmp_path, tokenizer='characters'))['train'] == [b'a\nb\0\n']

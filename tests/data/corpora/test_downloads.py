"""Files that are fetched once, and what is read from those of Multi30k and Tiny Shakespeare."""

import gzip
import hashlib
import os
import socket
from pathlib import Path

import pytest

from qkattn.config import DataConfig
from qkattn.data.cache import sha256_of
from qkattn.data.corpora import downloads
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.corpora.downloads import SourceFile, fetched
from tests.data.refusals import refused
from tests.data.web import serving, unplug

TEXT = b'one\ntwo\n'
SHA256 = hashlib.sha256(TEXT).hexdigest()
FAR = SourceFile('https://files.example.org/lines.txt', SHA256)
SPLITS = ('train', 'validation', 'test')


@pytest.fixture
def get(tmp_path):
    """Fetches one file into tmp_path/data; get(file, manual_dir=...)."""

    def get(file, **settings):
        return fetched('lines', file, DataConfig(data_dir=str(tmp_path / 'data'), **settings))

    return get


@pytest.fixture
def served(tmp_path):
    """A file on a web server, and its address."""
    path = tmp_path / 'served' / 'lines.txt'
    path.parent.mkdir()
    path.write_bytes(TEXT)
    with serving(path.parent) as url:
        yield path, SourceFile(f'{url}/lines.txt', SHA256)


def left(tmp_path):
    return [path.name for path in (tmp_path / 'data').rglob('*') if path.is_file()]


def test_a_file_is_downloaded_once_and_again_if_it_is_damaged(tmp_path, get, served, warnings):
    origin, file = served
    path = tmp_path / 'data' / 'downloads' / 'lines' / 'lines.txt'
    assert get(file) == path.read_bytes() == TEXT
    path.write_bytes(b'one\n')
    assert get(file) == path.read_bytes() == TEXT
    (warning,) = warnings
    assert f'{path} is damaged: its sha256 is' in warning
    origin.unlink()
    (path.parent / 'lock').unlink()
    assert get(file) == TEXT
    # Without the lock, so that the files may be on a read-only disk.
    assert left(tmp_path) == ['lines.txt']


def test_a_changed_and_a_missing_file_and_a_silent_server_are_refused(
    tmp_path, get, served, monkeypatch
):
    origin, file = served
    origin.write_bytes(b'one\nten\n')
    with refused(f'{file.url} has sha256 .* not {SHA256}; fetch'):
        get(file)
    assert left(tmp_path) == ['lock']
    with refused(f'{file.url}.gz.*404.*; fetch it by hand'):
        get(SourceFile(f'{file.url}.gz', SHA256))
    monkeypatch.setattr(downloads, 'TIMEOUT', (0.2, 0.2))
    with socket.create_server(('127.0.0.1', 0)) as silent:
        url = f'http://127.0.0.1:{silent.getsockname()[1]}/lines.txt'
        with refused(r'cannot be read .*timed out'):
            get(SourceFile(url, SHA256))


def test_no_network_is_one_sentence_at_once_and_manual_files_help(tmp_path, get, monkeypatch):
    asked = unplug(monkeypatch)
    with refused(
        r"^https://files.example.org/lines.txt cannot be read \(Failed to resolve '\S+' \(\[Errno "
        r'-2\] Name or .* not known\)\); .* set data.manual_dir to the directory that holds it.$'
    ):
        get(FAR)
    assert asked == ['files.example.org']
    assert left(tmp_path) == ['lock']
    path, manual = tmp_path / 'lines.txt', {'manual_dir': str(tmp_path)}
    with refused(rf"'{path}' cannot be read \(No such file or directory\); .*{FAR.url} there"):
        get(FAR, **manual)
    path.write_bytes(b'one\nten\n')
    with refused(f"'{path}' has sha256 .*, not {SHA256}; put the file"):
        get(FAR, **manual)
    assert left(tmp_path) == ['lock']
    path.write_bytes(TEXT)
    assert get(FAR, **manual) == TEXT
    path.unlink()
    assert get(FAR) == TEXT


@pytest.fixture
def opened(tmp_path):
    def make(name, **options):
        return find(DataConfig(name=name, data_dir=str(tmp_path / 'data'), **options))

    return make


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A directory of small files; three lines of Multi30k, with a line separator of Unicode."""

    def stored(file, content):
        (tmp_path / file.name).write_bytes(content)
        return SourceFile(file.url, hashlib.sha256(content).hexdigest())

    for name, file in downloads.CAPTIONS.items():
        text = ''.join(f'{name}\u2028{i}\n' for i in range(3))
        stored_file = stored(file, gzip.compress(text.encode()))
        monkeypatch.setitem(downloads.CAPTIONS, name, stored_file)
    # 101 characters in 202 bytes: the cut counts characters.
    play = ('ä' * 90 + 'ö' * 11).encode()
    monkeypatch.setattr(downloads, 'PLAYS', stored(downloads.PLAYS, play))
    return str(tmp_path)


@pytest.mark.parametrize('languages', ['en-de', 'de-en', 'fr-en'])
def test_a_line_of_multi30k_is_a_document_in_either_direction(opened, small, tmp_path, languages):
    corpus = opened('multi30k', languages=languages, manual_dir=small)
    assert (corpus.name, corpus.splits) == (f'multi30k-{languages}', SPLITS)
    assert corpus.languages == tuple(languages.split('-'))
    assert not (tmp_path / 'data').exists()
    # Files of a third language are not needed.
    (missing,) = {'de', 'en', 'fr'} - set(corpus.languages)
    (tmp_path / f'train.{missing}.gz').unlink()
    for language in corpus.languages:
        texts = {split: list(texts) for split, texts in corpus.documents(language).items()}
        for split, part in zip(SPLITS, ('train', 'val', 'test_2016_flickr'), strict=True):
            assert texts[split] == [f'{part}.{language}\u2028{i}'.encode() for i in range(3)]


def test_first_nine_tenths_of_the_characters_of_the_play_train(opened, small, tmp_path):
    corpus = opened('tiny_shakespeare', manual_dir=small)
    assert (corpus.name, corpus.languages) == ('tiny_shakespeare', ())
    assert (corpus.version, corpus.splits) == ('1.0.0', SPLITS[:2])
    assert not (tmp_path / 'data').exists()
    parts = {'train': [('ä' * 90).encode()], 'validation': [('ö' * 11).encode()]}
    assert corpus.documents(None) == parts


def test_the_sentence_says_what_to_fetch(opened, tmp_path, monkeypatch):
    unplug(monkeypatch)
    with refused("no 'es'; valid: two of 'de', 'en', 'fr'"):
        opened('multi30k', languages='en-es')
    with refused(r'raw/train.en.gz cannot be read .* data.manual_dir'):
        opened('multi30k', languages='en-fr').documents('en')
    (tmp_path / 'input.txt').write_text('To be, or not to be')
    with refused('has sha256 .*, not 86c4e6aa'):
        opened('tiny_shakespeare', manual_dir=str(tmp_path)).documents(None)


@pytest.mark.skipif(
    'QKATTN_TEST_FILES' not in os.environ,
    reason='set QKATTN_TEST_FILES=... to a directory with multi30k/train.en.gz and so on, and '
    'tiny_shakespeare/input.txt',
)
def test_the_real_files(opened):
    root = Path(os.environ['QKATTN_TEST_FILES'])
    for file in downloads.CAPTIONS.values():
        assert sha256_of(root / 'multi30k' / file.name) == file.sha256
    captions = opened('multi30k', languages='de-en', manual_dir=str(root / 'multi30k'))
    texts = {split: list(texts) for split, texts in captions.documents('de').items()}
    assert [len(texts[split]) for split in SPLITS] == [29000, 1014, 1000]
    play = opened('tiny_shakespeare', manual_dir=str(root / 'tiny_shakespeare')).documents(None)
    (train,), (validation,) = play['train'], play['validation']
    assert (len(train), len(validation)) == (1003854, 111540)
    assert train + validation == (root / 'tiny_shakespeare' / 'input.txt').read_bytes()

"""Files that are fetched once, and what is read from those of Multi30k and Tiny Shakespeare."""

import gzip
import hashlib
import itertools

import requests

from qkattn.config import DataConfig
from qkattn.data.corpora import downloads
from qkattn.data.corpora.corpus_registry import find
from tests.data.datasets import documents
from tests.refusals import refused

TEXT = b'one\ntwo\n'
URL = 'https://files.example.org/lines.txt'


def test_a_file_is_fetched_once_checked_and_again_if_it_is_damaged(tmp_path, monkeypatch, warnings):
    served = {}

    def get(url, timeout):
        if not served:
            raise requests.ConnectionError('Name or service not known')
        response = requests.Response()
        response.status_code, response._content = served[url]
        return response

    def fetched(**settings):
        return downloads.fetched('lines', URL, DataConfig(data_dir=str(tmp_path), **settings))

    monkeypatch.setattr(requests, 'get', get)
    monkeypatch.setitem(downloads.SHA256, 'lines.txt', hashlib.sha256(TEXT).hexdigest())
    manual, path = tmp_path / 'lines.txt', tmp_path / 'downloads' / 'lines' / 'lines.txt'
    by_hand = {'manual_dir': str(tmp_path)}
    with refused(f'^{URL} cannot be read .*not known.*; put {URL}, .* name it in data.manual_dir'):
        fetched()
    with refused(f'^{manual} cannot be read'):
        fetched(**by_hand)
    manual.write_bytes(b'one\nten\n')
    for settings in ({}, by_hand):
        served[URL] = 200, manual.read_bytes()
        with refused('has sha256 .*, not'):
            fetched(**settings)
    served[URL] = 404, TEXT
    with refused('404'):
        fetched()
    assert [file.name for file in path.parent.iterdir()] == ['lock']
    served[URL] = 200, TEXT
    assert fetched() == path.read_bytes() == TEXT
    path.write_bytes(b'one\n')
    assert fetched() == path.read_bytes() == TEXT
    (warning,) = warnings
    assert f'{path} is damaged: its sha256 is' in warning
    # Without the lock, so that the files may be on a read-only disk.
    (path.parent / 'lock').unlink()
    served.clear()
    assert fetched() == TEXT and not (path.parent / 'lock').exists()
    path.unlink()
    manual.write_bytes(TEXT)
    assert fetched(**by_hand) == TEXT


def test_documents_of_multi30k_are_lines_and_the_play_is_cut_by_characters(tmp_path, monkeypatch):
    def stored(name, content):
        (tmp_path / name).write_bytes(content)
        monkeypatch.setitem(downloads.SHA256, name, hashlib.sha256(content).hexdigest())

    def opened(name, **settings):
        files = {'data_dir': str(tmp_path / 'data'), 'manual_dir': str(tmp_path)}
        return find(DataConfig(name=name, **files, **settings))

    for part, language in itertools.product(downloads.CAPTION_PARTS.values(), ('de', 'fr')):
        # With a line separator of Unicode.
        text = ''.join(f'{part}.{language}\u2028{i}\n' for i in range(3))
        stored(f'{part}.{language}.gz', gzip.compress(text.encode()))
    # 101 characters in 202 bytes.
    stored('input.txt', ('ä' * 90 + 'ö' * 11).encode())
    corpus = opened('multi30k', languages='fr-de')
    assert corpus.name == 'multi30k-fr-de' and not (tmp_path / 'data').exists()
    for language in corpus.languages:
        assert documents(corpus, language) == {
            split: [f'{part}.{language}\u2028{i}'.encode() for i in range(3)]
            for split, part in downloads.CAPTION_PARTS.items()
        }
    parts = {'train': [('ä' * 90).encode()], 'validation': [('ö' * 11).encode()]}
    assert documents(opened('tiny_shakespeare')) == parts
    with refused("'en-es' must be two of de, en and fr"):
        opened('multi30k', languages='en-es')

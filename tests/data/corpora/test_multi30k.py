import gzip
import hashlib
import os
from pathlib import Path

import pytest

from qkattn.config import DataConfig
from qkattn.data.cache import sha256_of
from qkattn.data.corpora import multi30k
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.corpora.downloads import SourceFile
from qkattn.errors import ConfigError
from tests.data.web import unplug


def corpus(tmp_path, languages, manual_dir=None):
    return find(
        DataConfig(
            name='multi30k',
            languages=languages,
            data_dir=str(tmp_path / 'data'),
            manual_dir=manual_dir,
        )
    )


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A directory with three lines per file, one of which holds a line separator of Unicode."""
    files = {}
    for key, file in multi30k.FILES.items():
        split, language = key
        text = ''.join(f'{split} {language}\u2028{i}\n' for i in range(3))
        content = gzip.compress(text.encode())
        (tmp_path / file.name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        files[key] = SourceFile(file.url, digest)
    monkeypatch.setattr(multi30k, 'FILES', files)
    return str(tmp_path)


@pytest.mark.parametrize('languages', ['en-de', 'de-en', 'fr-en'])
def test_a_line_is_a_document_in_either_direction(tmp_path, small, languages):
    found = corpus(tmp_path, languages, small)
    assert found.name == f'multi30k-{languages}'
    assert found.languages == tuple(languages.split('-'))
    assert found.splits == ('train', 'validation', 'test')
    assert not (tmp_path / 'data').exists()
    for language in found.languages:
        assert {split: list(texts) for split, texts in found.documents(language).items()} == {
            split: [f'{split} {language}\u2028{i}'.encode() for i in range(3)]
            for split in found.splits
        }


def test_files_of_a_third_language_are_not_needed(tmp_path, small):
    for path in tmp_path.glob('*.fr.gz'):
        path.unlink()
    corpus(tmp_path, 'en-de', small).documents('en')
    with pytest.raises(ConfigError, match=r'train.fr.gz.* cannot be read'):
        corpus(tmp_path, 'en-fr', small).documents('en')


def test_unknown_language_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no 'es'; valid: two of 'de', 'en', 'fr'"):
        corpus(tmp_path, 'en-es')


def test_without_network_the_sentence_says_what_to_fetch(tmp_path, monkeypatch):
    unplug(monkeypatch)
    with pytest.raises(ConfigError, match=r'raw/train.en.gz cannot .* holds train.en.gz, train.fr'):
        corpus(tmp_path, 'en-fr').documents('en')


@pytest.mark.skipif(
    'QKATTN_TEST_FILES' not in os.environ,
    reason='set QKATTN_TEST_FILES=... to a directory with multi30k/train.en.gz and so on',
)
def test_the_real_files(tmp_path):
    directory = Path(os.environ['QKATTN_TEST_FILES']) / 'multi30k'
    documents = corpus(tmp_path, 'de-en', str(directory)).documents('de')
    texts = {split: list(texts) for split, texts in documents.items()}
    assert {split: len(t) for split, t in texts.items()} == {
        'train': 29000,
        'validation': 1014,
        'test': 1000,
    }
    with gzip.open(directory / 'test_2016_flickr.de.gz') as file:
        assert file.read() == b''.join(text + b'\n' for text in texts['test'])
    for (split, language), file in multi30k.FILES.items():
        assert sha256_of(directory / file.name) == file.sha256
        assert file.name.startswith(multi30k.PARTS[split]) and f'.{language}.' in file.name

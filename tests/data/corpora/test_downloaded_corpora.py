"""Multi30k and Tiny Shakespeare: which files they are made of, and what is read from them."""

import gzip
import hashlib
import os
from pathlib import Path

import pytest

from qkattn.config import DataConfig
from qkattn.data.cache import sha256_of
from qkattn.data.corpora import multi30k, tiny_shakespeare
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.corpora.downloads import SourceFile
from tests.data.refusals import refused
from tests.data.web import unplug

# 101 characters in 202 bytes: the cut counts characters.
PLAY = 'ä' * 90 + 'ö' * 11
SPLITS = ('train', 'validation', 'test')


@pytest.fixture
def corpus(tmp_path):
    def make(name, **options):
        return find(DataConfig(name=name, data_dir=str(tmp_path / 'data'), **options))

    return make


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A directory of small files; three lines of Multi30k, with a line separator of Unicode."""

    def stored(file, content):
        (tmp_path / file.name).write_bytes(content)
        return SourceFile(file.url, hashlib.sha256(content).hexdigest())

    files = {}
    for (split, language), file in multi30k.FILES.items():
        assert file.name.startswith(multi30k.PARTS[split]) and f'.{language}.' in file.name
        text = ''.join(f'{split} {language}\u2028{i}\n' for i in range(3))
        files[split, language] = stored(file, gzip.compress(text.encode()))
    monkeypatch.setattr(multi30k, 'FILES', files)
    monkeypatch.setattr(tiny_shakespeare, 'FILE', stored(tiny_shakespeare.FILE, PLAY.encode()))
    return str(tmp_path)


@pytest.mark.parametrize('languages', ['en-de', 'de-en', 'fr-en'])
def test_a_line_of_multi30k_is_a_document_in_either_direction(corpus, small, tmp_path, languages):
    found = corpus('multi30k', languages=languages, manual_dir=small)
    assert (found.name, found.splits) == (f'multi30k-{languages}', SPLITS)
    assert found.languages == tuple(languages.split('-'))
    assert not (tmp_path / 'data').exists()
    # Files of a third language are not needed.
    (missing,) = {'de', 'en', 'fr'} - set(found.languages)
    (tmp_path / multi30k.FILES['train', missing].name).unlink()
    for language in found.languages:
        assert {split: list(texts) for split, texts in found.documents(language).items()} == {
            split: [f'{split} {language}\u2028{i}'.encode() for i in range(3)] for split in SPLITS
        }


def test_first_nine_tenths_of_the_characters_of_the_play_train(corpus, small, tmp_path):
    found = corpus('tiny_shakespeare', manual_dir=small)
    assert (found.name, found.languages) == ('tiny_shakespeare', ())
    assert (found.version, found.splits) == (tiny_shakespeare.VERSION, SPLITS[:2])
    assert not (tmp_path / 'data').exists()
    assert {split: list(texts) for split, texts in found.documents(None).items()} == {
        'train': [('ä' * 90).encode()],
        'validation': [('ö' * 11).encode()],
    }


@pytest.mark.parametrize(
    ('name', 'languages', 'says'),
    [
        ('multi30k', 'en-es', "no 'es'; valid: two of 'de', 'en', 'fr'"),
        ('multi30k', 'en-fr', r'raw/train.en.gz cannot .* holds train.en.gz, train.fr'),
        ('tiny_shakespeare', None, r'char-rnn/.*input.txt cannot .* data.manual_dir to the'),
    ],
)
def test_without_network_the_sentence_says_what_to_fetch(
    corpus, tmp_path, monkeypatch, name, languages, says
):
    unplug(monkeypatch)
    with refused(says):
        corpus(name, languages=languages).documents(languages and 'en')
    (tmp_path / 'input.txt').write_text('To be, or not to be')
    with refused('has sha256 .*, not 86c4e6aa'):
        corpus('tiny_shakespeare', manual_dir=str(tmp_path)).documents(None)


@pytest.mark.skipif(
    'QKATTN_TEST_FILES' not in os.environ,
    reason='set QKATTN_TEST_FILES=... to a directory with multi30k/train.en.gz and so on, and '
    'tiny_shakespeare/input.txt',
)
def test_the_real_files(corpus):
    root = Path(os.environ['QKATTN_TEST_FILES'])
    for file in multi30k.FILES.values():
        assert sha256_of(root / 'multi30k' / file.name) == file.sha256
    captions = corpus('multi30k', languages='de-en', manual_dir=str(root / 'multi30k'))
    texts = {split: list(texts) for split, texts in captions.documents('de').items()}
    assert [len(texts[split]) for split in SPLITS] == [29000, 1014, 1000]
    with gzip.open(root / 'multi30k' / 'test_2016_flickr.de.gz') as file:
        assert file.read() == b''.join(text + b'\n' for text in texts['test'])
    play = corpus('tiny_shakespeare', manual_dir=str(root / 'tiny_shakespeare')).documents(None)
    (train,), (validation,) = play['train'], play['validation']
    assert (len(train), len(validation)) == (1003854, 111540)
    assert train + validation == (root / 'tiny_shakespeare' / 'input.txt').read_bytes()

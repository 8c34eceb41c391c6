import hashlib
import os
from pathlib import Path

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import tiny_shakespeare
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.corpora.downloads import SourceFile
from qkattn.errors import ConfigError
from tests.data.web import unplug

# 101 characters in 202 bytes: the cut counts characters.
PLAY = 'ä' * 90 + 'ö' * 11


def corpus(tmp_path, manual_dir):
    return find(
        DataConfig(name='tiny_shakespeare', data_dir=str(tmp_path / 'data'), manual_dir=manual_dir)
    )


def test_first_nine_tenths_of_the_characters_train(tmp_path, monkeypatch):
    content = PLAY.encode()
    file = SourceFile(tiny_shakespeare.FILE.url, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(tiny_shakespeare, 'FILE', file)
    (tmp_path / 'input.txt').write_bytes(content)
    found = corpus(tmp_path, str(tmp_path))
    assert (found.name, found.languages) == ('tiny_shakespeare', ())
    assert found.version == tiny_shakespeare.VERSION
    assert not (tmp_path / 'data').exists()
    documents = found.documents(None)
    assert tuple(documents) == found.splits == ('train', 'validation')
    assert {split: list(texts) for split, texts in documents.items()} == {
        'train': [('ä' * 90).encode()],
        'validation': [('ö' * 11).encode()],
    }


def test_without_network_the_sentence_says_what_to_fetch(tmp_path, monkeypatch):
    unplug(monkeypatch)
    with pytest.raises(ConfigError, match=r'char-rnn/.*input.txt cannot .* data.manual_dir to the'):
        corpus(tmp_path, None).documents(None)


def test_other_file_is_refused(tmp_path):
    (tmp_path / 'input.txt').write_text('To be, or not to be')
    with pytest.raises(ConfigError, match='has sha256 .*, not 86c4e6aa'):
        corpus(tmp_path, str(tmp_path)).documents(None)


@pytest.mark.skipif(
    'QKATTN_TEST_FILES' not in os.environ,
    reason='set QKATTN_TEST_FILES=... to a directory with tiny_shakespeare/input.txt',
)
def test_the_real_file(tmp_path):
    directory = Path(os.environ['QKATTN_TEST_FILES']) / 'tiny_shakespeare'
    documents = corpus(tmp_path, str(directory)).documents(None)
    (train,), (validation,) = documents['train'], documents['validation']
    assert (len(train), len(validation)) == (1003854, 111540)
    assert train + validation == (directory / 'input.txt').read_bytes()

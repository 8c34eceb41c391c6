import json
import math
import os

import numpy as np
import pytest

from qkattn.data import cache
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import open_dataset
from qkattn.errors import ConfigError

TEXTS = {'train': [b'aab', b'c'], 'validation': [b'abcd'], 'test': []}


class Corpus:
    """Opens TEXTS under a directory and counts how often the texts are asked for."""

    def __init__(self, data_dir):
        self.data_dir = data_dir
        self.num_builds = 0
        self.directory = data_dir / 'tokens' / 'letters' / '1.2' / 'bytes'

    def documents(self):
        self.num_builds += 1
        return TEXTS

    def open(self):
        return open_dataset(
            self.data_dir,
            name='letters',
            version='1.2',
            tokenizer=ByteTokenizer(),
            documents=self.documents,
        )


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(cache.log, 'warning', lambda text, *args: messages.append(text % args))
    return messages


def test_documents_end_with_a_separator(corpus):
    dataset = corpus.open()
    assert dataset.split('train').tobytes() == b'aab\0c\0'
    assert dataset.split('validation').tobytes() == b'abcd\0'
    assert dataset.split('train').dtype == np.uint8
    assert len(dataset.split('test')) == 0
    info = dataset.info('train')
    assert (info.num_documents, info.num_tokens, info.num_bytes) == (2, 6, 6)
    assert not dataset.split('train').flags.writeable


def test_unigram_entropy(corpus):
    # Frequencies 2, 1, 1, 2 of 6.
    expected = 2 * (2 / 6) * math.log(6 / 2) + 2 * (1 / 6) * math.log(6)
    found = corpus.open().info('train').unigram_nats_per_token
    assert found == pytest.approx(expected, rel=1e-12)


def test_bytes_per_token(numbers):
    assert numbers(train=64).bytes_per_token('train') == 2.0


def test_identity_is_json_and_tells_data_apart(corpus):
    identity = corpus.open().identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity['name'] == 'letters'
    assert identity['version'] == '1.2'
    assert identity['tokenizer'] == 'bytes'
    assert len(set(identity['fingerprints'].values())) == 3
    assert set(identity['fingerprints']) == {'train', 'validation', 'test'}


def test_unknown_split_lists_the_known(corpus):
    with pytest.raises(ConfigError, match="split='val' .* valid: 'train', 'validation', 'test'"):
        corpus.open().split('val')


def test_reopening_reads_the_cache(corpus, warnings):
    assert corpus.open().identity() == corpus.open().identity()
    assert (corpus.num_builds, warnings) == (1, [])


def flip(path):
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def relabel(path):
    path.write_text(path.read_text().replace('"1.2"', '"1.1"'))


@pytest.mark.parametrize(
    ('file', 'damage', 'says'),
    [
        ('train.bin', flip, 'its sha256 is'),
        ('validation.bin', cut, 'its sha256 is'),
        ('train.bin', os.unlink, 'it cannot be read'),
        ('train.json', os.unlink, 'it cannot be read'),
        ('train.json', relabel, "version is '1.1', not '1.2'"),
    ],
)
def test_a_damaged_cache_is_named_and_written_again(corpus, warnings, file, damage, says):
    before = corpus.open()
    identity, train = before.identity(), before.split('train').tobytes()
    damage(corpus.directory / file)
    after = corpus.open()
    assert after.identity() == identity
    assert after.split('train').tobytes() == train
    (warning,) = warnings
    assert f'{str(corpus.directory / file)!r} is damaged: {says}' in warning


def test_an_interrupted_write_is_finished_by_the_next(corpus, monkeypatch, warnings):
    def interrupted():
        yield b'aab'
        raise KeyboardInterrupt

    monkeypatch.setitem(TEXTS, 'train', interrupted())
    with pytest.raises(KeyboardInterrupt):
        corpus.open()
    monkeypatch.setitem(TEXTS, 'train', [b'aab', b'c'])
    assert corpus.open().split('train').tobytes() == b'aab\0c\0'
    assert not list(corpus.directory.glob('*.tmp'))
    assert not warnings

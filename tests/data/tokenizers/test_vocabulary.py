import json
import os
import re

import pytest

from qkattn.data import cache as data_cache
from qkattn.data.tokenizers.bpe import BPETokenizer
from qkattn.data.tokenizers.characters import CharacterTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from qkattn.errors import ConfigError

TEXTS = [b'peter piper picked a peck\n' * 3, b'of pickled peppers']
OTHER = [b'she sells sea shells by the sea shore\n' * 4]
KINDS = ('characters', 'bpe')


class Cache:
    """Opens tokenizers of TEXTS under a directory and counts how often the texts are asked for."""

    def __init__(self, data_dir):
        self.data_dir = data_dir
        self.root = data_dir / 'tokenizers' / 'rhymes' / '1.2'
        self.texts = TEXTS
        self.num_trained = 0

    def open(self, kind, size=270):
        def texts():
            self.num_trained += 1
            return iter(self.texts)

        return open_tokenizer(
            self.data_dir, kind=kind, size=size, name='rhymes', version='1.2', texts=texts
        )

    def directory(self, kind):
        return self.root / ('byte-bpe-270' if kind == 'bpe' else kind)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path)


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(data_cache.log, 'warning', lambda text, *args: messages.append(text % args))
    return messages


def test_each_kind_is_its_tokenizer(cache):
    assert isinstance(cache.open('bytes'), ByteTokenizer)
    assert cache.num_trained == 0 and not list(cache.data_dir.iterdir())
    assert cache.open('characters').name == CharacterTokenizer.train(TEXTS).name
    assert cache.open('bpe').name == BPETokenizer.train(TEXTS, 270).name
    assert cache.open('bpe', 265).vocab_size == 265
    directories = ['byte-bpe-265', 'byte-bpe-270', 'characters']
    assert sorted(path.name for path in cache.root.iterdir()) == directories
    with pytest.raises(ConfigError, match="data.tokenizer='words' .* 'bytes', 'characters', 'bpe'"):
        cache.open('words')


@pytest.mark.parametrize('kind', KINDS)
def test_reopening_reads_the_cache(cache, warnings, kind):
    first = cache.open(kind)
    again = cache.open(kind)
    assert again.name == first.name
    assert again.encode('peter').tolist() == first.encode('peter').tolist()
    assert (cache.num_trained, warnings) == (1, [])


def test_the_description_says_what_it_is(cache):
    cache.open('bpe')
    cache.open('characters')
    bpe, characters = (
        json.loads((cache.directory(kind) / 'about.json').read_text())
        for kind in ('bpe', 'characters')
    )
    assert (bpe['kind'], bpe['size'], characters['size']) == ('bpe', 270, None)
    assert re.fullmatch(r'tokenizers [\d.]+', bpe['trained_by'])
    assert bpe['text_sha256'] == characters['text_sha256']
    assert bpe['model_sha256'][:12] in cache.open('bpe').name
    # Every byte counts, and where documents end.
    for size, texts in ((265, [b''.join(TEXTS)]), (266, [TEXTS[0][::-1], TEXTS[1]])):
        cache.texts = texts
        cache.open('bpe', size)
        about = json.loads((cache.root / f'byte-bpe-{size}' / 'about.json').read_text())
        assert about['text_sha256'] != bpe['text_sha256']


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def relabel(path):
    path.write_text(re.sub('"kind": "[a-z]+"', '"kind": "words"', path.read_text()))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    ('file', 'damage', 'says'),
    [
        ('tokenizer.json', flip, 'its sha256 is'),
        ('tokenizer.json', os.unlink, 'it cannot be read'),
        ('about.json', os.unlink, 'it cannot be read'),
        ('about.json', relabel, "kind is 'words', not"),
    ],
)
def test_a_damaged_cache_is_named_and_trained_again(cache, warnings, kind, file, damage, says):
    before = cache.open(kind)
    files = {p.name: p.read_bytes() for p in cache.directory(kind).iterdir()}
    damage(cache.directory(kind) / file)
    assert cache.open(kind).name == before.name
    assert {p.name: p.read_bytes() for p in cache.directory(kind).iterdir()} == files
    assert cache.num_trained == 2
    (warning,) = warnings
    assert f'{str(cache.directory(kind) / file)!r} is damaged: {says}' in warning


@pytest.mark.parametrize('kind', KINDS)
def test_a_vocabulary_is_not_replaced_by_that_of_other_text(cache, warnings, kind):
    cache.open(kind)
    flip(cache.directory(kind) / 'tokenizer.json')
    cache.texts = OTHER
    for _ in range(2):  # The refusal leaves no file that the next opening would take.
        with pytest.raises(ConfigError, match='the training text has changed') as caught:
            cache.open(kind)
        assert f'{str(cache.directory(kind))!r}' in str(caught.value)
        assert '\n' not in str(caught.value)
    cache.texts = TEXTS
    cache.open(kind)


def test_a_vocabulary_is_not_replaced_by_that_of_another_trainer(cache, warnings, monkeypatch):
    cache.open('bpe')
    flip(cache.directory('bpe') / 'tokenizer.json')
    other = BPETokenizer.train(OTHER, 270)

    def train(texts, size):
        assert list(texts) == TEXTS
        return other

    monkeypatch.setattr(BPETokenizer, 'train', train)
    with pytest.raises(ConfigError, match='learns another one from the same text .* delete that'):
        cache.open('bpe')


def test_an_interrupted_training_is_done_by_the_next(cache, warnings):
    def interrupted():
        yield TEXTS[0]
        raise KeyboardInterrupt

    cache.texts = interrupted()
    with pytest.raises(KeyboardInterrupt):
        cache.open('bpe')
    cache.texts = TEXTS
    assert cache.open('bpe').name == BPETokenizer.train(TEXTS, 270).name
    assert not warnings

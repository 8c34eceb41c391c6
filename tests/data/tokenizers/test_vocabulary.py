import json
import os
import re

import pytest

from qkattn.data.tokenizers.bpe import BPETokenizer
from qkattn.data.tokenizers.characters import CharacterTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from tests.data.refusals import refused

TEXTS = [b'peter piper picked a peck\n' * 3, b'of pickled peppers']
OTHER = [b'she sells sea shells by the sea shore\n' * 4]
NAMES = {
    'characters': CharacterTokenizer.train(TEXTS).name,
    'bpe': BPETokenizer.train(TEXTS, 270).name,
}
every_kind = pytest.mark.parametrize('kind', NAMES)


@pytest.fixture
def opened(tmp_path):
    """Opens a tokenizer of `texts`; None if they must not be asked for."""

    def open(kind, texts=TEXTS, size=270):
        return open_tokenizer(
            tmp_path,
            kind=kind,
            size=size,
            name='rhymes',
            version='1.2',
            texts=lambda: iter(texts or pytest.fail('texts are read')),
        )

    return open


@pytest.fixture
def directory(tmp_path):
    """The directory of a kind of tokenizer."""
    names = {'bpe': 'byte-bpe-270', 'characters': 'characters'}
    return lambda kind: tmp_path / 'tokenizers' / 'rhymes' / '1.2' / names[kind]


def about(directory):
    return json.loads((directory / 'about.json').read_text())


def test_each_kind_is_its_tokenizer(opened, directory, tmp_path, warnings):
    assert isinstance(opened('bytes', None), ByteTokenizer)
    assert not list(tmp_path.iterdir())
    for kind, name in NAMES.items():
        assert opened(kind).name == name
        assert opened(kind, None).name == name
    assert opened('bpe', size=265).vocab_size == 265
    names = ['byte-bpe-265', 'byte-bpe-270', 'characters']
    assert sorted(path.name for path in directory('bpe').parent.iterdir()) == names
    with refused("data.tokenizer='words' .* 'bytes', 'characters', 'bpe'"):
        opened('words')
    assert not warnings


def test_the_description_says_what_it_is(opened, directory):
    names = {kind: opened(kind).name for kind in NAMES}
    bpe, characters = about(directory('bpe')), about(directory('characters'))
    assert (bpe['kind'], bpe['size'], characters['size']) == ('bpe', 270, None)
    assert re.fullmatch(r'tokenizers [\d.]+', bpe['trained_by'])
    assert bpe['text_sha256'] == characters['text_sha256']
    assert bpe['model_sha256'][:12] in names['bpe']
    # Every byte counts, and where documents end.
    for size, texts in ((265, [b''.join(TEXTS)]), (266, [TEXTS[0][::-1], TEXTS[1]])):
        opened('bpe', texts, size)
        other = about(directory('bpe').with_name(f'byte-bpe-{size}'))
        assert other['text_sha256'] != bpe['text_sha256']


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def relabel(path):
    path.write_text(re.sub('"kind": "[a-z]+"', '"kind": "words"', path.read_text()))


@every_kind
@pytest.mark.parametrize(
    ('file', 'damage', 'says'),
    [
        ('tokenizer.json', flip, 'its sha256 is'),
        ('tokenizer.json', os.unlink, 'it cannot be read'),
        ('about.json', os.unlink, 'it cannot be read'),
        ('about.json', relabel, "kind is 'words', not"),
    ],
)
def test_a_damaged_cache_is_named_and_trained_again(
    opened, directory, warnings, kind, file, damage, says
):
    opened(kind)
    files = {p.name: p.read_bytes() for p in directory(kind).iterdir()}
    damage(directory(kind) / file)
    assert opened(kind).name == NAMES[kind]
    assert {p.name: p.read_bytes() for p in directory(kind).iterdir()} == files
    (warning,) = warnings
    assert f'{str(directory(kind) / file)!r} is damaged: {says}' in warning


@every_kind
def test_a_vocabulary_is_not_replaced_by_that_of_other_text(opened, directory, kind):
    opened(kind)
    flip(directory(kind) / 'tokenizer.json')
    for _ in range(2):  # The refusal leaves no file that the next opening would take.
        with refused(f"'{directory(kind)}' .* the training text has changed"):
            opened(kind, OTHER)
    opened(kind)


def test_a_vocabulary_is_not_replaced_by_that_of_another_trainer(opened, directory, monkeypatch):
    opened('bpe')
    flip(directory('bpe') / 'tokenizer.json')
    other = BPETokenizer.train(OTHER, 270)
    monkeypatch.setattr(BPETokenizer, 'train', lambda texts, size: list(texts) and other)
    with refused('learns another one from the same text .* delete that'):
        opened('bpe')


def test_an_interrupted_training_is_done_by_the_next(opened, warnings):
    def interrupted():
        yield TEXTS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened('bpe', interrupted())
    assert opened('bpe').name == NAMES['bpe']
    assert not warnings

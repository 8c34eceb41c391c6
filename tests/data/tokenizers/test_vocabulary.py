import json
import re

import pytest

from qkattn.data.tokenizers.subwords import BPETokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from tests.data.refusals import refused

TEXTS = [b'peter piper picked a peck\n' * 3, b'of pickled peppers']
OTHER = [b'she sells sea shells by the sea shore\n' * 4]
NAMES = {
    'characters': CharacterTokenizer.train(TEXTS).name,
    'bpe': BPETokenizer.train(TEXTS, 270).name,
}
TYPES = {'characters': CharacterTokenizer, 'bpe': BPETokenizer}
DIRECTORY = {'characters': 'characters', 'bpe': 'byte-bpe-270'}
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
    return lambda kind: tmp_path / 'tokenizers' / 'rhymes' / '1.2' / DIRECTORY[kind]


def test_each_kind_is_its_tokenizer(opened, directory, tmp_path, warnings):
    assert isinstance(opened('bytes', None), ByteTokenizer)
    assert not list(tmp_path.iterdir())
    for kind, name in NAMES.items():
        assert opened(kind).name == name
        assert opened(kind, None).name == name
    assert opened('bpe', size=265).vocab_size == 265
    names = ['byte-bpe-265', 'byte-bpe-270', 'characters']
    assert sorted(path.name for path in directory('bpe').parent.iterdir()) == names
    with refused(
        "unknown data.tokenizer 'words'; known are bytes, characters, bpe, PATH.json, ids, or"
    ):
        opened('words')
    assert not warnings


def test_the_description_says_what_it_is(opened, directory):
    names = {kind: opened(kind).name for kind in NAMES}
    bpe, characters = (
        json.loads((directory(x) / 'about.json').read_text()) for x in ('bpe', 'characters')
    )
    assert (bpe['kind'], bpe['size'], characters['size']) == ('bpe', 270, None)
    assert re.fullmatch(r'tokenizers [\d.]+', bpe['trained_by'])
    assert bpe['text_sha256'] == characters['text_sha256']
    assert bpe['model_sha256'][:12] in names['bpe']
    # Every byte counts, and where documents end.
    for size, texts in ((265, [b''.join(TEXTS)]), (266, [TEXTS[0][::-1], TEXTS[1]])):
        opened('bpe', texts, size)
        path = directory('bpe').with_name(f'byte-bpe-{size}') / 'about.json'
        assert bpe['text_sha256'] not in path.read_text()


@every_kind
@pytest.mark.parametrize(
    ('file', 'damaged', 'says'),
    [
        ('tokenizer.json', lambda data: b'?' + data[1:], 'its sha256 is'),
        ('tokenizer.json', None, 'it cannot be read'),
        ('about.json', None, 'it cannot be read'),
        ('about.json', lambda data: data.replace(b'kind": "', b'kind": "x'), "kind is 'x.*', not"),
    ],
)
def test_a_damaged_cache_is_named_and_trained_again(
    opened, directory, warnings, kind, file, damaged, says
):
    opened(kind)
    files = {p.name: p.read_bytes() for p in directory(kind).iterdir()}
    path = directory(kind) / file
    path.write_bytes(damaged(files[file])) if damaged else path.unlink()
    assert opened(kind).name == NAMES[kind]
    assert {p.name: p.read_bytes() for p in directory(kind).iterdir()} == files
    (warning,) = warnings
    assert re.match(f'{path} is damaged: {says}', warning)


@every_kind
def test_a_damaged_vocabulary_is_not_replaced_by_another(opened, directory, monkeypatch, kind):
    opened(kind)
    (directory(kind) / 'tokenizer.json').write_bytes(b'damaged')
    for _ in range(2):  # The refusal leaves no file that the next opening would take.
        with refused(f"'{directory(kind)}' .* the training text has changed"):
            opened(kind, OTHER)
    train = TYPES[kind].train
    monkeypatch.setattr(
        TYPES[kind], 'train', lambda texts, **size: list(texts) and train(OTHER, **size)
    )
    with refused('learns another one from the same text .* delete that'):
        opened(kind)
    monkeypatch.undo()
    assert opened(kind).name == NAMES[kind]

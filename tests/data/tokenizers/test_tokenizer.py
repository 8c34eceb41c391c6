import numpy as np

from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from tests.refusals import refused

TEXTS = [b'banana\n', 'Äpfel 😀'.encode()]


def test_bytes_are_those_of_utf_8():
    tokenizer = ByteTokenizer()
    # A character that is cut.
    assert tokenizer.decode(tokenizer.encode('aé')[:-1]) == 'a\N{REPLACEMENT CHARACTER}'
    with refused('byte 0 at byte 2', ValueError):
        tokenizer.encode('ab\0c')


def test_characters_are_sorted_then_unknown_then_separator():
    tokenizer = CharacterTokenizer.train(TEXTS)
    assert tokenizer.vocab_size == len('\n abeflnpÄ😀') + 2
    assert tokenizer.encode('\n ab😀x').tolist() == [0, 1, 2, 3, 10, tokenizer.unknown]
    assert (tokenizer.unknown, tokenizer.separator) == (11, 12)
    loaded = CharacterTokenizer.load(tokenizer.model())
    assert (loaded.name, loaded.model()) == (tokenizer.name, tokenizer.model())
    # The name tells character sets apart.
    assert CharacterTokenizer.train(reversed(TEXTS)).name == tokenizer.name
    assert CharacterTokenizer.train([*TEXTS, b'x']).name != tokenizer.name
    # Ids take two bytes where one is too narrow.
    wide = ''.join(map(chr, range(0x100, 0x300)))
    ids = CharacterTokenizer.train([wide.encode()]).encode(wide)
    assert (ids.dtype, ids.tolist()) == (np.uint16, list(range(512)))
    # Separators are never read from text and count one byte like the unknown.
    ids = [*tokenizer.encode('aÖ😀'), tokenizer.separator]
    assert tokenizer.num_bytes(ids) == 1 + 1 + 4 + 1
    assert tokenizer.decode(ids) == 'a\N{REPLACEMENT CHARACTER}😀\0'
    nul = CharacterTokenizer.train([b'a\0b'])
    assert nul.separator not in nul.encode('a\0b')
    for text in (b'b\xff', 'b\ud800'):
        with refused('position 1', ValueError):
            tokenizer.encode(text)

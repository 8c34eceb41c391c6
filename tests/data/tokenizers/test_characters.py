import random
import string

import numpy as np
import pytest

from qkattn.data.tokenizers.characters import CharacterTokenizer
from tests.data.refusals import refused

TEXTS = [b'banana\n', 'Äpfel 😀'.encode()]
KNOWN = '\n abeflnpÄ😀'


@pytest.fixture
def tokenizer():
    return CharacterTokenizer.train(TEXTS)


def test_ids_are_the_sorted_characters_then_unknown_then_separator(tokenizer):
    assert tokenizer.vocab_size == len(KNOWN) + 2
    assert tokenizer.encode('\n ab😀').tolist() == [0, 1, 2, 3, 10]
    assert tokenizer.encode('xÖ').tolist() == [11, 11] == [tokenizer.unknown] * 2
    assert tokenizer.separator == 12
    # The name tells character sets apart.
    assert CharacterTokenizer.train(reversed(TEXTS)).name == tokenizer.name
    assert CharacterTokenizer.train([*TEXTS, b'x']).name != tokenizer.name
    # Tiny Shakespeare's 65 characters.
    letters = "\n !$&',-.3:;?" + string.ascii_letters
    assert len(letters) == 65
    assert CharacterTokenizer.train([letters.encode()]).vocab_size == 67
    # Ids take two bytes where one is too narrow.
    wide = ''.join(map(chr, range(0x100, 0x300)))
    ids = CharacterTokenizer.train([wide.encode()]).encode(wide)
    assert (ids.dtype, ids.tolist()) == (np.uint16, list(range(512)))


def test_text_of_known_characters_comes_back(tokenizer):
    text = ''.join(random.Random(0).choices(KNOWN, k=500))
    for trained in (tokenizer, CharacterTokenizer.load(tokenizer.model())):
        assert (trained.name, trained.model()) == (tokenizer.name, tokenizer.model())
        ids = trained.encode(text)
        assert ids.dtype == np.uint8
        assert trained.decode(ids) == trained.decode(ids.tolist()) == text
        assert np.array_equal(trained.encode(text.encode()), ids)
        assert trained.num_bytes(ids) == len(text.encode())
        assert trained.num_bytes([]) == 0 and trained.decode([]) == ''


def test_separators_are_never_read_from_text_and_count_one_byte_like_the_unknown(tokenizer):
    ids = [*tokenizer.encode('aÖ😀'), tokenizer.separator]
    assert tokenizer.num_bytes(ids) == 1 + 1 + 4 + 1
    assert tokenizer.decode(ids) == 'a\N{REPLACEMENT CHARACTER}😀\0'
    # U+0000 of a text is a character like others.
    ids = (nul := CharacterTokenizer.train([b'a\0b'])).encode('a\0b')
    assert nul.separator not in ids
    assert nul.decode(ids) == 'a\0b'


def test_text_that_is_no_unicode_is_one_sentence(tokenizer):
    for text, says in (
        ('ä'.encode() + b'b\xff', 'not valid UTF-8 at byte 3'),
        ('ä\ud800', 'half a surrogate pair, .* at byte 2'),
    ):
        with refused(says, ValueError):
            tokenizer.encode(text)

"""Bytes, characters, and ids alone."""

import string

import numpy as np
import pytest

from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer, IdTokenizer
from tests.data.refusals import refused

TEXTS = [b'banana\n', 'Äpfel 😀'.encode()]
KNOWN = '\n abeflnpÄ😀'


@pytest.fixture
def tokenizer():
    return CharacterTokenizer.train(TEXTS)


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = 'naïve → \N{SNOWMAN}\n\tdef f(): ...'
    ids = tokenizer.encode(text)
    assert (ids.dtype, list(ids)) == (np.uint8, list(text.encode()))
    # A character that is cut.
    assert tokenizer.decode(tokenizer.encode('aé')[:-1]) == 'a\N{REPLACEMENT CHARACTER}'
    with refused('byte 0 at byte 2', ValueError):
        tokenizer.encode('ab\0c')


def test_ids_are_the_sorted_characters_then_unknown_then_separator(tokenizer):
    assert tokenizer.vocab_size == len(KNOWN) + 2
    assert tokenizer.encode('\n ab😀').tolist() == [0, 1, 2, 3, 10]
    assert tokenizer.encode('xÖ').tolist() == [11, 11] == [tokenizer.unknown] * 2
    assert tokenizer.separator == 12
    loaded = CharacterTokenizer.load(tokenizer.model())
    assert (loaded.name, loaded.model()) == (tokenizer.name, tokenizer.model())
    assert tokenizer.decode([]) == '' and tokenizer.num_bytes([]) == 0
    # The name tells character sets apart.
    assert CharacterTokenizer.train(reversed(TEXTS)).name == tokenizer.name
    assert CharacterTokenizer.train([*TEXTS, b'x']).name != tokenizer.name
    # Tiny Shakespeare's 65 characters.
    letters = "\n !$&',-.3:;?" + string.ascii_letters
    assert CharacterTokenizer.train([letters.encode()]).vocab_size == 65 + 2
    # Ids take two bytes where one is too narrow.
    wide = ''.join(map(chr, range(0x100, 0x300)))
    ids = CharacterTokenizer.train([wide.encode()]).encode(wide)
    assert (ids.dtype, ids.tolist()) == (np.uint16, list(range(512)))


def test_separators_are_never_read_from_text_and_count_one_byte_like_the_unknown(tokenizer):
    ids = [*tokenizer.encode('aÖ😀'), tokenizer.separator]
    assert tokenizer.num_bytes(ids) == 1 + 1 + 4 + 1
    assert tokenizer.decode(ids) == 'a\N{REPLACEMENT CHARACTER}😀\0'
    # U+0000 of a text is a character like others.
    ids = (nul := CharacterTokenizer.train([b'a\0b'])).encode('a\0b')
    assert nul.separator not in ids and nul.decode(ids) == 'a\0b'


def test_text_that_is_no_unicode_is_one_sentence(tokenizer):
    for text, says in (
        ('ä'.encode() + b'b\xff', 'not valid UTF-8 at byte 3'),
        ('ä\ud800', 'half a surrogate pair, .* at byte 2'),
    ):
        with refused(says, ValueError):
            tokenizer.encode(text)


def test_ids_alone_have_no_text():
    assert (IdTokenizer().vocab_size, IdTokenizer().separator) == (50257, 50256)
    unseparated = IdTokenizer(vocab_size=65, separator=None)
    assert (unseparated.separator, unseparated.name) == (65, 'ids-65-none')
    for use in (unseparated.encode, unseparated.decode, unseparated.num_bytes):
        with refused('has no text, only ids'):
            use([1])
    with refused(r'separator=65 must be in \[0, vocab_size=65\)'):
        IdTokenizer(vocab_size=65, separator=65)

import random
import string

import numpy as np
import pytest

from qkattn.data.tokenizers.characters import CharacterTokenizer

TEXTS = [b'banana\n', 'Äpfel 😀'.encode()]


@pytest.fixture
def tokenizer():
    return CharacterTokenizer.train(TEXTS)


def test_ids_are_the_sorted_characters_then_unknown_then_separator(tokenizer):
    assert tokenizer.vocab_size == len('\n abeflnpÄ😀') + 2
    assert tokenizer.encode('\n ab😀').tolist() == [0, 1, 2, 3, 10]
    assert tokenizer.encode('xÖ').tolist() == [11, 11] == [tokenizer.unknown] * 2
    assert tokenizer.separator == 12


def test_the_vocabulary_has_no_spare_ids():
    # Tiny Shakespeare's 65 characters.
    letters = "\n !$&',-.3:;?" + string.ascii_letters
    assert len(letters) == 65
    assert CharacterTokenizer.train([letters.encode()]).vocab_size == 67


def test_text_of_known_characters_comes_back(tokenizer):
    text = ''.join(random.Random(0).choices('\n abeflnpÄ😀', k=500))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text
    assert np.array_equal(tokenizer.encode(text.encode()), ids)
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert tokenizer.num_bytes([]) == 0 and tokenizer.decode([]) == ''


def test_ids_take_two_bytes_where_one_is_too_narrow():
    text = ''.join(map(chr, range(0x100, 0x300)))
    tokenizer = CharacterTokenizer.train([text.encode()])
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(range(512))


def test_unknown_characters_and_separators_count_one_byte(tokenizer):
    ids = [*tokenizer.encode('aÖ😀'), tokenizer.separator]
    assert tokenizer.num_bytes(ids) == 1 + 1 + 4 + 1
    assert tokenizer.decode(ids) == 'a\N{REPLACEMENT CHARACTER}😀\0'


def test_no_text_reads_as_the_end_of_a_document():
    tokenizer = CharacterTokenizer.train([b'a\0b'])
    ids = tokenizer.encode('a\0b')
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == 'a\0b'


def test_the_name_tells_character_sets_apart(tokenizer):
    assert CharacterTokenizer.train(reversed(TEXTS)).name == tokenizer.name
    assert CharacterTokenizer.train([*TEXTS, b'x']).name != tokenizer.name


def test_a_saved_tokenizer_is_the_same(tokenizer):
    loaded = CharacterTokenizer.load(tokenizer.model())
    assert loaded.name == tokenizer.name
    assert loaded.encode('banana Äpfel 😀').tolist() == tokenizer.encode('banana Äpfel 😀').tolist()
    assert loaded.model() == tokenizer.model()


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        ('ä'.encode() + b'b\xff', 'not valid UTF-8 at byte 3'),
        ('ä\ud800', 'half a surrogate pair, .* at byte 2'),
    ],
)
def test_text_that_is_no_unicode_is_one_sentence(tokenizer, text, says):
    with pytest.raises(ValueError, match=says) as caught:
        tokenizer.encode(text)
    assert '\n' not in str(caught.value)

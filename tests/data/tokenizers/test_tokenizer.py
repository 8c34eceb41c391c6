import numpy as np
import pytest

from qkattn.data.tokenizers.tokenizer import ByteTokenizer


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = 'naïve → \N{SNOWMAN}\n\tdef f(): ...'
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert list(ids) == list(text.encode())
    assert np.array_equal(tokenizer.encode(text.encode()), ids)
    assert tokenizer.decode(ids.astype(np.int32)) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())


def test_a_cut_character_decodes_to_a_replacement():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode('aé')[:-1]) == 'a\N{REPLACEMENT CHARACTER}'


def test_the_separator_is_refused_in_text():
    with pytest.raises(ValueError, match='byte 0 at byte 2'):
        ByteTokenizer().encode('ab\0c')

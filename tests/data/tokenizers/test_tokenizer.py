import numpy as np

from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.refusals import refused


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = 'naïve → \N{SNOWMAN}\n\tdef f(): ...'
    ids = tokenizer.encode(text)
    assert (ids.dtype, list(ids)) == (np.uint8, list(text.encode()))
    assert np.array_equal(tokenizer.encode(text.encode()), ids)
    assert tokenizer.decode(ids.astype(np.int32)) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    # A character that is cut.
    assert tokenizer.decode(tokenizer.encode('aé')[:-1]) == 'a\N{REPLACEMENT CHARACTER}'
    with refused('byte 0 at byte 2', ValueError):
        tokenizer.encode('ab\0c')

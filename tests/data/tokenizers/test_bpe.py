import random
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from qkattn.data.corpora.stdlib_text import module_paths
from qkattn.data.tokenizers import bpe
from qkattn.data.tokenizers.bpe import BPETokenizer
from qkattn.errors import ConfigError

ROOT = Path(sysconfig.get_path('stdlib'))
CODE = [(ROOT / path).read_bytes() for path in module_paths(ROOT)[:40]]
HELD_OUT = [(ROOT / path).read_bytes() for path in module_paths(ROOT)[40:60]]
ODD = [
    '',
    '\n',
    '\n\n\n',
    ' ',
    '    ',
    ' \n ',
    '\n    x\n\n        y\n',
    'a  b   c ',
    '\t\tx\ty\t',
    'a\r\nb\r',
    'nul \0 nul',
    # What sentencepiece uses for itself.
    '\u2581',
    'a\u2581b \u2581\u2581 c\n\u2581',
    '\u2585 \u2047',
    '<unk> <separator> <0x41> <s> </s>',
    # Unicode that normalization would change, and that few texts hold.
    'ä a\u0308 ﬁ ² Ⅳ \u00a0\u202f\u3000|',
    '😀 👩‍👩‍👧 日本語 עברית \ufeff\U0010ffff',
    '\x85 \u2028 \u2029 \x0b \x0c',
]


@pytest.fixture(scope='module')
def tokenizer():
    return BPETokenizer.train(CODE, 1000)


def pieces_as_bytes(tokenizer, ids):
    """Independent of the tokenizer's own tables: sentencepiece says what the pieces are."""
    pieces = [tokenizer._processor.id_to_piece(int(i)) for i in ids]
    return b''.join(
        bytes([int(piece[3:5], 16)])
        if re.fullmatch('<0x[0-9A-F]{2}>', piece)
        else piece.replace('\u2581', ' ').encode()
        for piece in pieces
    )


@pytest.mark.parametrize('text', ODD)
def test_odd_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert pieces_as_bytes(tokenizer, ids) == text.encode()


def test_source_code_comes_back_byte_for_byte(tokenizer):
    for text in CODE + HELD_OUT:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids).encode() == text
        assert tokenizer.num_bytes(ids) == len(text)
        assert len(ids) < len(text) / 1.4


def test_random_text_comes_back(tokenizer):
    rng = random.Random(0)
    pieces = [tokenizer.decode([i]) for i in range(259, tokenizer.vocab_size)]
    pools = [pieces, ODD, [' ', '\n', '\t', '\r', '\u2581', 'a']]
    for _ in range(1500):
        text = ''
        for _ in range(rng.randrange(30)):
            code = rng.randrange(rng.choice((128, 0x3000, sys.maxunicode + 1)))
            anything = '' if 0xD800 <= code < 0xE000 else chr(code)
            text += rng.choice([*map(rng.choice, pools), anything])
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.num_bytes(ids) == len(text.encode())
        # Neither the separator nor sentencepiece's unknown.
        assert ids.min(initial=99) > 1 and ids.max(initial=0) < tokenizer.vocab_size


def test_training_on_odd_text_keeps_it_lossless():
    tokenizer = BPETokenizer.train([text.encode() for text in ODD * 40] + CODE[:3], 600)
    for text in ODD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Lines with a character that sentencepiece reserves are learned from.
    assert len(BPETokenizer.train([b'queue \xe2\x96\x85 queue'] * 9, 268).encode('queue')) == 1


def test_lines_are_encoded_as_the_whole_text_would_be(tokenizer):
    text = CODE[0].decode()
    assert tokenizer.encode(text).tolist() == tokenizer._processor.encode(text)


def test_indentation_is_a_piece(tokenizer):
    assert len(tokenizer.encode('\n        ')) == 2
    assert len(tokenizer.encode('\n    ')) == 2


def test_the_size_is_exact_and_the_ids_fit(tokenizer):
    assert tokenizer.vocab_size == 1000
    ids = tokenizer.encode(CODE[0])
    assert ids.dtype == np.uint16
    assert (BPETokenizer.train([b'aaaa'], 261).encode('aa') < 261).all()


def test_two_trainings_learn_the_same(tokenizer):
    again = BPETokenizer.train(iter(CODE), 1000)
    assert again.model() == tokenizer.model()
    assert again.name == tokenizer.name
    assert re.fullmatch('bpe1000-[0-9a-f]{12}', again.name)
    assert BPETokenizer.train(CODE[1:], 1000).name != tokenizer.name


def test_a_saved_tokenizer_is_the_same(tokenizer):
    loaded = BPETokenizer.load(tokenizer.model())
    assert loaded.name == tokenizer.name
    assert loaded.encode(CODE[0]).tolist() == tokenizer.encode(CODE[0]).tolist()


def test_decoding_takes_whatever_a_model_writes(tokenizer):
    assert tokenizer.decode([tokenizer.separator, *tokenizer.encode('x')]) == '\0x'
    half = tokenizer.encode('😀')[:2]
    assert tokenizer.decode(half) == '\N{REPLACEMENT CHARACTER}'
    assert tokenizer.num_bytes(half) == 2
    assert tokenizer.num_bytes([tokenizer.separator]) == 1
    assert tokenizer.decode(range(1000)).startswith('\N{REPLACEMENT CHARACTER}\0\n\0\x01')


@pytest.mark.parametrize('size', [-1, 0, 1, 200, 262])
def test_too_small_a_size_names_the_smallest(size):
    with pytest.raises(ConfigError, match=f'data.tokenizer_size={size} .* at least 263') as caught:
        BPETokenizer.train([b'abc abc'], size)
    assert '\n' not in str(caught.value)
    assert BPETokenizer.train([b'abc abc'], 263).vocab_size == 263


@pytest.mark.parametrize('size', [300, 8192, 2**20])
def test_too_large_a_size_names_the_largest(size):
    with pytest.raises(ConfigError, match=f'data.tokenizer_size={size} .* at most ') as caught:
        BPETokenizer.train([b'abc abc'], size)
    assert '\n' not in str(caught.value)
    largest = int(re.search(r'at most (\d+)', str(caught.value))[1])
    assert BPETokenizer.train([b'abc abc'], largest).vocab_size == largest


def test_a_size_beyond_all_text_is_refused_before_any_work():
    with pytest.raises(ConfigError, match='data.tokenizer_size=1048577 must be at most 1048576'):
        BPETokenizer.train(iter(lambda: pytest.fail('text was read'), None), 2**20 + 1)


@pytest.mark.parametrize('texts', [[], [b''], [b'\n\n']])
def test_no_text_is_one_sentence(texts):
    with pytest.raises(ConfigError, match="data.tokenizer='bpe' .* training text is empty"):
        BPETokenizer.train(texts, 300)


def test_text_that_is_no_unicode_is_one_sentence(tokenizer):
    for use in (tokenizer.encode, lambda text: BPETokenizer.train([text], 300)):
        with pytest.raises(ValueError, match='no valid UTF-8 at byte 1'):
            use(b'a\xff')


def test_of_a_large_text_lines_from_everywhere_are_learned(monkeypatch):
    monkeypatch.setattr(bpe, 'MAX_TRAINING_BYTES', 1000)
    texts = [b'\n'.join(b'%06d' % (100 * i + j) for j in range(100)) for i in range(30)]
    lines = [int(line) for line in bpe._training_lines(texts)]
    assert lines == list(range(0, 3000, lines[1]))
    assert 500 <= 6 * len(lines) <= 1000
    monkeypatch.setattr(bpe, 'MAX_TRAINING_BYTES', 18_000)
    assert len(bpe._training_lines(texts)) == 3000


def test_no_line_is_too_long_to_learn_from():
    long = b'unimaginable ' * 2000
    assert len(BPETokenizer.train([long], 290).encode('unimaginable')) == 1
    assert len(BPETokenizer.train([long], 290).encode(' unimaginable')) <= 2


def test_training_prints_nothing(capfd):
    BPETokenizer.train(CODE[:3], 500)
    assert capfd.readouterr() == ('', '')

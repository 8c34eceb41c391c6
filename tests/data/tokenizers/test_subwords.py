"""Sub-words that are learned, and those of a tokenizer.json of the Hugging Face library."""

import random
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from qkattn.config import DataConfig
from qkattn.data.corpora.python_text import modules
from qkattn.data.load import load
from qkattn.data.tokenizers import subwords
from qkattn.data.tokenizers.subwords import BPETokenizer, FileTokenizer
from tests.data.refusals import refused

ROOT = Path(sysconfig.get_path('stdlib'))
TEXTS = [(ROOT / path).read_bytes() for path in modules(ROOT)[:50]]
CODE, HELD_OUT = TEXTS[:15], TEXTS[40:]
ODD = [
    *('', '\n', '\n\n\n', ' ', '    ', ' \n ', '\n    x\n\n        y\n', 'a  b   c '),
    *('\t\tx\ty\t', 'a\r\nb\r', 'nul \0 nul'),
    # How the library writes a space and a newline, and what may be special elsewhere.
    *('Ġ Ċ aĠb', '<|endoftext|> <unk> <0x41> <s> </s> [MASK]'),
    # Unicode that normalization would change, and that few texts hold.
    'ä a\u0308 ﬁ ² Ⅳ \u00a0\u202f\u3000|',
    '😀 👩‍👩‍👧 日本語 עברית \ufeff\U0010ffff',
    '\x85 \u2028 \u2029 \x0b \x0c',
]
TEXT = 'the fox saw the grapes\nthe fox left the gräpes'


@pytest.fixture(scope='module')
def tokenizer():
    return BPETokenizer.train(CODE, 1000)


def random_texts(pieces):
    rng = random.Random(0)
    pools = [pieces, ODD, [' ', '\n', '\t', '\r', '\0', 'a']]
    for _ in range(1500):
        text = ''
        for _ in range(rng.randrange(30)):
            code = rng.randrange(rng.choice((128, 0x3000, sys.maxunicode + 1)))
            anything = '' if 0xD800 <= code < 0xE000 else chr(code)
            text += rng.choice([*map(rng.choice, pools), anything])
        yield text


def test_every_text_comes_back_byte_for_byte(tokenizer):
    oddly_trained = BPETokenizer.train([text.encode() for text in ODD * 40] + CODE[:3], 600)
    pieces = [tokenizer.decode([i]) for i in range(257, tokenizer.vocab_size)]
    code = [text.decode() for text in CODE + HELD_OUT]
    for text in (*ODD, *random_texts(pieces), *code):
        for trained in (tokenizer, oddly_trained):
            ids = trained.encode(text)
            assert trained.decode(ids) == text
            assert trained.num_bytes(ids) == len(text.encode())
            assert ids.min(initial=99) > trained.separator == 0
            assert ids.max(initial=0) < trained.vocab_size
    for text in code:
        assert len(tokenizer.encode(text)) < len(text.encode()) / 1.4


def test_the_saved_file_is_the_librarys_and_encodes_whole_texts_alike(tokenizer, monkeypatch):
    loaded = BPETokenizer.load(tokenizer.model())
    library = tokenizers.Tokenizer.from_buffer(tokenizer.model())
    assert library.get_vocab_size() == 1000 and library.token_to_id('\0') == 0
    monkeypatch.setattr(subwords, 'LINES', 7)
    for text in (*CODE[:5], *HELD_OUT[:5], *(text.encode() for text in ODD if '\0' not in text)):
        assert loaded.encode(text).tolist() == library.encode(text.decode()).ids


def test_the_size_is_exact_and_every_training_learns_the_same(tokenizer):
    assert tokenizer.vocab_size == 1000
    assert tokenizer.encode(CODE[0]).dtype == np.uint16
    # Indentation is one id.
    assert len(tokenizer.encode('\n        ')) == len(tokenizer.encode('\n    ')) == 2
    smallest = BPETokenizer.train([b'aaaa'], 257)
    assert smallest.vocab_size == 257 and smallest.encode('').size == 0
    assert len(BPETokenizer.train([b'aaaa'], 258).encode('aaaa')) == 2
    if tokenizers.__version__ == '0.23.3':
        # Written down, so that neither process nor threads change it unnoticed.
        oddly_trained = BPETokenizer.train([text.encode() for text in ODD * 9], 340)
        assert oddly_trained.name == 'byte-bpe340-e53bcff4d710'
    assert BPETokenizer.train(CODE, 1000).name == tokenizer.name
    assert re.fullmatch('byte-bpe1000-[0-9a-f]{12}', tokenizer.name)
    assert BPETokenizer.train(CODE[1:], 1000).name != tokenizer.name


def test_any_ids_but_not_any_bytes_are_text(tokenizer):
    assert tokenizer.decode([tokenizer.separator, *tokenizer.encode('x')]) == '\0x'
    half = tokenizer.encode('😀')[:2]
    assert tokenizer.decode(half) == '\N{REPLACEMENT CHARACTER}'
    assert tokenizer.num_bytes(half) == 2
    for use in (tokenizer.encode, lambda text: BPETokenizer.train([text], 300)):
        with refused('not valid UTF-8 at byte 1', ValueError):
            use(b'a\xff')
    # Ids 1 to 256 are the bytes.
    assert tokenizer.num_bytes(np.arange(257)) == 257
    assert {tokenizer.decode([i]) for i in range(1, 257)} >= {chr(i) for i in range(128)}


@pytest.mark.parametrize(
    ('texts', 'size', 'says'),
    [
        *((None, size, f'_size={size} .* 257.*at most 1048576') for size in (-1, 256, 2**20 + 1)),
        ([b'abc abc'], 300, 'data.tokenizer_size=300 .* at most 260.$'),
        ([b'abc abc'], 2**20, 'data.tokenizer_size=1048576 .* at most 260.$'),
        ([b''], 300, 'data.tokenizer_size=300 .* at most 257.$'),
    ],
)
def test_text_and_size_that_do_not_fit_are_one_sentence(texts, size, says):
    # An impossible size is refused before any text is read.
    unread = iter(lambda: pytest.fail('text is read'), 0)
    with refused(says):
        BPETokenizer.train(unread if texts is None else texts, size)


@pytest.fixture
def words(tmp_path):
    """A lossy vocabulary of words that marks the ends of texts and cuts them off."""
    vocabulary = {'[UNK]': 0, '[CLS]': 1, 'the': 2, 'fox': 3, 'saw': 7}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(['[UNK]', '[CLS]'])
    tokenizer.post_processor = processors.TemplateProcessing('[CLS] $A', None, [('[CLS]', 1)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / 'words.json'))
    return str(tmp_path / 'words.json')


def test_a_lossless_file_gives_the_text_back(tmp_path):
    path = tmp_path / 'bpe.json'
    learned = BPETokenizer.train([TEXT.encode()], 270)
    path.write_bytes(learned.model())
    tokenizer = FileTokenizer(str(path))
    assert tokenizer.name == f'file-{learned.name[-12:]}'
    assert (tokenizer.vocab_size, tokenizer.separator) == (271, 270)
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint16 and np.array_equal(ids, learned.encode(TEXT))
    two = np.concatenate([ids, [270], ids, [270]])
    assert tokenizer.decode(two) == f'{TEXT}\0{TEXT}\0'
    assert tokenizer.num_bytes(two) == 2 * len(TEXT.encode()) + 2


def test_nothing_is_added_cut_or_counted_that_is_not_text(words):
    tokenizer = FileTokenizer(words)
    ids = tokenizer.encode('The fox saw [CLS] the grapes')
    assert ids.dtype == np.uint8 and tokenizer.separator == 8
    assert ids[:3].tolist() == [2, 3, 7] and ids[-2:].tolist() == [2, 0] and 1 not in ids
    assert tokenizer.num_bytes(ids) == len('the fox saw the')


def test_tokens_are_cached_by_the_content_of_the_file(tmp_path, words):
    (tmp_path / 'text.txt').write_text('the fox\n' * 100)
    config = DataConfig(
        name='text', path=str(tmp_path / 'text.txt'), tokenizer=words, data_dir=str(tmp_path)
    )
    dataset = load(config)
    assert dataset.identity()['tokenizer'] == FileTokenizer(words).name
    assert np.asarray(dataset.split('train'))[:4].tolist() == [2, 3, 2, 3]
    tokenizer = tokenizers.Tokenizer.from_file(words)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(words)
    assert load(config).identity()['tokenizer'] != dataset.identity()['tokenizer']


def test_what_is_no_tokenizer_is_one_sentence(tmp_path):
    with refused(r"data.tokenizer='.*absent.json' cannot be read \(No such file"):
        FileTokenizer(str(tmp_path / 'absent.json'))
    for content in ('', '{}', '[1]', '{"version": "1.0", "model": {"type": "None"}}'):
        (tmp_path / 'a.json').write_text(content)
        with refused('a.json. is not a tokenizer.json of the Hugging Face tokenizers library'):
            FileTokenizer(str(tmp_path / 'a.json'))

"""Tokenizers: bytes, characters, sub-words, files of the Hugging Face library."""

import random
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from qkattn.data.corpora.python_text import modules
from qkattn.data.tokenizers import subwords
from qkattn.data.tokenizers.subwords import BPETokenizer, FileTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from tests.refusals import refused

TEXTS = [b'banana\n', 'Äpfel 😀'.encode()]


def test_characters_are_sorted_then_unknown_then_separator():
    tokenizer = CharacterTokenizer.train(TEXTS)
    assert tokenizer.vocab_size == len('\n abeflnpÄ😀') + 2
    assert tokenizer.encode('\n ab😀x').tolist() == [0, 1, 2, 3, 10, tokenizer.unknown]
    assert (tokenizer.unknown, tokenizer.separator) == (11, 12)
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


def test_cut_characters_are_decoded_with_a_mark_and_what_is_no_text_is_refused():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode('aé')[:-1]) == 'a\N{REPLACEMENT CHARACTER}'
    for kind, text, says in (
        (tokenizer, 'ab\0c', 'byte 0 at byte 2'),
        (CharacterTokenizer.train(TEXTS), b'b\xff', 'position 1'),
        (CharacterTokenizer.train(TEXTS), 'b\ud800', 'position 1'),
        (BPETokenizer.train(TEXTS, 257), b'a\xff', 'byte 0xff in position 1'),
    ):
        with refused(says, ValueError):
            kind.encode(text)


PHRASES = [b'peter piper picked a peck\n' * 3, b'of pickled peppers']


def test_a_tokenizer_is_trained_once_unless_it_is_damaged(tmp_path, warnings):
    def open_or_train(kind, texts=PHRASES, size=270):
        """Opens a tokenizer; None as texts fails the test where they are read to train one."""
        return open_tokenizer(
            tmp_path, 'corpus/1.0.0', kind, size, lambda: texts or pytest.fail('texts are read')
        )

    assert open_or_train('bytes', None).name == 'bytes'
    assert not list(tmp_path.iterdir())

    letters = CharacterTokenizer.train(PHRASES)
    bpe = BPETokenizer.train(PHRASES, 270)
    for kind, folder, expected in (
        ('characters', 'characters', letters),
        ('bpe', 'byte-bpe-270', bpe),
    ):
        assert open_or_train(kind).name == expected.name
        assert open_or_train(kind, None).name == expected.name
        assert not warnings
        # A damaged file is written again, as it was.
        path = tmp_path / 'tokenizers/corpus/1.0.0' / folder / 'tokenizer.json'
        model = path.read_bytes()
        path.write_bytes(model[:-9])
        assert open_or_train(kind).name == expected.name
        assert path.read_bytes() == model
        assert warnings.pop().startswith(f'{path} is damaged')

    # Vocabularies of two sizes lie beside each other.
    assert open_or_train('bpe', size=265).vocab_size == 265
    assert open_or_train('bpe', None).vocab_size == 270
    with refused("'words'; known: bytes, characters, bpe, PATH.json, tiktoken:NAME, or"):
        open_or_train('words')


CODE = [path.read_bytes() for path in list(modules().values())[:25]]
ODD_TEXTS = [
    *('', '\n', '\n\n\n', ' ', '    ', ' \n ', '\n    x\n\n        y\n', 'a  b   c '),
    *('\t\tx\ty\t', 'a\r\nb\r', 'nul \0 nul'),
    *('Ġ Ċ aĠb', '<|endoftext|> <unk> <0x41> <s> </s> [MASK]'),
    'ä a\u0308 ﬁ ² Ⅳ \u00a0\u202f\u3000|',
    '😀 👩‍👩‍👧 日本語 עברית \ufeff\U0010ffff',
    '\x85 \u2028 \u2029 \x0b \x0c',
]


@pytest.fixture(scope='module')
def tokenizer():
    return BPETokenizer.train(CODE[:15], 1000)


def test_every_text_comes_back_byte_for_byte(tokenizer):
    oddly_trained = BPETokenizer.train([text.encode() for text in ODD_TEXTS * 40] + CODE[:3], 600)
    pieces = [tokenizer.decode([i]) for i in range(257, tokenizer.vocab_size)]
    anything = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    pools = [pieces, ODD_TEXTS, [' ', '\n', '\t', '\r', '\0', 'a'], anything[:0x3000], anything]
    rng = random.Random(0)
    chosen = [rng.choices(pools, k=rng.randrange(30)) for _ in range(500)]
    texts = [''.join(map(rng.choice, pools)) for pools in chosen]
    for text in (*ODD_TEXTS, *texts, *(text.decode() for text in CODE)):
        for trained in (tokenizer, oddly_trained):
            ids = trained.encode(text)
            assert trained.decode(ids) == text
            assert trained.num_bytes(ids) == len(text.encode())
            assert ids.min(initial=99) > trained.separator == 0
            assert ids.max(initial=0) < trained.vocab_size
    # All ids can be decoded; half a character becomes a mark.
    assert tokenizer.decode([tokenizer.separator, *tokenizer.encode('x')]) == '\0x'
    half = tokenizer.encode('😀')[:2]
    assert (tokenizer.decode(half), tokenizer.num_bytes(half)) == ('\N{REPLACEMENT CHARACTER}', 2)


def test_whole_texts_are_encoded_as_by_the_library(tokenizer, monkeypatch):
    library = tokenizers.Tokenizer.from_buffer(tokenizer.model())
    monkeypatch.setattr(subwords, 'LINES', 7)
    for text in (*CODE[:5], *CODE[-5:], *(text.encode() for text in ODD_TEXTS if '\0' not in text)):
        assert tokenizer.encode(text).tolist() == library.encode(text.decode()).ids


def test_a_vocabulary_that_is_learned_again_is_the_same(tokenizer):
    if tokenizers.__version__ == '0.23.3':
        # Written down, so that neither process nor threads change it unnoticed.
        oddly_trained = BPETokenizer.train([text.encode() for text in ODD_TEXTS * 9], 340)
        assert oddly_trained.name == 'byte-bpe340-e53bcff4d710'
    assert BPETokenizer.train(CODE[:15], 1000).name == tokenizer.name


def test_the_size_of_a_vocabulary_is_exact(tokenizer):
    assert tokenizer.vocab_size == 1000
    assert tokenizer.encode(CODE[0]).dtype == np.uint16
    smallest = BPETokenizer.train([b'aaaa'], 257)
    assert smallest.vocab_size == 257
    assert smallest.encode('').size == 0
    # An impossible size is refused before any text is read.
    for size, texts in ((256, None), (2**20 + 1, None), (300, [b'abc abc'])):
        with refused(f'data.tokenizer_size={size} must be'):
            BPETokenizer.train(texts, size)


def test_a_learned_vocabulary_that_is_read_from_a_file_has_the_same_ids(tmp_path):
    path = tmp_path / 'a.json'
    text = 'the fox saw\nthe gräpes'
    learned = BPETokenizer.train([text.encode()], 270)
    path.write_bytes(learned.model())
    tokenizer = FileTokenizer.open(str(path))
    assert tokenizer.name == f'file-{learned.name[-12:]}-end0'
    assert (tokenizer.vocab_size, tokenizer.separator) == (270, 0)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert np.array_equal(ids, learned.encode(text))


def test_a_vocabulary_file_adds_no_marks_and_cuts_no_text(tmp_path):
    """The file has a rule that puts [CLS] before a text, cuts it to 3 tokens and pads it to 9.

    None of this is applied. Unknown words and marks in the text become [UNK], of no bytes.
    """
    path = tmp_path / 'a.json'
    vocabulary = {'[UNK]': 0, '[CLS]': 1, 'the': 2, 'fox': 3, 'saw': 7}
    words = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(['[UNK]', '[CLS]'])
    words.post_processor = processors.TemplateProcessing('[CLS] $A', None, [('[CLS]', 1)])
    words.enable_truncation(3)
    words.enable_padding(length=9)
    words.save(str(path))
    tokenizer = FileTokenizer.open(str(path))
    ids = tokenizer.encode('the fox saw [CLS] the grapes')
    assert ids.dtype == np.uint8
    assert tokenizer.separator == 8
    assert ids[:3].tolist() == [2, 3, 7]
    assert ids[-2:].tolist() == [2, 0]
    assert 1 not in ids
    assert tokenizer.num_bytes(ids) == len('the fox saw the')


def test_a_file_without_a_vocabulary_is_refused(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('{"version": "1.0"}')
    with refused(f"data.tokenizer='{path}' cannot be read .*; give a tokenizer.json"):
        FileTokenizer.open(str(path))


def test_a_missing_vocabulary_is_refused(tmp_path):
    path = tmp_path / 'a.json'
    with refused(f"data.tokenizer='{path}' does not exist; give a tokenizer.json"):
        FileTokenizer.open(str(path))


def word_library(special, *, unknown='[UNK]', others=()):
    """A vocabulary of words with these special tokens, and others that are only added."""
    vocabulary = {unknown: 0, 'fox': 1}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(list(special))
    library.add_tokens(list(others))
    return library


def unigram_library(special):
    """A unigram model, which reads the spelling of its special token from text."""
    library = tokenizers.Tokenizer(models.Unigram([('<unk>', 0.0), ('</s>', -1.0), ('a', -1.0)], 0))
    library.add_special_tokens(special)
    return library


@pytest.mark.parametrize(
    ('library', 'separator', 'vocab_size'),
    [
        (word_library(['<|endoftext|>']), 2, 3),
        (word_library(['<s>', '</s>', '<pad>']), 3, 5),
        (word_library(['</s>', '<|endoftext|>']), 3, 4),
        (word_library(['<|over|>']), 2, 3),  # the only one that is special
        (word_library(['<s>', '<pad>']), 4, 5),  # none ends texts
        (word_library(['[UNK]']), 2, 3),  # unknown text would end one
        (word_library([], others=['<|endoftext|>']), 3, 4),  # read from text
        (word_library([]), 2, 3),
        (unigram_library(['</s>']), 3, 4),
    ],
)
def test_the_separator_is_the_end_of_text_of_the_file_or_an_added_id(
    tmp_path, library, separator, vocab_size
):
    library.save(str(tmp_path / 'a.json'))
    tokenizer = FileTokenizer.open(str(tmp_path / 'a.json'))
    assert (tokenizer.separator, tokenizer.vocab_size) == (separator, vocab_size)
    is_added = separator == vocab_size - 1 and separator == library.get_vocab_size()
    assert tokenizer.name.endswith(f'-end{separator}') != is_added
    assert separator not in tokenizer.encode('fox </s> <|endoftext|> <|over|> [UNK] a')
    ids = [*tokenizer.encode('fox'), separator, *tokenizer.encode('fox')]
    assert tokenizer.decode(ids).count('\0') == 1
    # As earlier versions did, which added an id to every vocabulary.
    old = tokenizer.with_added_separator()
    assert old.name == tokenizer.name.partition('-end')[0]
    assert old.separator == library.get_vocab_size() == old.vocab_size - 1

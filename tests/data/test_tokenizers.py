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
    tokenizer = CharacterTokenizer.train(TEXTS)  # 'banana\n' and 'Äpfel 😀'
    characters = '\n abeflnpÄ😀'
    assert tokenizer.vocab_size == len(characters) + 2
    assert tokenizer.encode(characters).tolist() == list(range(len(characters)))
    assert tokenizer.unknown == 11
    assert tokenizer.separator == 12
    assert tokenizer.encode('x').tolist() == [tokenizer.unknown]


def test_the_name_of_characters_tells_character_sets_apart():
    tokenizer = CharacterTokenizer.train(TEXTS)
    in_another_order = CharacterTokenizer.train(reversed(TEXTS))
    with_another_character = CharacterTokenizer.train([*TEXTS, b'x'])
    assert in_another_order.name == tokenizer.name
    assert with_another_character.name != tokenizer.name


def test_ids_of_many_characters_take_two_bytes():
    text = ''.join(chr(code) for code in range(0x100, 0x300))  # 512 characters
    ids = CharacterTokenizer.train([text.encode()]).encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(range(512))


def test_unknown_characters_and_separators_count_one_byte():
    tokenizer = CharacterTokenizer.train(TEXTS)  # without 'Ö'
    ids = [*tokenizer.encode('aÖ😀'), tokenizer.separator]
    assert tokenizer.num_bytes(ids) == 1 + 1 + 4 + 1
    assert tokenizer.decode(ids) == 'a\N{REPLACEMENT CHARACTER}😀\0'


def test_a_separator_of_characters_is_not_read_from_text():
    tokenizer = CharacterTokenizer.train([b'a\0b'])
    assert tokenizer.separator not in tokenizer.encode('a\0b')


def test_a_cut_character_is_decoded_with_a_mark():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode('aé')
    assert tokenizer.decode(ids[:-1]) == 'a\N{REPLACEMENT CHARACTER}'


def characters_of_texts():
    return CharacterTokenizer.train(TEXTS)


def smallest_bpe():
    return BPETokenizer.train(TEXTS, 257)


@pytest.mark.parametrize(
    ('make', 'text', 'message'),
    [
        pytest.param(ByteTokenizer, 'ab\0c', 'byte 0 at byte 2', id='byte 0'),
        pytest.param(characters_of_texts, b'b\xff', 'position 1', id='no UTF-8'),
        pytest.param(characters_of_texts, 'b\ud800', 'position 1', id='half a surrogate pair'),
        pytest.param(smallest_bpe, b'a\xff', 'byte 0xff in position 1', id='no UTF-8 for BPE'),
    ],
)
def test_text_that_cannot_be_encoded_is_refused(make, text, message):
    tokenizer = make()
    with refused(message, ValueError):
        tokenizer.encode(text)


PHRASES = [b'peter piper picked a peck\n' * 3, b'of pickled peppers']


def open_phrases(directory, kind, size=270):
    """Opens a tokenizer of the corpus PHRASES. The first call trains it."""
    return open_tokenizer(directory, 'corpus/1.0.0', kind, size, lambda: PHRASES)


def open_trained(directory, kind, size=270):
    """Opens a tokenizer. The test fails if this trains the tokenizer."""

    def no_texts():
        pytest.fail('the texts are read')

    return open_tokenizer(directory, 'corpus/1.0.0', kind, size, no_texts)


def test_bytes_are_not_trained(tmp_path):
    assert open_trained(tmp_path, 'bytes').name == 'bytes'
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('kind', 'folder', 'train'),
    [
        ('characters', 'characters', lambda: CharacterTokenizer.train(PHRASES)),
        ('bpe', 'byte-bpe-270', lambda: BPETokenizer.train(PHRASES, 270)),
    ],
    ids=['characters', 'bpe'],
)
def test_a_tokenizer_is_trained_once_unless_it_is_damaged(
    tmp_path, cache_warnings, kind, folder, train
):
    """A trained tokenizer is stored in a file. A damaged file is replaced, with a warning.

    `open_phrases` may train the tokenizer on PHRASES. `open_trained` fails if it would train.
    """
    # The name contains a hash of the vocabulary.
    name = train().name
    assert open_phrases(tmp_path, kind).name == name
    assert open_trained(tmp_path, kind).name == name
    assert not cache_warnings

    # Cut the end of the file.
    path = tmp_path / 'tokenizers/corpus/1.0.0' / folder / 'tokenizer.json'
    content = path.read_bytes()
    path.write_bytes(content[:-9])

    assert open_phrases(tmp_path, kind).name == name
    assert path.read_bytes() == content
    assert cache_warnings[-1].startswith(f'{path} is damaged')


def test_vocabularies_of_two_sizes_lie_beside_each_other(tmp_path):
    assert open_phrases(tmp_path, 'bpe', size=270).vocab_size == 270
    assert open_phrases(tmp_path, 'bpe', size=265).vocab_size == 265
    assert open_trained(tmp_path, 'bpe', size=270).vocab_size == 270


def test_an_unknown_kind_of_tokenizer_is_refused(tmp_path):
    with refused("'words'; known: bytes, characters, bpe, PATH.json, tiktoken:NAME, or"):
        open_phrases(tmp_path, 'words')


# 25 modules of the standard library.
CODE = [path.read_bytes() for path in list(modules().values())[:25]]
ODD_TEXTS = [
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
    'Ġ Ċ aĠb',
    '<|endoftext|> <unk> <0x41> <s> </s> [MASK]',
    'ä a\u0308 ﬁ ² Ⅳ \u00a0\u202f\u3000|',
    '😀 👩‍👩‍👧 日本語 עברית \ufeff\U0010ffff',
    '\x85 \u2028 \u2029 \x0b \x0c',
]


@pytest.fixture(scope='module')
def tokenizer():
    """A vocabulary of 1,000 ids, learned from 15 modules of CODE."""
    return BPETokenizer.train(CODE[:15], 1000)


@pytest.fixture(scope='module')
def oddly_trained():
    """A vocabulary of 600 ids, learned mostly from ODD_TEXTS."""
    odd_texts = [text.encode() for text in ODD_TEXTS * 40]
    return BPETokenizer.train(odd_texts + CODE[:3], 600)


def random_texts(tokenizer):
    """500 random texts, each joined from up to 29 parts.

    A part is a sub-word, one of ODD_TEXTS, a space, a common character or any character.
    """
    # Ids up to 256 are the separator and single bytes.
    subwords = [tokenizer.decode([i]) for i in range(257, tokenizer.vocab_size)]
    spaces = [' ', '\n', '\t', '\r', '\0', 'a']
    # Surrogates are no characters by themselves.
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    common_characters = characters[:0x3000]
    kinds_of_parts = [subwords, ODD_TEXTS, spaces, common_characters, characters]

    # Each part is drawn in two steps: first its kind, and then one of this kind.
    rng = random.Random(0)
    kinds_of_texts = [rng.choices(kinds_of_parts, k=rng.randrange(30)) for _ in range(500)]
    return [''.join(rng.choice(parts) for parts in kinds) for kinds in kinds_of_texts]


def test_every_text_comes_back_byte_for_byte(tokenizer, oddly_trained):
    """Decoding the ids of any text gives the same text.

    One vocabulary was learned from source code, the other mostly from odd texts.
    """
    code = [text.decode() for text in CODE]
    for text in [*ODD_TEXTS, *random_texts(tokenizer), *code]:
        for trained in (tokenizer, oddly_trained):
            ids = trained.encode(text)
            assert trained.decode(ids) == text
            assert trained.num_bytes(ids) == len(text.encode())

            # No id is the separator, 0. An empty text has no ids, so `min` returns `initial`.
            assert trained.separator == 0
            assert ids.min(initial=1) > 0
            assert ids.max(initial=0) < trained.vocab_size


def test_a_separator_is_decoded_to_a_byte_0(tokenizer):
    ids = [tokenizer.separator, *tokenizer.encode('x')]
    assert tokenizer.decode(ids) == '\0x'


def test_half_a_character_is_decoded_with_a_mark(tokenizer):
    half = tokenizer.encode('😀')[:2]
    assert tokenizer.decode(half) == '\N{REPLACEMENT CHARACTER}'
    assert tokenizer.num_bytes(half) == 2


def test_whole_texts_are_encoded_as_by_the_library(tokenizer, monkeypatch):
    library = tokenizers.Tokenizer.from_buffer(tokenizer.model())
    monkeypatch.setattr(subwords, 'LINES', 7)  # lines that are encoded at a time

    code = [text.decode() for text in CODE[:5] + CODE[-5:]]
    # The library reads a byte 0 as the separator.
    odd_texts = [text for text in ODD_TEXTS if '\0' not in text]
    for text in code + odd_texts:
        assert tokenizer.encode(text.encode()).tolist() == library.encode(text).ids


def test_a_vocabulary_that_is_learned_again_is_the_same(tokenizer):
    assert BPETokenizer.train(CODE[:15], 1000).name == tokenizer.name


def test_vocabularies_do_not_change_under_one_version_of_the_library():
    if tokenizers.__version__ == '0.23.3':
        # The name contains a hash of the vocabulary. It must not depend on process or threads.
        odd_texts = [text.encode() for text in ODD_TEXTS * 9]
        assert BPETokenizer.train(odd_texts, 340).name == 'byte-bpe340-e53bcff4d710'


def test_the_size_of_a_vocabulary_is_exact(tokenizer):
    assert tokenizer.vocab_size == 1000
    assert tokenizer.encode(CODE[0]).dtype == np.uint16


def test_the_smallest_vocabulary_has_all_bytes_and_the_separator():
    smallest = BPETokenizer.train([b'aaaa'], 257)
    assert smallest.vocab_size == 257
    assert smallest.encode('').size == 0


@pytest.mark.parametrize(
    ('size', 'texts'),
    [
        # None would fail if it were read.
        pytest.param(256, None, id='too small'),
        pytest.param(2**20 + 1, None, id='too large'),
        pytest.param(300, [b'abc abc'], id='too large for the texts'),
    ],
)
def test_an_impossible_size_of_a_vocabulary_is_refused(size, texts):
    with refused(f'data.tokenizer_size={size} must be'):
        BPETokenizer.train(texts, size)


def test_a_learned_vocabulary_that_is_read_from_a_file_has_the_same_ids(tmp_path):
    """`model()` of a learned vocabulary returns the content of a valid tokenizer.json."""
    path = tmp_path / 'a.json'
    text = 'the fox saw\nthe gräpes'
    learned = BPETokenizer.train([text.encode()], 270)
    path.write_bytes(learned.model())

    tokenizer = FileTokenizer.open(str(path))

    # Both names contain the hash of the file. '-end0' says that id 0 ends a text.
    hash_of_file = learned.name[-12:]
    assert tokenizer.name == f'file-{hash_of_file}-end0'
    assert tokenizer.vocab_size == 270
    assert tokenizer.separator == 0

    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert np.array_equal(ids, learned.encode(text))


def test_a_vocabulary_file_adds_no_marks_and_cuts_no_text(tmp_path):
    """Settings of a vocabulary file that add marks, cut texts or pad texts have no effect.

    This file sets the mark [CLS] before each text, at most 3 tokens, and padding to 9 tokens.
    """
    vocabulary = {'[UNK]': 0, '[CLS]': 1, 'the': 2, 'fox': 3, 'saw': 7}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(['[UNK]', '[CLS]'])
    library.post_processor = processors.TemplateProcessing('[CLS] $A', None, [('[CLS]', 1)])
    library.enable_truncation(3)
    library.enable_padding(length=9)
    path = str(tmp_path / 'a.json')
    library.save(path)
    tokenizer = FileTokenizer.open(path)

    ids = tokenizer.encode('the fox saw [CLS] the grapes')

    assert ids[:3].tolist() == [2, 3, 7]  # 'the fox saw'
    assert ids[-2:].tolist() == [2, 0]  # 'the', and 'grapes', which is unknown
    assert 1 not in ids  # '[CLS]' in a text is unknown, too

    # Without an end of text, the separator is the id after the largest one, 7.
    assert tokenizer.separator == 8
    assert ids.dtype == np.uint8

    # Unknown words count as no bytes.
    assert tokenizer.num_bytes(ids) == len('the fox saw the')


def test_text_that_a_vocabulary_file_cannot_encode_is_refused(tmp_path):
    # The word 'owl' would be encoded as [UNK], which this vocabulary lacks.
    library = tokenizers.Tokenizer(models.WordPiece({'fox': 0}, unk_token='[UNK]'))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    path = str(tmp_path / 'a.json')
    library.save(path)
    tokenizer = FileTokenizer.open(path)

    assert tokenizer.encode('fox fox').tolist() == [0, 0]
    with pytest.raises(ValueError, match=r'Missing \[UNK\] token'):
        tokenizer.encode('fox owl')


def test_a_file_without_a_vocabulary_is_refused(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('{"version": "1.0"}')
    with refused(f"data.tokenizer='{path}' cannot be read .*; give a tokenizer.json"):
        FileTokenizer.open(str(path))


def test_a_missing_vocabulary_is_refused(tmp_path):
    path = tmp_path / 'a.json'
    with refused(f"data.tokenizer='{path}' does not exist; give a tokenizer.json"):
        FileTokenizer.open(str(path))


def word_library(special, *, added=()):
    """A vocabulary of the words [UNK] and fox, with special tokens and other added tokens."""
    library = tokenizers.Tokenizer(models.WordLevel({'[UNK]': 0, 'fox': 1}, unk_token='[UNK]'))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(special)
    library.add_tokens(list(added))
    return library


def unigram_library(special):
    """A unigram model of three tokens. It reads '</s>' from text, even if it is special."""
    scores = [('<unk>', 0.0), ('</s>', -1.0), ('a', -1.0)]
    library = tokenizers.Tokenizer(models.Unigram(scores, 0))
    library.add_special_tokens(special)
    return library


def open_library(library, directory):
    """Saves a tokenizer of the library, and opens its file."""
    path = str(directory / 'a.json')
    library.save(path)
    return FileTokenizer.open(path)


WITH_END_OF_TEXT = [
    pytest.param(word_library(['<|endoftext|>']), 2, id='<|endoftext|>'),
    pytest.param(word_library(['<s>', '</s>', '<pad>']), 3, id='</s>'),
    pytest.param(word_library(['</s>', '<|endoftext|>']), 3, id='<|endoftext|> before </s>'),
    pytest.param(word_library(['<|over|>']), 2, id='the only special token'),
]
WITHOUT_END_OF_TEXT = [
    pytest.param(word_library(['<s>', '<pad>']), id='none ends texts'),
    pytest.param(word_library(['[UNK]']), id='the token of unknown text'),
    pytest.param(word_library([], added=['<|endoftext|>']), id='read from text'),
    pytest.param(word_library([]), id='no special token'),
    pytest.param(unigram_library(['</s>']), id='read from text by a unigram model'),
]


@pytest.mark.parametrize(('library', 'end_of_text'), WITH_END_OF_TEXT)
def test_the_separator_is_the_end_of_text_of_the_file(tmp_path, library, end_of_text):
    tokenizer = open_library(library, tmp_path)
    assert tokenizer.separator == end_of_text
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.name.endswith(f'-end{end_of_text}')


@pytest.mark.parametrize('library', WITHOUT_END_OF_TEXT)
def test_without_an_end_of_text_the_separator_is_an_added_id(tmp_path, library):
    tokenizer = open_library(library, tmp_path)
    added_id = library.get_vocab_size()
    assert tokenizer.separator == added_id
    assert tokenizer.vocab_size == added_id + 1
    assert '-end' not in tokenizer.name


LIBRARIES = [pytest.param(case.values[0], id=case.id) for case in WITH_END_OF_TEXT]
LIBRARIES += WITHOUT_END_OF_TEXT


@pytest.mark.parametrize('library', LIBRARIES)
def test_the_separator_is_not_read_from_text(tmp_path, library):
    tokenizer = open_library(library, tmp_path)
    assert tokenizer.separator not in tokenizer.encode('fox </s> <|endoftext|> <|over|> [UNK] a')

    fox = tokenizer.encode('fox')
    assert tokenizer.decode([*fox, tokenizer.separator, *fox]).count('\0') == 1


@pytest.mark.parametrize('library', LIBRARIES)
def test_a_separator_can_be_added_as_in_earlier_versions(tmp_path, library):
    tokenizer = open_library(library, tmp_path)

    earlier = tokenizer.with_added_separator()

    assert earlier.name == tokenizer.name.partition('-end')[0]
    assert earlier.separator == library.get_vocab_size()
    assert earlier.vocab_size == library.get_vocab_size() + 1

"""Encodings of tiktoken, of which a small one is built here: nothing is downloaded."""

import importlib
import sys

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.convert.loading import tokenizer_of_flag
from qkattn.data.load import load_text, prepare
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.tiktoken_encodings import TiktokenTokenizer
from qkattn.data.tokenizers.vocabulary import is_import_path
from tests.data.datasets import write_texts
from tests.data.test_token_formats import write_nanogpt
from tests.data.test_tokenizers import ODD_TEXTS
from tests.refusals import refused

MERGES = [b'th', b'the', b' the', b'in', b'ing', b'  ']
PATTERN = r' ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+'


def ranks():
    """The ids of 262 tokens: all bytes, then MERGES."""
    tokens = [bytes([byte]) for byte in range(256)] + MERGES
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture
def tiktoken(monkeypatch, tmp_path):
    """The library tiktoken, with four small encodings in place of its own.

    The ids 0 to 255 are the bytes, and 256 to 261 are MERGES.

    - 'small' has the special tokens '<|pad|>', 264, and '<|endoftext|>', 265. It does not use 262
      and 263.
    - 'no_end' has no special token.
    - 'large' has an end of text whose id is too large.
    - 'remote' has no ids until its file is downloaded.
    """
    library = pytest.importorskip('tiktoken', reason="pip install -e '.[tiktoken]'")
    registry = importlib.import_module('tiktoken.registry')
    load = importlib.import_module('tiktoken.load')

    def encoding(name, special_tokens):
        return {
            'name': name,
            'pat_str': PATTERN,
            'mergeable_ranks': ranks(),
            'special_tokens': special_tokens,
        }

    def remote():
        """An encoding whose ranks are downloaded."""
        mergeable_ranks = load.load_tiktoken_bpe('https://example.org/remote.tiktoken')
        return {'name': 'remote', 'mergeable_ranks': mergeable_ranks}

    constructors = {
        'small': lambda: encoding('small', {'<|endoftext|>': 265, '<|pad|>': 264}),
        'no_end': lambda: encoding('no_end', {}),
        'large': lambda: encoding('large', {'<|endoftext|>': 2**20}),
        'remote': remote,
    }
    monkeypatch.setattr(registry, 'ENCODING_CONSTRUCTORS', constructors)
    monkeypatch.setattr(registry, 'ENCODINGS', {})
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'cache'))
    return library


def test_text_is_encoded_by_the_merges(tiktoken):
    tokenizer = TiktokenTokenizer.open('tiktoken:small')
    assert tokenizer.vocab_size == 266
    assert tokenizer.separator == 265
    # The ids of 'the', ' ', 'th' and 'ing'.
    assert tokenizer.encode('the thing').tolist() == [257, ord(' '), 256, 260]


@pytest.mark.parametrize('text', [*ODD_TEXTS, 'the <|endoftext|> and <|pad|>', 'the \xe4'])
def test_text_is_decoded_as_it_was_and_has_no_special_token(tiktoken, text):
    tokenizer = TiktokenTokenizer.open('tiktoken:small')

    ids = tokenizer.encode(text)

    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert ids.max(initial=0) < 262  # special tokens are 264 and 265


def test_text_may_be_bytes(tiktoken):
    tokenizer = TiktokenTokenizer.open('tiktoken:small')
    ids = tokenizer.encode(b'the \xc3\xa4')
    assert ids.tolist() == tokenizer.encode('the \xe4').tolist()


def test_special_tokens_have_no_bytes_but_the_separator(tiktoken):
    """Of the special tokens, only the separator counts as a byte."""
    tokenizer = TiktokenTokenizer.open('tiktoken:small')
    pad = 264  # the id of '<|pad|>' in the encoding 'small'
    ids = [*tokenizer.encode('a'), tokenizer.separator, pad, *tokenizer.encode('the')]
    # The bytes of 'a', the separator, the pad and 'the'.
    assert tokenizer.num_bytes(ids) == 1 + 1 + 0 + 3
    # A separator is decoded to the character NUL, and another special token to its name.
    assert tokenizer.decode(ids) == 'a' + '\0' + '<|pad|>' + 'the'


def test_an_id_without_a_token_has_no_bytes(tiktoken):
    """The encoding 'small' has ids up to 265, of which 262 and 263 stand for no token."""
    tokenizer = TiktokenTokenizer.open('tiktoken:small')
    id_without_token = 263
    assert tokenizer.num_bytes([id_without_token]) == 0
    assert tokenizer.decode([id_without_token]) == ''


def test_half_a_character_is_decoded_with_a_mark(tiktoken):
    tokenizer = TiktokenTokenizer.open('tiktoken:small')
    half = tokenizer.encode('é')[:1]
    assert tokenizer.decode(half) == '\N{REPLACEMENT CHARACTER}'


def test_text_that_is_not_unicode_is_refused(tiktoken):
    tokenizer = TiktokenTokenizer.open('tiktoken:small')
    with refused('position 1', ValueError):
        tokenizer.encode('b\ud800')


def test_an_encoding_without_an_end_of_text_gets_one_more_id(tiktoken):
    tokenizer = TiktokenTokenizer.open('tiktoken:no_end')
    assert tokenizer.vocab_size == 262 + 1
    assert tokenizer.separator == 262
    assert tokenizer.decode([*tokenizer.encode('a'), tokenizer.separator]) == 'a\0'


def test_names_tell_vocabularies_and_patterns_apart(tiktoken):
    """The name of a tokenizer contains a hash of everything that decides the ids of a text.

    The hash covers the pattern of words, the ids of tokens and the special tokens.
    """

    def name(**changes):
        """The name of the tokenizer for an encoding 'a' whose settings have these changes."""
        settings = {'pat_str': PATTERN, 'mergeable_ranks': ranks(), 'special_tokens': {}}
        encoding = tiktoken.Encoding('a', **(settings | changes))
        return TiktokenTokenizer(encoding).name

    # Two tokens have exchanged their ids.
    other_ranks = ranks()
    other_ranks |= {b'th': ranks()[b'ing'], b'ing': ranks()[b'th']}

    names = [
        name(),
        name(pat_str=r'\s+|\S+'),
        name(mergeable_ranks=other_ranks),
        name(special_tokens={'<|endoftext|>': 262}),
    ]
    assert len(set(names)) == 4
    for tokenizer_name in names:
        assert tokenizer_name.startswith('tiktoken-a-')

    # The same settings give the same name.
    assert name() == names[0]


def test_files_that_are_not_in_the_cache_are_not_downloaded(tiktoken, tmp_path, monkeypatch):
    """An encoding whose file is not in the cache is refused. The message says how to fetch it.

    While an encoding is opened, tiktoken's `read_file` is replaced by another function.
    """
    # Without the library `requests`, a download would fail with another error.
    monkeypatch.setitem(sys.modules, 'requests', None)
    read_file = tiktoken.load.read_file

    with refused(
        "data.tokenizer='tiktoken:remote' needs https://example.org/remote.tiktoken, which is not "
        r"in tiktoken's cache; fetch it once with python -c .*get_encoding\('remote'\)"
    ):
        TiktokenTokenizer.open('tiktoken:remote')

    assert not (tmp_path / 'cache').exists()
    # Afterwards, tiktoken has its own function again.
    assert tiktoken.load.read_file is read_file


def test_an_encoding_that_is_unknown_or_too_large_is_refused(tiktoken):
    with refused("'tiktoken:gpt9' is no encoding of tiktoken; valid are tiktoken:small, tikt"):
        TiktokenTokenizer.open('tiktoken:gpt9')
    with refused("data.tokenizer='tiktoken:large' cannot be read: it has the id 1048576; ids m"):
        TiktokenTokenizer.open('tiktoken:large')


def test_without_the_library_it_is_refused_with_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    with refused("tiktoken needs the package tiktoken: pip install -e '.\\[tiktoken\\]'"):
        rows_of(Config(data=DataConfig(tokenizer='tiktoken:gpt2')))


def test_the_name_of_an_encoding_is_no_import_path():
    assert not is_import_path('tiktoken:gpt2')
    assert is_import_path('own:gpt2')


def test_text_is_prepared_and_read_in_its_ids(tiktoken, tmp_path):
    """`prepare` writes the same tokens that `load_text` makes of the text."""
    data = DataConfig(
        name='text',
        path=str(write_texts(tmp_path / 'texts')),
        tokenizer='tiktoken:small',
        data_dir=str(tmp_path / 'data'),
    )
    dataset = load_text(data)
    directory = tmp_path / 'made'

    prepared = prepare(data, str(directory))
    opened = load_text(DataConfig(name='tokens', path=str(directory)))

    assert prepared.identity() == dataset.identity()
    assert opened.tokenizer.name == dataset.tokenizer.name
    assert opened.split('test').tolist() == dataset.split('test').tolist()

    # The library has the vocabulary, so none is written.
    assert not (directory / 'tokenizer.json').exists()


def test_a_flag_names_an_encoding_or_tokens_of_it(tiktoken, tmp_path):
    """A flag of the command line names a tokenizer, or a directory of tokens."""
    data = DataConfig(
        name='text',
        path=str(write_texts(tmp_path / 'texts')),
        tokenizer='tiktoken:small',
        data_dir=str(tmp_path / 'data'),
    )
    tokens_directory = str(tmp_path / 'made')
    expected_name = prepare(data, tokens_directory).tokenizer.name

    assert tokenizer_of_flag(tokens_directory, '').name == expected_name
    assert tokenizer_of_flag('tiktoken:small', '').name == expected_name


def test_tokens_of_other_tools_are_checked_against_its_ids(tiktoken, tmp_path):
    """Token files of another tool, here nanoGPT, are read as ids of a named encoding.

    The encoding 'small' has the ids 0 to 265, and 265 ends a text.
    """
    # 'the' and 'ing' have three bytes each. The separator, 265, counts as one byte.
    ids = np.array([257, 260, 265] * 30, np.uint16)
    directory = tmp_path / 'own'
    write_nanogpt(directory / 'train.bin', ids)
    write_nanogpt(directory / 'val.bin', ids)
    data = DataConfig(
        name='tokens',
        path=str(directory),
        tokenizer='tiktoken:small',
        data_dir=str(tmp_path / 'data'),
    )

    rows = rows_of(Config(model=ModelConfig(context=8, vocab_size=266), data=data))
    assert rows.bytes_per_token('validation') == (3 + 3 + 1) / 3

    # After 3 * 30 = 90 valid ids comes 266, which is beyond the vocabulary.
    write_nanogpt(directory / 'val.bin', np.append(ids, 266).astype(np.uint16))
    with refused("holds id 266 at token 90, but data.tokenizer='tiktoken-small-.* 0 to 265"):
        load_text(data)

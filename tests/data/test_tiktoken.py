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
    """The library, whose registry has the encodings 'small', 'no_end' and 'remote'."""
    library = pytest.importorskip('tiktoken', reason="pip install -e '.[tiktoken]'")
    registry = importlib.import_module('tiktoken.registry')
    load = importlib.import_module('tiktoken.load')
    settings = {'pat_str': PATTERN, 'mergeable_ranks': ranks()}

    def remote():
        address = 'https://example.org/remote.tiktoken'
        return {'mergeable_ranks': load.load_tiktoken_bpe(address)}

    constructors = {
        # The ids 262 and 263 have no token.
        'small': lambda: settings | {'special_tokens': {'<|endoftext|>': 265, '<|pad|>': 264}},
        'no_end': lambda: settings | {'special_tokens': {}},
        'large': lambda: settings | {'special_tokens': {'<|endoftext|>': 2**20}},
        'remote': remote,
    }
    named = {name: lambda name=name, f=f: {'name': name} | f() for name, f in constructors.items()}
    monkeypatch.setattr(registry, 'ENCODING_CONSTRUCTORS', named)
    monkeypatch.setattr(registry, 'ENCODINGS', {})
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'cache'))
    return library


def test_text_is_decoded_as_it_was_and_holds_no_special_token(tiktoken):
    tokenizer = TiktokenTokenizer.open('tiktoken:small')
    assert (tokenizer.vocab_size, tokenizer.separator) == (266, 265)
    assert tokenizer.encode('the thing').tolist() == [257, ord(' '), 256, 260]
    for text in (*ODD_TEXTS, 'the <|endoftext|> and <|pad|>', b'the \xc3\xa4'):
        ids = tokenizer.encode(text)
        expected = text if isinstance(text, str) else text.decode()
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == expected
        assert tokenizer.num_bytes(ids) == len(expected.encode())
        assert ids.max(initial=0) < 262

    # The separator counts one byte; 264, a special token, and 263, which is no token, none.
    ids = [*tokenizer.encode('a'), tokenizer.separator, 264, *tokenizer.encode('the')]
    assert tokenizer.num_bytes(ids) == 1 + 1 + 0 + 3
    assert tokenizer.decode(ids) == 'a\0<|pad|>the'
    assert tokenizer.decode([263]) == ''
    assert tokenizer.num_bytes([263]) == 0
    half = tokenizer.encode('é')[:1]
    assert tokenizer.decode(half) == '\N{REPLACEMENT CHARACTER}'
    with refused('position 1', ValueError):
        tokenizer.encode('b\ud800')


def test_an_encoding_without_an_end_of_text_gets_one_more_id(tiktoken):
    tokenizer = TiktokenTokenizer.open('tiktoken:no_end')
    assert (tokenizer.vocab_size, tokenizer.separator) == (263, 262)
    assert tokenizer.decode([*tokenizer.encode('a'), 262]) == 'a\0'


def test_names_tell_vocabularies_and_patterns_apart(tiktoken):
    def name(**changes):
        settings = {'pat_str': PATTERN, 'mergeable_ranks': ranks(), 'special_tokens': {}}
        encoding = tiktoken.Encoding('a', **(settings | changes))
        return TiktokenTokenizer(encoding).name

    # The same merges, two of them in another order.
    other_ranks = ranks()
    other_ranks[b'th'], other_ranks[b'ing'] = other_ranks[b'ing'], other_ranks[b'th']
    names = {
        name(),
        name(pat_str=r'\s+|\S+'),
        name(mergeable_ranks=other_ranks),
        name(special_tokens={'<|endoftext|>': 262}),
    }
    assert len(names) == 4
    assert name() in names
    assert all(one.startswith('tiktoken-a-') for one in names)


def test_files_that_are_not_in_the_cache_are_not_downloaded(tiktoken, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'requests', None)  # downloads would need it
    read_file = tiktoken.load.read_file
    with refused(
        "data.tokenizer='tiktoken:remote' needs https://example.org/remote.tiktoken, which is not "
        r"in tiktoken's cache; fetch it once with python -c .*get_encoding\('remote'\)"
    ):
        TiktokenTokenizer.open('tiktoken:remote')
    assert tiktoken.load.read_file is read_file
    assert not (tmp_path / 'cache').exists()


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
    texts = write_texts(tmp_path / 'texts')
    data = DataConfig(
        name='text', path=str(texts), tokenizer='tiktoken:small', data_dir=str(tmp_path / 'data')
    )
    dataset = load_text(data)

    # Prepared files need no vocabulary beside them: the name says which it is.
    made = prepare(data, str(tmp_path / 'made'))
    assert made.identity() == dataset.identity()
    assert not (tmp_path / 'made/tokenizer.json').exists()
    opened = load_text(DataConfig(name='tokens', path=str(tmp_path / 'made')))
    assert opened.tokenizer.name == dataset.tokenizer.name
    assert opened.split('test').tolist() == dataset.split('test').tolist()
    assert tokenizer_of_flag(str(tmp_path / 'made'), '').name == dataset.tokenizer.name
    assert tokenizer_of_flag('tiktoken:small', '').name == dataset.tokenizer.name


def test_tokens_of_other_tools_are_checked_against_its_ids(tiktoken, tmp_path):
    # Two ids of three bytes, and the end token, which counts one.
    ids = np.array([257, 260, 265] * 30, np.uint16)
    write_nanogpt(tmp_path / 'own/train.bin', ids)
    write_nanogpt(tmp_path / 'own/val.bin', ids)
    fields = {'path': str(tmp_path / 'own'), 'data_dir': str(tmp_path / 'data')}
    data = DataConfig(name='tokens', tokenizer='tiktoken:small', **fields)
    rows = rows_of(Config(model=ModelConfig(context=8, vocab_size=266), data=data))
    assert rows.bytes_per_token('validation') == (3 + 3 + 1) / 3
    # An id beyond the vocabulary.
    write_nanogpt(tmp_path / 'own/val.bin', np.append(ids, 266).astype(np.uint16))
    with refused("holds id 266 at token 90, but data.tokenizer='tiktoken-small-.* 0 to 265"):
        load_text(data)

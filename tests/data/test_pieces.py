"""Long texts are encoded a piece at a time, with the ids of the whole."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from qkattn.data.tokenizers import pieces
from qkattn.data.tokenizers.subwords import FileTokenizer
from tests.data.test_tokenizers import CODE, ODD

TEXT = b'\n'.join(CODE).decode()
# Runs that are longer than what two pieces have in common.
RUNS = [' ' * 900, 'a' * 1111, 'ab' * 700, '=' * 1234, '0123456789' * 70, '日本語' * 300]


def trained(model, trainer, *, pre_tokenizer=None, normalizer=None):
    library = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    library.train_from_iterator(TEXT[:60_000].splitlines(keepends=True), trainer)
    return library


def of_bytes():
    """As of GPT-2."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizer)


def without_words():
    """As of Llama 2: a text is one word, with a space in front of it."""
    normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    options = {'special_tokens': ['<unk>'], 'max_token_length': 9, 'show_progress': False}
    trainer = trainers.BpeTrainer(vocab_size=600, **options)
    return trained(models.BPE(unk_token='<unk>', fuse_unk=True), trainer, normalizer=normalizer)


def of_probabilities():
    """As of XLM-R: the tokens of a word are its most probable ones."""
    options = {'special_tokens': ['<unk>'], 'unk_token': '<unk>', 'show_progress': False}
    trainer = trainers.UnigramTrainer(vocab_size=600, **options)
    pre_tokenizer = pre_tokenizers.Metaspace()
    normalizer = normalizers.NFKC()
    return trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizer, normalizer=normalizer)


def of_parts_of_words():
    """As of BERT."""
    options = {'special_tokens': ['[UNK]'], 'show_progress': False}
    trainer = trainers.WordPieceTrainer(vocab_size=600, **options)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    normalizer = normalizers.BertNormalizer()
    model = models.WordPiece(unk_token='[UNK]')
    return trained(model, trainer, pre_tokenizer=pre_tokenizer, normalizer=normalizer)


@pytest.fixture
def lengths(monkeypatch):
    """The lengths of what is encoded, in characters, in pieces of 2,000 that share 400."""
    encoded = []
    encode = pieces._Piece.encode

    def recorded(tokenizer, text, start, size):
        piece = encode(tokenizer, text, start, size)
        encoded.append(piece.end - piece.start)
        return piece

    monkeypatch.setattr(pieces, 'PIECE', 2000)
    monkeypatch.setattr(pieces, 'OVERLAP', 400)
    monkeypatch.setattr(pieces._Piece, 'encode', recorded)
    return encoded


@pytest.mark.parametrize(
    'make', [of_bytes, without_words, of_probabilities, of_parts_of_words], ids=lambda f: f.__name__
)
def test_the_ids_of_pieces_are_those_of_the_whole(make, lengths):
    library = make()

    def check(text):
        expected = library.encode(text, add_special_tokens=False).ids
        assert pieces.encode(library, text).tolist() == expected

    check(TEXT[:60_000])
    assert len(lengths) > 30 and max(lengths) <= 4000  # however long the text is
    for text in ('', 'a', TEXT[:1999], TEXT[:2001]):
        check(text)
    rng = random.Random(0)
    for _ in range(15):
        parts = []
        for _ in range(20):
            start = rng.randrange(len(TEXT))
            parts += [TEXT[start : start + rng.randrange(400)], rng.choice(ODD + RUNS)]
        check(''.join(parts))


def test_a_word_that_is_longer_than_pieces_is_encoded_whole(lengths):
    library = of_probabilities()
    word = 'ab' * 5000
    text = f'{TEXT[:5000]} {word} {TEXT[:5000]}'
    ids = pieces.encode(library, text)
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert len(word) < max(lengths) < len(text)


def test_a_vocabulary_of_a_file_encodes_long_documents_in_pieces(tmp_path, lengths):
    library = of_bytes()
    library.save(str(tmp_path / 'a.json'))
    tokenizer = FileTokenizer.open(str(tmp_path / 'a.json'))
    ids = tokenizer.encode(TEXT[:9000])
    assert ids.dtype == np.uint16 and max(lengths) == 2000
    assert ids.tolist() == library.encode(TEXT[:9000]).ids

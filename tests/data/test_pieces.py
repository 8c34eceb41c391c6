"""Long texts are encoded a piece at a time, with the ids of the whole."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from qkattn.data.tokenizers import pieces
from qkattn.data.tokenizers.subwords import FileTokenizer
from tests.data.test_tokenizers import CODE, ODD_TEXTS

TEXT = b'\n'.join(CODE).decode()
# Runs that are longer than what two pieces have in common.
RUNS = [' ' * 900, 'a' * 1111, 'ab' * 700, '=' * 1234, '0123456789' * 70, '日本語' * 300]


def train_library(model, trainer, *, pre_tokenizer=None, normalizer=None):
    """A tokenizer of the library tokenizers, trained on the beginning of TEXT."""
    library = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    library.train_from_iterator(TEXT[:60_000].splitlines(keepends=True), trainer)
    return library


def byte_level_bpe():
    """A vocabulary as GPT-2 has one."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train_library(models.BPE(), trainer, pre_tokenizer=pre_tokenizer)


def bpe_over_the_whole_text():
    """A vocabulary as Llama 2 has one: a text is one word, with a space in front of it."""
    normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    options = {'special_tokens': ['<unk>'], 'max_token_length': 9, 'show_progress': False}
    trainer = trainers.BpeTrainer(vocab_size=600, **options)
    return train_library(
        models.BPE(unk_token='<unk>', fuse_unk=True), trainer, normalizer=normalizer
    )


def unigram():
    """A vocabulary as XLM-R has one: a word is split into its most probable tokens."""
    options = {'special_tokens': ['<unk>'], 'unk_token': '<unk>', 'show_progress': False}
    trainer = trainers.UnigramTrainer(vocab_size=600, **options)
    pre_tokenizer = pre_tokenizers.Metaspace()
    normalizer = normalizers.NFKC()
    return train_library(
        models.Unigram(), trainer, pre_tokenizer=pre_tokenizer, normalizer=normalizer
    )


def word_piece():
    """A vocabulary as BERT has one."""
    options = {'special_tokens': ['[UNK]'], 'show_progress': False}
    trainer = trainers.WordPieceTrainer(vocab_size=600, **options)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    normalizer = normalizers.BertNormalizer()
    model = models.WordPiece(unk_token='[UNK]')
    return train_library(model, trainer, pre_tokenizer=pre_tokenizer, normalizer=normalizer)


@pytest.fixture
def encoded_lengths(monkeypatch):
    """Pieces of 2,000 characters that overlap by 400; returns the lengths that are encoded."""
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
    'make', [byte_level_bpe, bpe_over_the_whole_text, unigram, word_piece], ids=lambda f: f.__name__
)
def test_a_text_in_pieces_has_the_ids_of_the_whole_text(make, encoded_lengths):
    library = make()

    def check(text):
        expected = library.encode(text, add_special_tokens=False).ids
        assert pieces.encode(library, text).tolist() == expected

    check(TEXT[:60_000])
    assert len(encoded_lengths) > 30 and max(encoded_lengths) <= 4000  # however long the text is
    for text in ('', 'a', TEXT[:1999], TEXT[:2001]):
        check(text)
    rng = random.Random(0)
    for _ in range(15):
        parts = []
        for _ in range(20):
            start = rng.randrange(len(TEXT))
            parts += [TEXT[start : start + rng.randrange(400)], rng.choice(ODD_TEXTS + RUNS)]
        check(''.join(parts))


def test_a_word_that_is_longer_than_pieces_is_encoded_whole(encoded_lengths):
    library = unigram()
    word = 'ab' * 5000
    text = f'{TEXT[:5000]} {word} {TEXT[:5000]}'
    ids = pieces.encode(library, text)
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert len(word) < max(encoded_lengths) < len(text)


def test_a_vocabulary_of_a_file_encodes_long_documents_in_pieces(tmp_path, encoded_lengths):
    library = byte_level_bpe()
    library.save(str(tmp_path / 'a.json'))
    tokenizer = FileTokenizer.open(str(tmp_path / 'a.json'))
    ids = tokenizer.encode(TEXT[:9000])
    assert ids.dtype == np.uint16
    # No piece that the library encoded is longer than 2,000 characters.
    assert max(encoded_lengths) == 2000
    assert ids.tolist() == library.encode(TEXT[:9000]).ids

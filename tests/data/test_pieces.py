"""Long texts are encoded in pieces, with the same ids as the whole text."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from qkattn.data.tokenizers import pieces
from qkattn.data.tokenizers.subwords import FileTokenizer
from tests.data.test_tokenizers import CODE, ODD_TEXTS

TEXT = b'\n'.join(CODE).decode()
# Runs that are longer than the overlap of two pieces.
RUNS = [' ' * 900, 'a' * 1111, 'ab' * 700, '=' * 1234, '0123456789' * 70, '日本語' * 300]


def train_library(model, trainer, *, pre_tokenizer=None, normalizer=None):
    """A tokenizer of the library `tokenizers`, trained on the beginning of TEXT."""
    library = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    lines = TEXT[:60_000].splitlines(keepends=True)
    library.train_from_iterator(lines, trainer)
    return library


def byte_level_bpe():
    """A vocabulary like GPT-2's."""
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train_library(models.BPE(), trainer, pre_tokenizer=pre_tokenizer)


def bpe_over_the_whole_text():
    """A vocabulary like Llama 2's: a text is one word, with a space in front of it."""
    model = models.BPE(unk_token='<unk>', fuse_unk=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=['<unk>'], max_token_length=9, show_progress=False
    )
    normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    return train_library(model, trainer, normalizer=normalizer)


def unigram():
    """Trains a vocabulary of 600 tokens, like XLM-R's, on the beginning of TEXT.

    A unigram model splits each word into its most probable tokens.
    """
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=['<unk>'], unk_token='<unk>', show_progress=False
    )
    # NFKC replaces characters by equivalent ones, such as the ligature 'ﬁ' by 'fi'.
    normalizer = normalizers.NFKC()
    # Metaspace cuts a text at spaces. Each word begins with '▁' in place of its space.
    pre_tokenizer = pre_tokenizers.Metaspace()
    return train_library(
        models.Unigram(), trainer, pre_tokenizer=pre_tokenizer, normalizer=normalizer
    )


def word_piece():
    """A vocabulary like BERT's: a word is split into its longest tokens, from the left."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=['[UNK]'], show_progress=False
    )
    return train_library(
        models.WordPiece(unk_token='[UNK]'),
        trainer,
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
    )


# In characters.
PIECE = 2000
OVERLAP = 400


@pytest.fixture
def encoded_lengths(monkeypatch):
    """A list that gets the length in characters of every piece that is encoded.

    The fixture also sets the length of a piece to PIECE, and the overlap to OVERLAP.
    """
    lengths = []
    encode = pieces._Piece.encode

    def encode_and_record(tokenizer, text, start, size):
        """Replaces the function that encodes a piece: it also records the length."""
        piece = encode(tokenizer, text, start, size)
        lengths.append(piece.end - piece.start)
        return piece

    monkeypatch.setattr(pieces, 'PIECE', PIECE)
    monkeypatch.setattr(pieces, 'OVERLAP', OVERLAP)
    monkeypatch.setattr(pieces._Piece, 'encode', encode_and_record)
    return lengths


def assert_pieces_have_the_same_ids(library, text):
    """Asserts that encoding a text in pieces gives the same ids as encoding it at once."""
    ids = pieces.encode(library, text)
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids


def text_of_excerpts_and_odd_texts(rng):
    """20 excerpts of TEXT of up to 399 characters, each followed by an odd text or a run."""
    parts = []
    for _ in range(20):
        start = rng.randrange(len(TEXT))
        length = rng.randrange(400)
        parts.append(TEXT[start : start + length])
        parts.append(rng.choice(ODD_TEXTS + RUNS))
    return ''.join(parts)


@pytest.mark.parametrize(
    'train_tokenizer',
    [byte_level_bpe, bpe_over_the_whole_text, unigram, word_piece],
    ids=lambda function: function.__name__,
)
def test_a_text_in_pieces_has_the_ids_of_the_whole_text(train_tokenizer, encoded_lengths):
    library = train_tokenizer()

    # A text that is much longer than a piece.
    long_text = TEXT[:60_000]
    assert_pieces_have_the_same_ids(library, long_text)

    # `encoded_lengths` has the length of every encoded piece. Neighbouring pieces overlap, so there
    # are more pieces than without overlap.
    num_pieces_without_overlap = len(long_text) / PIECE
    assert len(encoded_lengths) > num_pieces_without_overlap

    # Two pieces are joined inside of their overlap, where both have the same tokens. If they have
    # no such place, the first of them is encoded again, with twice as many characters. In this
    # text, no piece is doubled more than once.
    assert max(encoded_lengths) <= 2 * PIECE

    # The shortest texts, and texts about as long as a piece.
    for text in ('', 'a', TEXT[: PIECE - 1], TEXT[: PIECE + 1]):
        assert_pieces_have_the_same_ids(library, text)

    # Texts in which pieces are hard to join.
    rng = random.Random(0)
    for _ in range(15):
        assert_pieces_have_the_same_ids(library, text_of_excerpts_and_odd_texts(rng))


def test_a_word_that_is_longer_than_pieces_is_encoded_whole(encoded_lengths):
    """In a unigram model, pieces of a text are joined only between words.

    Each token depends on the whole word. So a piece grows until it has the whole word.
    """
    library = unigram()
    word = 'ab' * 5000
    text = f'{TEXT[:5000]} {word} {TEXT[:5000]}'

    assert_pieces_have_the_same_ids(library, text)

    # One piece has the whole word, but no piece has the whole text.
    assert max(encoded_lengths) > len(word)
    assert max(encoded_lengths) < len(text)


def test_a_vocabulary_of_a_file_encodes_long_documents_in_pieces(tmp_path, encoded_lengths):
    """Encoding a long text in pieces takes less memory and gives the same ids."""
    library = byte_level_bpe()
    path = str(tmp_path / 'a.json')
    library.save(path)
    tokenizer = FileTokenizer.open(path)
    document = TEXT[:9000]

    ids = tokenizer.encode(document)

    assert ids.dtype == np.uint16
    assert ids.tolist() == library.encode(document).ids
    # The longest piece had PIECE = 2,000 characters, so all pieces could be joined.
    assert max(encoded_lengths) == PIECE

"""Encodes long texts with the library of sub-words a piece at a time, in bounded memory.

The library keeps about 150 bytes per byte of a text while it encodes it. Pieces may not be cut and
put together anywhere: a token may go beyond a cut, and many vocabularies treat the beginning of a
text in a way of their own. So neighbouring pieces overlap, and are joined where both agree.
"""

import dataclasses
from typing import NamedTuple, Self

import numpy as np
import tokenizers
from tokenizers import models

# Characters that are encoded at a time.
PIECE = 100_000
# Characters that two neighbouring pieces have in common.
OVERLAP = 4_000


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The N tokens of the characters from `start` to `end` of a text."""

    start: int
    end: int
    ids_N: np.ndarray
    # Where each token begins in the text, and where it ends.
    bounds_N2: np.ndarray
    # The number of the word that each token belongs to. Words are encoded by themselves.
    words_N: np.ndarray

    @classmethod
    def encode(cls, tokenizer: tokenizers.Tokenizer, text: str, start: int, size: int) -> Self:
        """Encodes `size` characters from `start` on, fewer at the end of the text."""
        end = min(start + size, len(text))
        encoding = tokenizer.encode(text[start:end], add_special_tokens=False)
        bounds_N2 = start + np.array(encoding.offsets, np.int64).reshape(-1, 2)
        words = [-1 if word is None else word for word in encoding.word_ids]
        ids_N = np.array(encoding.ids, np.int64)
        return cls(start, end, ids_N, bounds_N2, np.array(words, np.int64))

    def tokens_between(self, start: int, end: int) -> slice:
        """Returns the numbers of the tokens that begin in this range of characters."""
        first, after_last = np.searchsorted(self.bounds_N2[:, 0], [start, end])
        return slice(int(first), int(after_last))


class _Joint(NamedTuple):
    """A place at which two overlapping pieces are joined.

    The text before it has the tokens of the first piece, the text after it those of the second.
    """

    end: int  # how many tokens of the first piece are before the joint
    start: int  # how many tokens of the second piece are before it


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    """Returns the ids of a text without special tokens, those of `tokenizer.encode`.

    A piece of PIECE characters shares OVERLAP characters with the next one, and is joined to it at
    a token inside of the overlap. If they cannot be joined, for example because a word is longer
    than the overlap, the piece is encoded again at twice its size.
    """
    joins_within_words = isinstance(tokenizer.model, models.BPE)
    piece = _Piece.encode(tokenizer, text, 0, PIECE)
    parts = []
    start = 0  # the first token that is taken from `piece`; earlier pieces have those before it
    while piece.end < len(text):
        following = _Piece.encode(tokenizer, text, piece.end - OVERLAP, PIECE)
        joint = _find_joint(piece, following, joins_within_words)
        if joint is not None:
            parts.append(piece.ids_N[start : joint.end])
            piece = following
            start = joint.start
            continue

        # There is no joint. Encode the piece again at twice its size.
        longer = _Piece.encode(tokenizer, text, piece.start, 2 * (piece.end - piece.start))
        if not np.array_equal(longer.ids_N[:start], piece.ids_N[:start]):
            # The longer piece begins with other tokens, so the last joint may be wrong. Encode the
            # text as a whole.
            return _Piece.encode(tokenizer, text, 0, len(text)).ids_N
        piece = longer
    parts.append(piece.ids_N[start:])
    return np.concatenate(parts)


def _find_joint(piece: _Piece, following: _Piece, joins_within_words: bool) -> _Joint | None:
    """Finds a place at which a piece can be joined to the following one; None if there is none.

    Near its ends, a piece may have wrong tokens, because they depend on text that it lacks. So the
    place is in the middle half of the overlap, and both pieces must have the same tokens there.

    The place is between two words if possible, because words are encoded by themselves. If the
    overlap is one long word, the place is between two of its tokens, but only with
    `joins_within_words`:

    - For byte-pair encoding that is right. The tokens of a word are right if any two neighbours
      among them are, and any two neighbours are in one of the pieces.
    - For unigram models it is wrong. They choose the most probable tokens of the whole word, which
      need not be the most probable tokens of its parts.
    """
    # The tokens of the middle half of the overlap, in both pieces.
    start = following.start + OVERLAP // 4
    end = piece.end - OVERLAP // 4
    tokens = piece.tokens_between(start, end)
    same_tokens = following.tokens_between(start, end)
    has_same_ids = np.array_equal(piece.ids_N[tokens], following.ids_N[same_tokens])
    has_same_bounds = np.array_equal(piece.bounds_N2[tokens], following.bounds_N2[same_tokens])
    if not (has_same_ids and has_same_bounds):
        return None

    # M tokens have M - 1 places between them. Place i is between the tokens i and i + 1. It is a
    # place between two words if these tokens belong to different words, in both pieces.
    is_between_words = np.diff(piece.words_N[tokens]) != 0
    is_between_words &= np.diff(following.words_N[same_tokens]) != 0
    places = np.flatnonzero(is_between_words)
    if not places.size and joins_within_words:
        places = np.arange(len(is_between_words))
    if not places.size:
        return None

    # Of these places, take the one in the middle.
    middle_place = int(places[len(places) // 2])
    num_before = middle_place + 1
    return _Joint(tokens.start + num_before, same_tokens.start + num_before)

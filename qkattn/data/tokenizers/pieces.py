"""Encodes long texts with the library of sub-words a piece at a time, in bounded memory.

The library keeps about 150 bytes per byte of a text while it encodes it. Pieces may not be cut and
put together anywhere: a token may go beyond a cut, and many vocabularies treat the beginning of a
text in a way of their own. So neighbouring pieces overlap, and are joined where both agree.
"""

import dataclasses
from typing import Self

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


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    """Returns the ids of a text without special tokens, those of `tokenizer.encode`.

    A piece of PIECE characters shares OVERLAP characters with the next one. `_joint` says where the
    two are joined. If it finds no place, for example because a word is longer than the overlap, the
    piece is encoded again at twice its size.
    """
    piece = _Piece.encode(tokenizer, text, 0, PIECE)
    parts = []
    num_used = 0  # tokens at the beginning of the piece that come from the piece before
    while piece.end < len(text):
        following = _Piece.encode(tokenizer, text, piece.end - OVERLAP, PIECE)
        joint = _joint(piece, following, isinstance(tokenizer.model, models.BPE))
        if joint is not None:
            last, first = joint
            parts.append(piece.ids_N[num_used:last])
            piece = following
            num_used = first
            continue
        longer = _Piece.encode(tokenizer, text, piece.start, 2 * (piece.end - piece.start))
        if not np.array_equal(longer.ids_N[:num_used], piece.ids_N[:num_used]):
            # What follows the piece changes its beginning, so the text is encoded as a whole.
            return _Piece.encode(tokenizer, text, 0, len(text)).ids_N
        piece = longer
    parts.append(piece.ids_N[num_used:])
    return np.concatenate(parts)


def _joint(piece: _Piece, following: _Piece, joins_within_words: bool) -> tuple[int, int] | None:
    """Returns where two overlapping pieces can be joined: the number of one token in each of them.

    In the middle half of their overlap, the pieces must have the same tokens of the same
    characters. They are joined at the beginning of a word there. If there is none and
    `joins_within_words`, they are joined at any token. This is right for byte-pair encoding, where
    tokens are those of the whole if each two neighbours are (so it suffices that both neighbours
    are in one piece). It is wrong for unigram models: their most probable tokens of a long word
    need not be the most probable ones of its parts. Returns None if the pieces cannot be joined.
    """
    start = following.start + OVERLAP // 4
    end = piece.end - OVERLAP // 4
    tokens = piece.tokens_between(start, end)
    same_tokens = following.tokens_between(start, end)
    has_same_ids = np.array_equal(piece.ids_N[tokens], following.ids_N[same_tokens])
    has_same_bounds = np.array_equal(piece.bounds_N2[tokens], following.bounds_N2[same_tokens])
    if not (has_same_ids and has_same_bounds):
        return None
    begins_word = np.diff(piece.words_N[tokens]) != 0
    begins_word &= np.diff(following.words_N[same_tokens]) != 0
    candidates = np.flatnonzero(begins_word)
    if not candidates.size and joins_within_words:
        candidates = np.arange(len(begins_word))
    if not candidates.size:
        return None
    number = 1 + int(candidates[len(candidates) // 2])
    return tokens.start + number, same_tokens.start + number

"""Encodes long texts in overlapping pieces, because the library takes 150 bytes of memory per byte.

Near its ends, a piece may have other tokens than the whole text. So two pieces are joined inside of
their overlap, where both have the same tokens.
"""

import dataclasses
from typing import NamedTuple, Self

import numpy as np
import tokenizers
from tokenizers import models

# Characters in a piece.
PIECE = 100_000
# Characters that neighbouring pieces share.
OVERLAP = 4_000


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The N tokens of the characters from `start` to `end` of a text."""

    start: int
    end: int
    ids_N: np.ndarray
    bounds_N2: np.ndarray  # the first character of each token, and the character after its last
    words_N: np.ndarray  # the index of each token's word in the piece

    @classmethod
    def encode(cls, tokenizer: tokenizers.Tokenizer, text: str, start: int, size: int) -> Self:
        """Encodes `size` characters of a text from `start`, fewer at the end of the text."""
        end = min(start + size, len(text))
        encoding = tokenizer.encode(text[start:end], add_special_tokens=False)
        ids_N = np.array(encoding.ids, np.int64)
        # Offsets are positions in the piece, and bounds are positions in the text.
        bounds_N2 = start + np.array(encoding.offsets, np.int64).reshape(-1, 2)
        words = [-1 if word is None else word for word in encoding.word_ids]
        words_N = np.array(words, np.int64)
        return cls(start, end, ids_N, bounds_N2, words_N)

    def tokens_between(self, start: int, end: int) -> slice:
        """Returns the indices of the tokens that begin at characters from `start` to `end`."""
        token_starts_N = self.bounds_N2[:, 0]
        first, after_last = np.searchsorted(token_starts_N, [start, end])
        return slice(int(first), int(after_last))


class _Joint(NamedTuple):
    """Where the tokens of one piece end and the tokens of the following piece begin."""

    end: int  # the number of tokens of the first piece before the joint
    start: int  # the number of tokens of the following piece before the joint


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    """Returns the token ids of a text, without special tokens.

    The result is the same as with `tokenizer.encode(text)`, which takes more memory.
    """
    joins_within_words = isinstance(tokenizer.model, models.BPE)
    piece = _Piece.encode(tokenizer, text, start=0, size=PIECE)
    parts = []
    start = 0  # index of the first token of `piece` that is not yet in `parts`
    while piece.end < len(text):
        following = _Piece.encode(tokenizer, text, start=piece.end - OVERLAP, size=PIECE)
        joint = _find_joint(piece, following, joins_within_words)
        if joint is not None:
            parts.append(piece.ids_N[start : joint.end])
            piece = following
            start = joint.start
            continue

        # The pieces cannot be joined. Try again with a piece of twice the size.
        size = piece.end - piece.start
        longer = _Piece.encode(tokenizer, text, start=piece.start, size=2 * size)
        has_same_start = np.array_equal(longer.ids_N[:start], piece.ids_N[:start])
        if not has_same_start:
            # The last joint may be wrong, so encode the text as a whole.
            whole_text = _Piece.encode(tokenizer, text, start=0, size=len(text))
            return whole_text.ids_N
        piece = longer
    parts.append(piece.ids_N[start:])
    return np.concatenate(parts)


def _find_joint(piece: _Piece, following: _Piece, joins_within_words: bool) -> _Joint | None:
    """Finds a joint in the middle half of the overlap of two pieces.

    The joint is between two words if possible. With `joins_within_words`, a joint may also be
    between two tokens of a word, which is correct for byte-pair encoding. In unigram models, each
    token depends on the whole word.

    Returns:
        The joint; None if there is none, or if the pieces have different tokens there.
    """
    start = following.start + OVERLAP // 4
    end = piece.end - OVERLAP // 4
    # The tokens that begin there, as a slice of the tokens of each piece.
    in_piece = piece.tokens_between(start, end)
    in_following = following.tokens_between(start, end)
    has_same_ids = np.array_equal(piece.ids_N[in_piece], following.ids_N[in_following])
    has_same_bounds = np.array_equal(piece.bounds_N2[in_piece], following.bounds_N2[in_following])
    if not (has_same_ids and has_same_bounds):
        return None

    # Entry i says whether tokens i and i + 1 belong to different words, in both pieces.
    is_between_words = np.diff(piece.words_N[in_piece]) != 0
    is_between_words &= np.diff(following.words_N[in_following]) != 0
    candidates = np.flatnonzero(is_between_words)
    if not candidates.size and joins_within_words:
        candidates = np.arange(len(is_between_words))
    if not candidates.size:
        return None

    middle = int(candidates[len(candidates) // 2])
    num_before = middle + 1
    return _Joint(end=in_piece.start + num_before, start=in_following.start + num_before)

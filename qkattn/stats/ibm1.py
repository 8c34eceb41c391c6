"""IBM model 1 (Brown et al. 1993): how likely each target word is beside each source word.

Every word f_j of a target is drawn from a word of its source, or from none (e_0), all equally
likely, and then from that word's own distribution:

    P(f | e) = prod_j sum_i t(f_j | e_i) / (l + 1),    i = 0 .. l

Expectation-maximization from a uniform t counts how often f is drawn from e, on average over the
words that f may come from, and divides by all that is drawn from e. No step lowers the likelihood,
and its maximum is a global one.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ITERATIONS = 10
# Pairs of a source and a target word in one sentence pair; more take memory and change little.
MAX_CELLS = 2**24
# A word or a single punctuation mark.
_WORD = re.compile(r'\w+|[^\w\s]')
# The space before a punctuation mark, as in 'ein Haus .'.
_BEFORE_MARK = re.compile(r' ([.,;:!?])')
_NONE = ''  # the source word e_0


class Dictionary(NamedTuple):
    """The likeliest target word of each source word."""

    likeliest: dict[str, str]
    num_pairs: int  # of sentences that it was fitted to
    log_likelihoods: list[float]  # nats per target word before each iteration, and at last

    def translate(self, source: str) -> str:
        """Word by word, in the order of the source; a word without translation is copied."""
        translated = ' '.join(self.likeliest.get(word, word) for word in words(source))
        return _BEFORE_MARK.sub(r'\1', translated)


class _Cells(NamedTuple):
    """Every word pair (e_i, f_j) of every sentence pair: X cells of J target positions.

    Words are numbered in the order in which they are read.
    """

    source_X: np.ndarray  # the number of e_i
    target_X: np.ndarray  # the number of f_j
    position_X: np.ndarray  # the target position j, over all sentence pairs
    choices_J: np.ndarray  # the l + 1 source words that the word at a position may come from
    source_words: list[str]
    target_words: list[str]
    num_pairs: int  # of sentences


def words(text: str) -> list[str]:
    """Words and single punctuation marks."""
    return _WORD.findall(text)


def fit(pairs: Sequence[tuple[str, str]], iterations: int = ITERATIONS) -> Dictionary:
    """Fits t(f | e) to (source, target) texts, the first that have MAX_CELLS pairs of words.

    A cell is a target word with one of the source words that it may come from: there are X of them,
    of J target words. K different pairs of a source and a target word occur in them.
    """
    cells = _cells(pairs)
    if cells is None:
        return Dictionary({}, 0, [])
    num_targets = len(cells.target_words)
    # The t(f | e) of any other pair is 0.
    pair_ids_X = cells.source_X * num_targets + cells.target_X
    pair_ids_K, pair_X = np.unique(pair_ids_X, return_inverse=True)
    source_K, target_K = np.divmod(pair_ids_K, num_targets)

    t_K = np.full(len(pair_ids_K), 1 / num_targets)
    log_likelihoods = []
    for iteration in range(iterations + 1):
        t_X = t_K[pair_X]
        total_J = np.bincount(cells.position_X, t_X)  # sum_i t(f_j | e_i)
        log_likelihoods.append(float(np.mean(np.log(total_J / cells.choices_J))))
        if iteration < iterations:
            # How often f is drawn from e, on average over the words that it may come from.
            drawn_K = np.bincount(pair_X, t_X / total_J[cells.position_X])
            t_K = drawn_K / np.bincount(source_K, drawn_K)[source_K]

    # By source word, the likeliest last; of equally likely ones the one that was read first.
    order_K = np.lexsort((-target_K, t_K, source_K))
    # The source word of the next one is another.
    is_last_K = np.diff(source_K[order_K], append=-1) != 0
    likeliest: dict[str, str] = {}
    for pair in order_K[is_last_K]:
        source_word = cells.source_words[source_K[pair]]
        if source_word != _NONE:
            likeliest[source_word] = cells.target_words[target_K[pair]]
    return Dictionary(likeliest, cells.num_pairs, log_likelihoods)


def _cells(pairs: Sequence[tuple[str, str]]) -> _Cells | None:
    """The cells of the first sentence pairs, MAX_CELLS at most; None if there are none."""
    source_ids: dict[str, int] = {}
    target_ids: dict[str, int] = {}
    sources = []
    targets = []
    choices = []
    num_cells = 0
    for source, target in pairs:
        # A word that is not known yet gets the next number.
        source_W = np.array(
            [source_ids.setdefault(word, len(source_ids)) for word in [_NONE, *words(source)]]
        )
        target_W = np.array(
            [target_ids.setdefault(word, len(target_ids)) for word in words(target)], np.int64
        )
        num_cells += len(source_W) * len(target_W)
        if num_cells > MAX_CELLS:
            break
        if len(target_W):
            sources.append(np.tile(source_W, len(target_W)))
            targets.append(np.repeat(target_W, len(source_W)))
            choices.append(np.full(len(target_W), len(source_W)))
    if not sources:
        return None
    choices_J = np.concatenate(choices)
    return _Cells(
        source_X=np.concatenate(sources),
        target_X=np.concatenate(targets),
        position_X=np.repeat(np.arange(len(choices_J)), choices_J),
        choices_J=choices_J,
        source_words=list(source_ids),
        target_words=list(target_ids),
        num_pairs=len(choices),
    )

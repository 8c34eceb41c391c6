"""IBM model 1 (Brown et al. 1993): how likely each target word is beside each source word.

Every word f_j of a target is drawn from a word of its source, or from none (e_0), all equally
likely, and then from that word's own distribution:

    P(f | e) = prod_j sum_i t(f_j | e_i) / (l + 1),    i = 0 .. l

Expectation-maximization from a uniform t counts how often f is drawn from e, on average over the
words that f may come from, and divides by all that is drawn from e. No step lowers the likelihood,
and its maximum is a global one.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

ITERATIONS = 10
# Pairs of a source and a target word in one sentence pair; more take memory and change little.
MAX_CELLS = 2**24
_WORD = re.compile(r'\w+|[^\w\s]')
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


def words(text: str) -> list[str]:
    """Words and single punctuation marks."""
    return _WORD.findall(text)


def fit(pairs: Sequence[tuple[str, str]], iterations: int = ITERATIONS) -> Dictionary:
    """Fits the model to (source, target) texts, the first that have MAX_CELLS pairs of words."""
    source_ids: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    target_ids: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    sources = []
    targets = []
    slots = []
    lengths = []
    for source_W, target_W in _numbered(pairs, source_ids, target_ids):
        # A cell for each target word and each source word that it may come from.
        sources.append(np.tile(source_W, len(target_W)))
        targets.append(np.repeat(target_W, len(source_W)))
        slots.append(np.full(len(target_W), len(source_W)))
        lengths.append(len(target_W))
    if not sources:
        return Dictionary({}, 0, [])
    size_J = np.concatenate(slots)  # words that each target word may come from
    slot_X = np.repeat(np.arange(len(size_J)), size_J)
    number = len(target_ids)
    kinds, kind_X = np.unique(
        np.concatenate(sources) * number + np.concatenate(targets), return_inverse=True
    )
    source_K, target_K = np.divmod(kinds, number)
    t_K = np.full(len(kinds), 1 / number)
    likelihoods = []
    for step in range(iterations + 1):
        t_X = t_K[kind_X]
        total_J = np.bincount(slot_X, t_X)
        likelihoods.append(float(np.mean(np.log(total_J / size_J))))
        if step < iterations:
            drawn_K = np.bincount(kind_X, t_X / total_J[slot_X])
            t_K = drawn_K / np.bincount(source_K, drawn_K)[source_K]
    # By source word, the likeliest last; of equally likely ones the one that was read first.
    order_K = np.lexsort((-target_K, t_K, source_K))
    (last,) = np.nonzero(np.diff(source_K[order_K], append=-1))
    source_words = list(source_ids)
    target_words = list(target_ids)
    likeliest = {
        source_words[source_K[kind]]: target_words[target_K[kind]]
        for kind in order_K[last]
        if source_words[source_K[kind]] != _NONE
    }
    return Dictionary(likeliest, len(lengths), likelihoods)


def _numbered(
    pairs: Sequence[tuple[str, str]],
    source_ids: defaultdict[str, int],
    target_ids: defaultdict[str, int],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The numbers of the words of each source, e_0 first, and target, up to MAX_CELLS."""
    cells = 0
    for source, target in pairs:
        source_W = np.array([source_ids[word] for word in (_NONE, *words(source))])
        target_W = np.array([target_ids[word] for word in words(target)], np.int64)
        cells += len(source_W) * len(target_W)
        if cells > MAX_CELLS:
            return
        if len(target_W):
            yield source_W, target_W

"""IBM model 1 (Brown et al. 1993): the probability t(f | e) that source word e gives word f.

The model draws each word f_j of a target sentence in two steps. It picks one of the l words of the
source sentence or the empty word e_0, all with equal probability, and then draws f_j from the
distribution t of the picked word:

    P(f | e) = prod_j sum_i t(f_j | e_i) / (l + 1),    i = 0 .. l

Expectation-maximization starts from a uniform t. Each iteration computes how often f is expected to
be drawn from e, and divides by the expected number of all words drawn from e. No iteration lowers
the likelihood, and every maximum of the likelihood is a global one.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ITERATIONS = 10
# The fit stops reading sentence pairs before it has more cells than this: further pairs would take
# memory and change little.
MAX_CELLS = 2**24
# A word or a single punctuation mark: 'ein Haus.' has the matches 'ein', 'Haus' and '.'.
_WORD = re.compile(r'\w+|[^\w\s]')
# The space before a punctuation mark, as in 'ein Haus .'.
_BEFORE_MARK = re.compile(r' ([.,;:!?])')
_EMPTY_WORD = ''  # the source word e_0


class Dictionary(NamedTuple):
    """The most likely target word of each source word."""

    likeliest: dict[str, str]
    num_pairs: int  # the number of sentence pairs that the dictionary was fitted to
    # Mean log-likelihood of a target word in nats: before each iteration and after the last one.
    log_likelihoods: list[float]

    def translate(self, source: str) -> str:
        """Translates word by word, in the order of the source.

        A word that the dictionary does not have is copied.
        """
        translated = ' '.join(self.likeliest.get(word, word) for word in words(source))
        return _BEFORE_MARK.sub(r'\1', translated)


class _Cells(NamedTuple):
    """The word pairs (e_i, f_j) of all sentence pairs: X cells over J target positions.

    Words are numbered in the order in which they are first read.
    """

    source_X: np.ndarray  # the number of e_i
    target_X: np.ndarray  # the number of f_j
    position_X: np.ndarray  # the target position j, counted over all sentence pairs
    # The number of source words that the word at j may come from: l + 1 with the empty word.
    num_choices_J: np.ndarray
    source_words: list[str]
    target_words: list[str]
    num_pairs: int  # the number of sentence pairs


def words(text: str) -> list[str]:
    """Splits a text into words and single punctuation marks."""
    return _WORD.findall(text)


def fit(pairs: Sequence[tuple[str, str]], iterations: int = ITERATIONS) -> Dictionary:
    """Fits a dictionary to sentence pairs: the most likely target word of each source word.

    Expectation-maximization fits t(f | e). The axes of its arrays are

        J  the positions of all target sentences, each with a word f_j
        X  the cells: a position j together with one source word e_i that f_j may come from
        K  the different word pairs (e, f) in the cells.

    Args:
        pairs: (source, target) sentences. The fit uses the first ones, up to MAX_CELLS cells.
        iterations: The number of iterations of expectation-maximization.
    """
    cells = _cells(pairs)
    if cells is None:
        return Dictionary({}, 0, [])

    # Number the K word pairs that occur; every other pair has t(f | e) = 0. pair_X is the number of
    # the pair in each cell. A pair (e, f) has the id e * num_targets + f.
    num_targets = len(cells.target_words)
    pair_ids_X = cells.source_X * num_targets + cells.target_X
    pair_ids_K, pair_X = np.unique(pair_ids_X, return_inverse=True)
    source_K, target_K = np.divmod(pair_ids_K, num_targets)

    t_K = np.full(len(pair_ids_K), 1 / num_targets)
    log_likelihoods = []
    for iteration in range(iterations + 1):
        t_X = t_K[pair_X]
        t_summed_J = np.bincount(cells.position_X, t_X)  # sum_i t(f_j | e_i)
        log_probability_J = np.log(t_summed_J / cells.num_choices_J)
        log_likelihoods.append(float(np.mean(log_probability_J)))
        if iteration == iterations:
            break
        # E step: the probability that f_j was drawn from e_i, summed over the cells of each pair.
        posterior_X = t_X / t_summed_J[cells.position_X]
        expected_count_K = np.bincount(pair_X, posterior_X)
        # M step: normalize over the target words of each source word.
        total_by_source = np.bincount(source_K, expected_count_K)
        t_K = expected_count_K / total_by_source[source_K]

    likeliest: dict[str, str] = {}
    for source, target in _likeliest_pairs(source_K, target_K, t_K):
        source_word = cells.source_words[source]
        if source_word != _EMPTY_WORD:
            likeliest[source_word] = cells.target_words[target]
    return Dictionary(likeliest, cells.num_pairs, log_likelihoods)


def _likeliest_pairs(
    source_K: np.ndarray, target_K: np.ndarray, t_K: np.ndarray
) -> list[tuple[int, int]]:
    """Returns for each source word the pair (source, target) with the largest t, as numbers.

    Of equally likely target words, the one that was read first is taken: it has the lowest number.
    """
    # Sort the pairs by source, then by t, then by target in descending order. The last key of
    # `lexsort` is the first one to sort by.
    order_K = np.lexsort((-target_K, t_K, source_K))
    # The likeliest pair of a source word is its last one: the next pair has another source word.
    is_last_K = np.diff(source_K[order_K], append=-1) != 0
    likeliest = order_K[is_last_K]
    return list(zip(source_K[likeliest].tolist(), target_K[likeliest].tolist(), strict=True))


def _cells(pairs: Sequence[tuple[str, str]]) -> _Cells | None:
    """Pairs each target word with every source word of its sentence, and numbers the words.

    Such a pair is a cell. The sentences 'ein Haus' and 'a house' give six cells: 'a' and 'house',
    each with the empty word, 'ein' and 'Haus'. Uses the first sentence pairs, up to MAX_CELLS
    cells. Returns None if there are no cells.
    """
    source_ids: dict[str, int] = {}
    target_ids: dict[str, int] = {}
    # One array for each sentence pair.
    sources = []
    targets = []
    num_choices = []
    num_cells = 0
    for source, target in pairs:
        source_W = _numbered([_EMPTY_WORD, *words(source)], source_ids)
        target_W = _numbered(words(target), target_ids)
        num_sources = len(source_W)
        num_targets = len(target_W)

        num_cells += num_sources * num_targets
        if num_cells > MAX_CELLS:
            break
        if num_targets > 0:
            # In the example, the numbers are [0 1 2 0 1 2] for the sources and [0 0 0 1 1 1] for
            # the targets.
            sources.append(np.tile(source_W, num_targets))
            targets.append(np.repeat(target_W, num_sources))
            num_choices.append(np.full(num_targets, num_sources))

    if not sources:
        return None
    num_choices_J = np.concatenate(num_choices)
    return _Cells(
        source_X=np.concatenate(sources),
        target_X=np.concatenate(targets),
        position_X=np.repeat(np.arange(len(num_choices_J)), num_choices_J),
        num_choices_J=num_choices_J,
        source_words=list(source_ids),
        target_words=list(target_ids),
        num_pairs=len(num_choices),
    )


def _numbered(sentence: list[str], id_of_word: dict[str, int]) -> np.ndarray:
    """Returns the numbers of W words; adds each unknown word to `id_of_word` with the next one."""
    ids_W = [id_of_word.setdefault(word, len(id_of_word)) for word in sentence]
    return np.array(ids_W, np.int64)

"""IBM model 1 (Brown et al. 1993): word translation probabilities from sentence pairs.

The model draws each target word f_j in two steps. It picks e_i uniformly from the source words
e_1 .. e_l and the empty word e_0, and then draws f_j from the distribution t(f | e_i):

    P(f | e) = prod_j sum_i t(f_j | e_i) / (l + 1),    i = 0 .. l

t is fitted by expectation-maximization, which starts from a uniform t. Every maximum of the
likelihood is global.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ITERATIONS = 10
# Maximum number of cells (see `_Cells`) in a fit, to bound its memory.
MAX_CELLS = 2**24
# A word or a single punctuation mark: 'ein Haus.' has the matches 'ein', 'Haus' and '.'.
_WORD = re.compile(r'\w+|[^\w\s]')
# A space and the punctuation mark after it, as in 'ein Haus .'.
_BEFORE_MARK = re.compile(r' ([.,;:!?])')
_EMPTY_WORD = ''  # the source word e_0


class Dictionary(NamedTuple):
    """The most likely target word of each source word."""

    likeliest: dict[str, str]
    num_pairs: int  # number of sentence pairs in the fit
    # Mean log-likelihood of a target word, in nats, before each iteration and after the last.
    log_likelihoods: list[float]

    def translate(self, source: str) -> str:
        """Translates word by word; copies unknown words."""
        translated = ' '.join(self.likeliest.get(word, word) for word in words(source))
        return _BEFORE_MARK.sub(r'\1', translated)


class _Cells(NamedTuple):
    """X cells: each pairs a target word f_j with one source word e_i of its sentence.

    Words are represented by IDs, which index `source_words` and `target_words`.
    """

    source_X: np.ndarray  # ID of e_i
    target_X: np.ndarray  # ID of f_j
    position_X: np.ndarray  # j, counted over all J target words of all sentences
    num_choices_J: np.ndarray  # l + 1, the number of source words of position j
    source_words: list[str]
    target_words: list[str]
    num_pairs: int  # number of sentence pairs with a target word


def words(text: str) -> list[str]:
    """Splits a text into words and single punctuation marks."""
    return _WORD.findall(text)


def fit(pairs: Sequence[tuple[str, str]], iterations: int = ITERATIONS) -> Dictionary:
    """Fits t(f | e) to sentence pairs, and returns the most likely f of each source word e.

    t(f | e) is the probability that the source word e is translated as the target word f. A
    sentence has l source words and the empty word e_0, and

        P(f_j) = sum_i t(f_j | e_i) / (l + 1),    i = 0 .. l.

    Axes of arrays:

        J  target words f_j of all sentences
        X  cells: a target word f_j with one of the source words e_i of its sentence
        K  distinct word pairs (e, f)

    Args:
        pairs: (source, target) sentences. The fit uses the first ones, up to MAX_CELLS cells.
        iterations: The number of iterations of expectation-maximization.
    """
    cells = _make_cells(pairs)
    if cells is None:
        return Dictionary(likeliest={}, num_pairs=0, log_likelihoods=[])

    # pair_X is the index k of each cell's word pair.
    num_target_words = len(cells.target_words)
    pair_id_X = cells.source_X * num_target_words + cells.target_X
    pair_id_K, pair_X = np.unique(pair_id_X, return_inverse=True)
    source_K, target_K = np.divmod(pair_id_K, num_target_words)

    t_K = np.full(len(pair_id_K), 1 / num_target_words)
    log_likelihoods = []
    for iteration in range(iterations + 1):
        t_X = t_K[pair_X]
        sum_t_J = np.bincount(cells.position_X, weights=t_X)  # sum_i t(f_j | e_i)
        log_probability_J = np.log(sum_t_J / cells.num_choices_J)
        log_likelihoods.append(float(np.mean(log_probability_J)))
        if iteration == iterations:
            break  # after the last iteration, only the likelihood is computed
        # E step: the expected number of times that f was drawn from e.
        posterior_X = t_X / sum_t_J[cells.position_X]
        expected_count_K = np.bincount(pair_X, weights=posterior_X)
        # M step: normalize over the target words of each of the E source words.
        total_count_E = np.bincount(source_K, weights=expected_count_K)
        t_K = expected_count_K / total_count_E[source_K]

    likeliest: dict[str, str] = {}
    for source, target in _likeliest_pairs(source_K, target_K, t_K):
        source_word = cells.source_words[source]
        if source_word != _EMPTY_WORD:
            likeliest[source_word] = cells.target_words[target]
    return Dictionary(likeliest, cells.num_pairs, log_likelihoods)


def _likeliest_pairs(
    source_K: np.ndarray, target_K: np.ndarray, t_K: np.ndarray
) -> list[tuple[int, int]]:
    """Returns the pair (source, target) with the largest t for each source word ID.

    Ties are broken by the lowest target word ID.
    """
    # Sort by source, then by t, then by descending target; `lexsort` takes the keys in reverse.
    order_K = np.lexsort((-target_K, t_K, source_K))
    # The likeliest pair of each source word is its last one in this order.
    sorted_source_K = source_K[order_K]
    is_last_K = np.diff(sorted_source_K, append=-1) != 0
    likeliest = order_K[is_last_K]
    return list(zip(source_K[likeliest].tolist(), target_K[likeliest].tolist(), strict=True))


def _make_cells(pairs: Sequence[tuple[str, str]]) -> _Cells | None:
    """Pairs each target word with the empty word and the source words of its sentence.

    The source 'ein Haus' and the target 'a house' give six cells:

        source words   ''   ein   Haus   ''      ein     Haus
        target words   a    a     a      house   house   house

    Axes are S source words and T target words of one sentence, J target words of all sentences,
    and X cells. Sentence pairs without a target word are left out. Reads the first pairs, up to
    MAX_CELLS cells. Returns None if there are no cells.
    """
    source_ids: dict[str, int] = {}
    target_ids: dict[str, int] = {}
    # Each list has one array per sentence pair.
    source_of_cells = []
    target_of_cells = []
    num_choices_of_targets = []
    num_cells = 0
    for source, target in pairs:
        source_S = _word_ids([_EMPTY_WORD, *words(source)], source_ids)
        target_T = _word_ids(words(target), target_ids)
        S = len(source_S)
        T = len(target_T)

        num_cells += S * T
        if num_cells > MAX_CELLS:
            break
        if T > 0:
            source_of_cells.append(np.tile(source_S, T))
            target_of_cells.append(np.repeat(target_T, S))
            num_choices_of_targets.append(np.full(T, S))

    if not source_of_cells:
        return None
    num_choices_J = np.concatenate(num_choices_of_targets)
    position_J = np.arange(len(num_choices_J))
    return _Cells(
        source_X=np.concatenate(source_of_cells),
        target_X=np.concatenate(target_of_cells),
        position_X=np.repeat(position_J, num_choices_J),
        num_choices_J=num_choices_J,
        source_words=list(source_ids),
        target_words=list(target_ids),
        num_pairs=len(source_of_cells),
    )


def _word_ids(sentence: list[str], id_of_word: dict[str, int]) -> np.ndarray:
    """Returns the IDs of W words; adds unknown words to `id_of_word` with the next free IDs."""
    ids_W = [id_of_word.setdefault(word, len(id_of_word)) for word in sentence]
    return np.array(ids_W, np.int64)

"""IBM model 1 on corpora whose dictionary is known."""

import numpy as np
import pytest

from qkattn.stats import ibm1

PAIRS = [('the house', 'das Haus'), ('the book', 'das Buch'), ('a book', 'ein Buch')]


def test_words_of_a_toy_corpus_have_their_translation():
    """The corpus of Koehn (2010, Statistical Machine Translation, figure 4.4)."""
    dictionary = ibm1.fit(PAIRS)
    assert dictionary.num_pairs == 3
    assert dictionary.likeliest == {'the': 'das', 'house': 'Haus', 'book': 'Buch', 'a': 'ein'}
    assert dictionary.translate('a house, the tree.') == 'ein Haus, das tree.'


def test_the_first_step_counts_words_in_equal_shares():
    """Each target word is drawn from the source word or from no word, equally likely at first."""
    dictionary = ibm1.fit([('a', 'b'), ('a', 'c')], iterations=1)
    log_likelihood = np.log(1 / 2)
    assert dictionary.log_likelihoods == pytest.approx([log_likelihood, log_likelihood])
    assert dictionary.likeliest == {'a': 'b'}  # of equally likely words the first


def test_no_iteration_lowers_the_likelihood():
    """Each iteration of IBM model 1 raises the likelihood of the pairs of sentences.

    From the pairs, the model finds the translations of the words 0 to 11.
    """
    # Word 3 is translated as w3. Target sentences have the words in reverse order.
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(200):
        num_words = rng.integers(1, 6)
        words = rng.integers(12, size=num_words)
        source = ' '.join(str(word) for word in words)
        target = ' '.join(f'w{word}' for word in reversed(words))
        pairs.append((source, target))

    dictionary = ibm1.fit(pairs)
    assert np.all(np.diff(dictionary.log_likelihoods) > 0)
    assert dictionary.likeliest == {str(word): f'w{word}' for word in range(12)}


def test_pairs_are_read_up_to_a_number_of_cells(monkeypatch):
    monkeypatch.setattr(ibm1, 'MAX_CELLS', 12)  # (2 words and none) x 2 words, twice
    assert ibm1.fit(PAIRS).num_pairs == 2
    assert ibm1.fit([]).translate('a') == 'a'

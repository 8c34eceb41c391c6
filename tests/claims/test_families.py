"""A claim as one family: how often claims in six contexts hold, fail or hold only there."""

import numpy as np
import pytest

from qkattn.claims import rules
from qkattn.claims.decided import ClaimVerdict, Kind, Row, Speaks
from qkattn.stats import decision, inference
from qkattn.verdict.codes import Comparison, Verdict

MARGIN, SD, SEEDS, NUMBER = 0.01, 0.006, 8, 300
SIZES = ('a', 'b', 'c', 'd', 'e', 'f')


def row(differences, size, relation, family):
    difference = inference.paired(list(differences), MARGIN, resamples=None)
    judged = decision.judge({0: difference}, planned=family)[0]
    verdict = Verdict(judged.decision, num_comparisons=family, alpha=0.05)
    compared = Comparison('test', {}, difference, difference.mean, None, 100)
    plain = Row('x', Kind.MATCHED, {'size': size}, difference.mean, Speaks.BESIDE)
    word, speaks = rules.finding(plain, relation, verdict, compared)
    return Row('x', Kind.MATCHED, {'size': size}, difference.mean, speaks, word=word)


def decided(rng, means, relation):
    """As `qkattn.claims.deciding` does: all rows at once, then each at its share."""
    losses = [rng.normal(mean, SD, SEEDS) for mean in means]
    for family in (1, len(means)):
        rows = [row(of, size, relation, family) for of, size in zip(losses, SIZES, strict=True)]
        verdict = rules.verdict(rows)
        if verdict not in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
            return verdict, rows
    return verdict, rows


@pytest.mark.parametrize(
    ('means', 'relation', 'least', 'most'),
    [
        # True in all contexts: the claim can hold.
        ((0.0,) * 6, 'not_better', {'holds': 0.8}, {'fails': 0.01, 'holds only if': 0.05}),
        ((0.03,) * 6, 'worse', {'holds': 0.95}, {'fails': 0.01, 'holds only if': 0.05}),
        # False in one context, at the edge of what is false there.
        ((*(0.0,) * 5, -MARGIN), 'not_better', {}, {'holds': 0.05, 'fails': 0.01}),
        ((*(0.03,) * 5, MARGIN), 'worse', {}, {'holds': 0.05, 'fails': 0.01}),
        # False in all of them.
        ((-0.03,) * 6, 'not_better', {'fails': 0.9}, {'holds': 0.01, 'holds only if': 0.05}),
    ],
)
def test_how_often_a_claim_in_six_contexts_is_decided(means, relation, least, most):
    rng = np.random.default_rng(0)
    verdicts = [decided(rng, means, relation)[0] for _ in range(NUMBER)]
    shares = {word: sum(of == word for of in verdicts) / NUMBER for word in ClaimVerdict}
    # Three standard errors of a share of 0.05.
    slack = 3 * (0.05 * 0.95 / NUMBER) ** 0.5
    assert all(shares[word] >= share for word, share in least.items()), shares
    assert all(shares[word] <= share + slack for word, share in most.items()), shares


def test_rows_that_a_condition_selects_err_together_at_most_at_the_error_rate():
    """At the edge of the margin every word is false in one direction."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(NUMBER):
        losses = [rng.normal(-MARGIN, SD, SEEDS) for _ in SIZES]
        rows = [row(of, size, 'not_better', 6) for of, size in zip(losses, SIZES, strict=True)]
        wrong += any(of.speaks == Speaks.FOR for of in rows)
    assert wrong / NUMBER <= 0.05 + 3 * (0.05 * 0.95 / NUMBER) ** 0.5

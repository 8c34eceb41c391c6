"""C1: one matrix for queries and keys."""

from qkattn.claims.checks import symmetric_scores
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='C1',
    statement='Q Q^T is symmetric and carries half the information of Q K^T.',
    source='A thread that asks why attention does not use Q Q^T.',
    rule='Holds if the scores equal their transpose for random weights, and D H parameters take '
    'the place of 2 D H.',
    checks=(symmetric_scores.shared_scores,),
)

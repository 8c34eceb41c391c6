"""C1: Q Q^T in place of Q K^T."""

from qkattn.claims.checks import tied_scores
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='C1',
    title='Q Q^T is symmetric, with half the information',
    statement='Q Q^T is symmetric, carries half the information of Q K^T, and its diagonal '
    'dominates.',
    source='A thread that asks why attention does not use Q Q^T, with an answer by an experimenter',
    rule='Each part is a context. Half the information: a share of 0.4 to 0.6 of the free '
    'numbers of A, or of the pattern of T tokens. The diagonal dominates: it is the largest '
    'of its row in more than half of the rows at initialization, T = 64.',
    checks=(
        tied_scores.symmetry,
        tied_scores.half_the_numbers,
        tied_scores.half_the_pattern,
        tied_scores.dominant_diagonal,
    ),
)

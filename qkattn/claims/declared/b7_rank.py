"""B7: the rank of W_Q W_K^T."""

from qkattn.claims.checks import truncated_ranks
from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='B7',
    title='the rank may be below the head size',
    statement='W_Q W_K^T may have a low rank: below the head size the loss at equal parameter '
    'count is not worse.',
    source='A forum thread: W_Q and W_K allow a low-rank W.',
    rule='Holds if no rank below the head size, which is that of the baseline, is worse; that '
    'low_rank has every rank that it is given is a premise.',
    premises=(truncated_ranks.every_rank, truncated_ranks.least_error),
    expectations=tuple(
        Expectation(
            'rank',
            f'low_rank(rank={rank})/vo',
            'not_worse',
            x=float(rank),
            x_label='rank',
            curve='W_Q W_K^T of rank r',
        )
        for rank in (1, 2, 4, 8, 16)
    ),
)

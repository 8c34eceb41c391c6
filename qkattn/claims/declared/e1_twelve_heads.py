"""E1: twelve heads without W_Q."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='E1',
    title='W_Q = I at twelve heads loses nothing',
    statement='W_Q = I at twelve heads loses nothing.',
    source='Karbevski and Mijoski 2025, arXiv 2510.23912',
    rule="Holds if the tests find equivalence within the margin, at the baseline's shape and at "
    'equal parameter count, both arms tuned and annealed.',
    reported='no loss, with 8 % fewer parameters outside the embedding',
    expectations=(
        Expectation(
            'twelve_heads', 'query_free/vo', 'equivalent', at='removed', context={'shape': 'equal'}
        ),
        Expectation('twelve_heads', 'query_free/vo', 'equivalent', context={'shape': 'matched'}),
    ),
)

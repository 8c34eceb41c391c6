"""E2: a nonlinear query, tuned and untuned."""

from qkattn.claims.claim import Claim, Expectation, Measure
from qkattn.claims.measures.untuned import untuned

CLAIM = Claim(
    name='E2',
    title='a nonlinear query is better',
    statement='A nonlinear query is better than the baseline.',
    source='Karbevski 2026, arXiv 2603.13381; a public audit finds that the gain is that of tuning '
    'the baseline.',
    rule='Holds if it is better with both arms tuned, and with both at the lowest learning rate of '
    'the sweep; holds only if the baseline is untuned, where tuning takes the gain away.',
    reported='-0.037 nats untuned; at most 0.005 after the baseline is tuned',
    expectations=(
        Expectation('nonlinear', 'nonlinear_query/vo', 'better', context={'baseline': 'tuned'}),
    ),
    measures=(Measure('nonlinear_untuned', untuned('nonlinear_query/vo')),),
)

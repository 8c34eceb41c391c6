"""E3: the positive control."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='E3',
    title='W_Q = W_K harms a masked language model',
    statement='Positive control: one matrix for queries and keys makes a masked language model '
    'worse.',
    source='Courtois et al. 2024, ACL Findings, arXiv 2406.06366',
    rule="Holds if shared_qk/vo is worse than qk/vo at the baseline's shape and at equal parameter "
    'count.',
    reported='+0.10 to +0.15 nats per masked token at equal width',
    expectations=(
        Expectation(
            'masked',
            'shared_qk/vo',
            'worse',
            at='removed',
            context={'shape': 'equal'},
            reported=(0.10, 0.15),
        ),
        Expectation('masked', 'shared_qk/vo', 'worse', context={'shape': 'matched'}),
    ),
)

"""A6: W_Q and W_K of full size in every head."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='A6',
    title='W_Q and W_K of full size in every head lower the loss',
    statement='W_Q and W_K of full size (D x D) in every head buy a lower loss at equal parameter '
    'count.',
    source='A thread on the mathematics of self-attention, about papers that define heads so.',
    rule='Holds if both ways to write scores of rank D, as two full matrices and as one, are '
    'better than heads of size D/N, each at its own learning rate.',
    expectations=(
        Expectation('full_heads', 'full_size/vo', 'better', context={'scores': 'W_Q W_K^T'}),
        Expectation('full_heads', 'merged/vo', 'better', context={'scores': 'W_QK'}),
    ),
)

"""A5: what N heads cost and buy."""

from qkattn.claims.checks import parameter_counts
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='A5',
    title='N heads cost as much as one, with N patterns',
    statement='With H = D / N a head has 2 D^2 / N parameters in W_Q and W_K; N heads have 2 '
    'D^2 together and buy N attention patterns.',
    source='A thread on multi-head attention',
    rule='Holds if the counts are those at every N, and the patterns of N heads are linearly '
    'independent.',
    checks=(parameter_counts.heads_of_a_fixed_width,),
)

"""A2: parameters of one matrix and of two."""

from qkattn.claims.checks import parameter_counts
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='A2',
    title='merging them adds parameters if D > 2 H',
    statement='One matrix per head has D^2 parameters and two have 2 D H: merging adds '
    'parameters if and only if D > 2 H.',
    source='A thread on the mathematics of self-attention: why two matrices?',
    rule='Holds if the parameters counted on layers are N D^2 and 2 N D H at every D and H, '
    'and merging adds some exactly where D > 2 H; with fewer key heads, wherever D > 2 H.',
    checks=(parameter_counts.merged_against_factored,),
)

"""C7: what Q, K, V and W_O each do, by 2 x 2 matrices."""

from qkattn.claims.checks import two_by_two
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='C7',
    title='W_Q and W_K choose where, W_V and W_O what',
    statement='By 2 x 2 matrices: W_Q and W_K act through A = W_Q W_K^T alone and choose where'
    ' to attend, W_V and W_O through B = W_V W_O alone and choose what is moved; Q Q^T ties A'
    ' and its transpose.',
    source='A thread that asks why attention does not use Q Q^T: intuition from 2 x 2 matrices',
    rule='Holds if layers have the A, B and numbers of free entries worked out by hand, GL(H) '
    'of each circuit leaves the output as it is, and W_V and W_O leave the pattern as it is.',
    checks=(
        two_by_two.worked_by_hand,
        two_by_two.where_and_what,
        two_by_two.gauge,
        two_by_two.one_way,
        two_by_two.free_in_each_variant,
    ),
)

"""D1: W_i^Q after a shared W^Q."""

from qkattn.claims.checks import double_projection
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='D1',
    title='W_i^Q after a shared W^Q adds no functions',
    statement='W_i^Q applied after a shared W^Q is the same function class as one matrix per head.',
    source='Threads on multi-head lectures and on the equations of Vaswani et al. 2017',
    rule='Holds where folding and unfolding leave the output as it is in float64 and all W_Q '
    'are within reach; the width R of the shared projection is a context.',
    checks=(
        double_projection.folded,
        double_projection.unfolded,
        double_projection.reach,
    ),
)

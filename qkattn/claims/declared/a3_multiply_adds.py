"""A3: multiply-adds of one matrix and of two."""

from qkattn.claims.checks import multiply_adds
from qkattn.claims.claim import Claim, Measure
from qkattn.claims.measures import crossover

CLAIM = Claim(
    name='A3',
    title='merging them adds multiply-adds if D >= 2 H',
    statement='Per head, scores of T tokens take 2 T D H + T^2 H multiply-adds with two '
    'matrices and T D^2 + T^2 D with one, which is never less if D >= 2 H, less up to T = D '
    '(2 H - D) / (D - H) if H < D < 2 H, and always less if H >= D.',
    source='A thread on the mathematics of self-attention: why two matrices?',
    rule='Holds if the compiled programs and the traced models have these counts, which cross '
    'there; measured times stand beside them.',
    checks=(
        multiply_adds.counted_twice,
        multiply_adds.where_they_cross,
    ),
    measures=(Measure('crossover', crossover.read, crossover.record),),
)

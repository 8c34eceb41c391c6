"""C5: the encoder without W_O."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='C5',
    title='the same without W_O',
    statement='Dropping W_O in the encoder is never better than about break-even at equal '
    'parameter count.',
    source='A thread that asks why attention does not use Q Q^T, with an experimenter who answers.',
    rule='Holds if it is not better by more than the margin, at every width.',
    expectations=(Expectation('encoder_side', 'qk/vo?encoder_variant=qk/no_o', 'not_better'),),
)

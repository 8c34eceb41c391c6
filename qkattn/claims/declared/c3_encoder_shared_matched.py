"""C3: Q Q^T in the encoder, at equal parameter count."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='C3',
    title='Q Q^T is not better with its savings reinvested',
    statement='With d_model adjusted to about the same number of parameters, Q Q^T in the encoder '
    'still does not become better.',
    source='A thread that asks why attention does not use Q Q^T, with an experimenter who answers.',
    rule='Holds if it is not better by more than the margin at equal parameter count, at every '
    'width.',
    expectations=(Expectation('encoder_side', 'qk/vo?encoder_variant=shared_qk/vo', 'not_better'),),
)

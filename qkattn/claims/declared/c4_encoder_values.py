"""C4: the encoder without W_V."""

from qkattn.claims.claim import Claim, Expectation

VARIANT = 'qk/vo?encoder_variant=qk/no_v'

CLAIM = Claim(
    name='C4',
    title='the same without W_V',
    statement='The same goes for replacing V: worse at the same shape, and not better at equal '
    'parameter count.',
    source='A thread that asks why attention does not use Q Q^T, with an experimenter who answers.',
    rule="Holds if the encoder without W_V is worse at the baseline's shape, and at equal "
    'parameter count not better by more than the margin, at every width.',
    expectations=(
        Expectation('encoder_side', VARIANT, 'worse', at='removed', context={'shape': 'equal'}),
        Expectation('encoder_side', VARIANT, 'not_better', context={'shape': 'matched'}),
    ),
)

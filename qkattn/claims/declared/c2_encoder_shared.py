"""C2: Q Q^T in the encoder of a translation model."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='C2',
    title='Q Q^T is worse in an encoder',
    statement='Q Q^T in the encoder of a translation model works, saves parameters and performs '
    'worse.',
    source='A thread that asks why attention does not use Q Q^T, with an experimenter who answers.',
    rule="Holds if one matrix for queries and keys is worse at the baseline's shape, at every "
    'width.',
    reported='d_model from 128 to 2048: works, saves weights, performs worse',
    expectations=(
        Expectation('encoder_side', 'qk/vo?encoder_variant=shared_qk/vo', 'worse', at='removed'),
    ),
)

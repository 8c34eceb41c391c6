"""D2: training with two matrices in a row."""

from qkattn.claims.claim import Claim, Expectation, Measure
from qkattn.claims.measures import factor_norms

DOUBLED = {'double/vo': 'W_Q, W_K', 'qk/double': 'W_V', 'double/double': 'W_Q, W_K, W_V'}

CLAIM = Claim(
    name='D2',
    title='two matrices in a row train differently',
    statement='Two matrices in a row, which write the same functions as one, train differently.',
    source='A thread on the lectures about multi-head attention.',
    rule="Holds if each over-parameterised form differs from the baseline at the baseline's shape, "
    'learning rate and weight decay tuned for each.',
    expectations=tuple(
        Expectation('overparameterised', variant, 'different', context={'doubled': name})
        for variant, name in DOUBLED.items()
    ),
    measures=(Measure('overparameterised', factor_norms.read, factor_norms.record),),
)

"""B2: a single head without W_Q."""

from qkattn.claims.claim import Claim, Expectation, Measure
from qkattn.claims.measures.curves import growth_of

CLAIM = Claim(
    name='B2',
    title='without W_Q a single head trains to a loss 0.01 nats higher',
    statement='Without W_Q the training loss of a single head is about 0.01 nats higher, and the '
    'difference does not grow.',
    source='A forum thread with an experiment on a layer of one head.',
    rule="Read as a loss on the test split. Holds if, at the baseline's shape, the interval of the "
    'difference lies between 0.005 and 0.015, what rounds to 0.01, and that of its growth from the '
    'first evaluation to the last below the margin.',
    reported='training loss +0.01',
    expectations=(
        Expectation(
            'single_head', 'query_free/vo', 'as_reported', at='removed', reported=(0.005, 0.015)
        ),
    ),
    measures=(Measure('single_head', growth_of('query_free/vo')),),
)

"""B3: is the difference between one product and two numerical?"""

from qkattn.claims.claim import Claim, Measure
from qkattn.claims.measures import drift

CLAIM = Claim(
    name='B3',
    title='one product against two is a numerical effect',
    statement="The difference between a trained single head with W_Q and W_K and one with W_K' = "
    'W_K W_Q^T alone is a numerical effect of one product against two.',
    source='A forum thread on whether W_Q is needed, with an experiment.',
    rule='Fails in a precision if models that start as one function and see the same batches have '
    f'logits that differ by more than {drift.BEYOND:g} times what rounding explains at the last '
    'step, else holds there.',
    measures=(Measure(drift.STUDY, drift.read, drift.record),),
)

"""B4: W_Q in multi-head attention, in both readings."""

from qkattn.claims.claim import Claim, Expectation

SLICES, WHOLE = {'reading': 'slices of X'}, {'reading': 'all of X in every head'}

CLAIM = Claim(
    name='B4',
    title='multi-head attention needs W_Q or W_K, not both',
    statement='In multi-head attention W_Q is not necessary: it is enough to transform either keys '
    'or queries.',
    source='A forum thread in which both this and its opposite are said.',
    rule='Holds if, at equal parameter count, attention is not worse without W_Q and without W_K, '
    'where heads have slices of X as queries (keys), and not worse where every head has all of X, '
    'which is one matrix W_QK a head.',
    expectations=(
        Expectation(
            'lm_stdlib', 'query_free/vo', 'not_worse', context={**SLICES, 'without': 'W_Q'}
        ),
        Expectation('decoder', 'key_free/vo', 'not_worse', context={**SLICES, 'without': 'W_K'}),
        Expectation('full_heads', 'merged/vo', 'not_worse', context={**WHOLE, 'without': 'W_Q'}),
    ),
)

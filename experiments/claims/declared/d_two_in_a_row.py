"""Group D: one projection or two in a row?"""

from experiments.claims.checks import rewrites
from experiments.claims.claim import Claim, Expectation
from experiments.claims.declared import threads

SOURCES = f'{threads.TWO_IN_A_ROW}; the equations of Vaswani et al. 2017, arXiv 1706.03762'

D1 = Claim(
    name='D1',
    title='W_i^Q after a shared W^Q adds no functions',
    statement='W_i^Q applied after a shared W^Q is the same function class as one matrix per head.',
    source=SOURCES,
    rule='Holds where folding and unfolding leave the output unchanged in float64 and every W_Q '
    'can be reached; the width R of the shared projection is a context.',
    checks=(rewrites.two_in_a_row,),
    conditions={
        'width of the shared projection: R >= D': (
            'the shared projection is at least as wide as the model'
        ),
    },
    meanings={
        'holds': (
            'a shared projection before the matrices of the heads adds no functions, whatever its '
            'width'
        ),
        'width of the shared projection: R >= D': (
            'a shared projection before the matrices of the heads adds no functions, and loses '
            'some if it is narrower than the model'
        ),
        'fails': (
            'a shared projection before the matrices of the heads changes what attention can '
            'express'
        ),
    },
)

D2 = Claim(
    name='D2',
    title='two matrices in a row train differently',
    statement='Two matrices in a row, which express the same functions as one, train differently.',
    source=threads.TWO_IN_A_ROW,
    rule="Holds if each over-parameterised form differs from the baseline at the baseline's shape, "
    'with learning rate and weight decay tuned for each.',
    expectations=tuple(
        Expectation('lm_doubled', variant, 'different', context={'doubled': name})
        for variant, name in (
            ('double/vo', 'W_Q, W_K'),
            ('qk/double', 'W_V'),
            ('double/double', 'W_Q, W_K, W_V'),
        )
    ),
    meanings={
        'holds': (
            'two matrices in a row change the loss by more than the margin, although they express '
            'the same functions'
        ),
        'holds only if': (
            'two matrices in a row change the loss by more than the margin for some of W_Q, W_K '
            'and W_V, or in some settings'
        ),
        'fails': (
            'two matrices in a row train like one, within the margin, so the second one is not '
            'worth its parameters'
        ),
        'undecided': (
            'not known whether two matrices in a row change the loss by more than the margin'
        ),
    },
)

D3 = Claim(
    name='D3',
    title='implementations learn one matrix per head',
    statement='Implementations learn one matrix per head directly, for Q, K and V.',
    source=SOURCES,
    rule='Holds if every parameter of c_attn in GPT-2, and of the projections in flax.nnx, belongs '
    'to exactly one head, and if heads that are trained inside one matrix end as if each were '
    'trained by itself; the optimizer is a context.',
    checks=(rewrites.one_matrix_per_head, rewrites.steps_of_training),
    conditions={
        'optimizer: Adam, entry by entry': (
            'the optimizer updates each entry by itself, as Adam does and Muon does not'
        ),
    },
    meanings={
        'holds': (
            'it does not matter whether the matrices of the heads are stored as one, whatever the '
            'optimizer'
        ),
        'optimizer: Adam, entry by entry': (
            'with Adam it does not matter whether the matrices of the heads are stored as one; '
            'with Muon, which updates whole matrices, it does'
        ),
        'fails': 'it matters whether the matrices of the heads are stored as one, even with Adam',
    },
)

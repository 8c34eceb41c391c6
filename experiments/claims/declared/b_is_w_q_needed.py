"""Group B: is W_Q needed?"""

from functools import partial

from experiments.claims import measures
from experiments.claims.checks import rewrites
from experiments.claims.claim import Claim, Expectation, Kind, Measure
from experiments.claims.declared import threads

# By scale, the layers of deep stacks, and how many times as many as the baseline's they are.
DEPTHS = {'smoke': {4: 2, 8: 4}, 'cpu': {4: 2, 8: 4}, 'gpu': {24: 2, 48: 4}}
SLICES = {'reading': 'slices of X'}
WHOLE = {'reading': 'all of X in every head'}

B1 = Claim(
    name='B1',
    title='in a single head W_Q adds no functions',
    statement="With a single head, W_K' = W_K W_Q^T allows Q = X. The layer expresses the same "
    'functions with 3/4 of the attention parameters.',
    source=threads.NO_QUERY_MATRIX,
    rule="Holds where Q = X with the best W_K' gives the same softmax input in float64 with 3/4 of "
    'the parameters; biases, RoPE and more heads are contexts.',
    checks=(rewrites.queries_of_one_head, rewrites.queries_of_many_heads),
    conditions={'layer: single head': 'the layer has a single head, without biases or RoPE'},
    meanings={
        'holds': (
            'a layer can drop W_Q and a quarter of its attention parameters without losing '
            'functions'
        ),
        'layer: single head': (
            'a single head can drop W_Q and a quarter of its attention parameters without losing '
            'functions; with biases, RoPE or more heads, dropping it loses functions or saves no '
            'parameters'
        ),
        'fails': 'dropping W_Q loses functions or saves no parameters, even in a single head',
    },
)

B2 = Claim(
    name='B2',
    title='without W_Q a single head trains to a loss 0.01 nats higher',
    statement='Without W_Q the training loss of a single head is about 0.01 nats higher, and the '
    'difference does not grow.',
    source=f'{threads.NO_QUERY_MATRIX}, with an experiment',
    rule="The loss is read on the test split, at the baseline's shape. Holds if the interval of "
    'the difference lies between 0.005 and 0.015, which round to 0.01, and the interval of its '
    'growth on the validation split, from the first evaluation to the last, lies below the margin.',
    reported='training loss +0.01',
    expectations=(
        Expectation(
            'lm_one_head',
            'query_free/vo',
            'as_reported',
            at=Kind.SAME_SHAPE,
            reported=(0.005, 0.015),
        ),
    ),
    measures=(Measure('lm_one_head', partial(measures.growth, variant='query_free/vo')),),
    meanings={
        'holds': (
            'dropping W_Q from a single head costs the reported 0.01 nats/token, and no more '
            'later in training'
        ),
        'holds only if': (
            'dropping W_Q from a single head costs the reported 0.01 nats/token in some settings '
            'only'
        ),
        'fails': (
            'what dropping W_Q from a single head costs is not the reported 0.01 nats/token, but '
            'the difference measured here'
        ),
        'undecided': (
            'not known whether dropping W_Q from a single head costs the reported 0.01 nats/token'
        ),
    },
)

B3 = Claim(
    name='B3',
    title='a trained head without W_Q differs only by a numerical effect',
    statement='If a single head with W_Q and W_K, and one with only '
    "W_K' = W_K W_Q^T, are both trained, they differ only by a numerical effect: one product in "
    'place of two.',
    source=f'{threads.NO_QUERY_MATRIX}, an answer',
    rule='Two heads, with and without W_Q, start as one function and are trained on the same '
    'sequences (trained apart). Fails where their softmax inputs differ by more than rounding in '
    'float64. For comparison, a trained head is rewritten without W_Q (trained, one product in '
    'place of two). The optimizer is a context.',
    checks=(rewrites.trained_apart,),
    meanings={
        'holds': 'a single head trains to the same function with and without W_Q, up to rounding',
        'holds only if': (
            'a single head trains to the same function with and without W_Q only with some '
            'optimizers'
        ),
        'fails': (
            'W_Q of a trained single head can be merged away, but a head that is trained without '
            'it learns another function'
        ),
    },
)

B4 = Claim(
    name='B4',
    title='multi-head attention needs W_Q or W_K, not both',
    statement='Multi-head attention does not need W_Q: it is enough to transform keys or queries.',
    source=f'{threads.NO_QUERY_MATRIX}, which states both this and its opposite',
    rule='Holds if, at equal parameter count, attention is not worse in any of three forms: '
    'without W_Q, where heads take slices of X as queries; without W_K, where heads take slices '
    'of X as keys; and where every head reads all of X, through one matrix W_QK of its own.',
    expectations=tuple(
        Expectation('lm_dropped', variant, 'not_worse', context={**reading, 'without': without})
        for variant, reading, without in (
            ('query_free/vo', SLICES, 'W_Q'),
            ('key_free/vo', SLICES, 'W_K'),
            ('merged/vo', WHOLE, 'W_Q'),
        )
    ),
    conditions={
        'reading: all of X in every head': (
            'every head reads all of X through a D x D matrix W_QK of its own (merged/vo)'
        ),
    },
    meanings={
        'holds': (
            'W_Q or W_K can be dropped, or both merged, at equal parameter count without a loss '
            'beyond the margin'
        ),
        'holds only if': (
            'dropping W_Q, dropping W_K or merging them costs more than the margin in one form or '
            'setting, and not in another'
        ),
        'reading: all of X in every head': (
            'W_Q and W_K can be merged into one W_QK per head at equal parameter count without a '
            'loss beyond the margin; heads that take slices of X in place of W_Q or W_K are not '
            'shown to do as well, and in at least one form lose more than the margin'
        ),
        'fails': (
            'dropping W_Q, dropping W_K and merging them each cost more than the margin at equal '
            'parameter count'
        ),
        'undecided': (
            'not known whether W_Q or W_K can be dropped, or both merged, without a loss beyond '
            'the margin'
        ),
    },
)

B5 = Claim(
    name='B5',
    title='many single-head layers beat fewer multi-head ones',
    statement='At equal parameter count many single-head layers beat fewer multi-head layers.',
    source=f'{threads.NO_QUERY_MATRIX}; Liu et al. 2021, arXiv 2106.09650, with a special '
    'initialization',
    rule='Holds if stacks of single-head layers, two and four times as deep as the multi-head '
    'baseline, are better.',
    expectations=tuple(
        Expectation(
            'lm_near_margin',
            f'qk/vo?num_heads=1&num_layers={layers}',
            'better',
            context={'depth': f'{times} times'},
            scales=(scale,),
        )
        for scale, depths in DEPTHS.items()
        for layers, times in depths.items()
    ),
    meanings={
        'holds': (
            'more layers of a single head lower the loss by more than the margin at equal '
            'parameter count'
        ),
        'holds only if': (
            'more layers of a single head lower the loss by more than the margin at some depths '
            'or sizes only'
        ),
        'fails': (
            'more layers of a single head do not pay: at equal parameter count the loss is not '
            'lower by more than the margin'
        ),
        'undecided': (
            'not known whether more layers of a single head lower the loss by more than the margin'
        ),
    },
)

B6 = Claim(
    name='B6',
    title='early differences between arms are not the final ones',
    statement='Differences between arms early in training are not the differences between '
    'annealed models.',
    source=f'{threads.NO_QUERY_MATRIX}: removing a matrix acts like a lower learning rate',
    rule='Holds if, at every fraction of the steps, the difference of some arm from the baseline '
    'is more than the margin away from its difference after annealing, on the same seeds, each '
    'arm at its own learning rate. A fraction speaks against the claim only if every arm is shown '
    'to change by less than the margin; otherwise it leaves the claim open.',
    measures=(Measure('lm_dropped', measures.early),),
    conditions={
        'fraction of the steps: 0.25': (
            'losses are read after a quarter of the steps, not after three quarters'
        ),
        'fraction of the steps: 0.25; 0.5': (
            'losses are read after a quarter or half of the steps, not after three quarters'
        ),
    },
    meanings={
        'holds': (
            'every point before annealing is too early to compare variants: the difference of '
            'some variant is more than the margin from its final one'
        ),
        'holds only if': (
            'some points before annealing are too early to compare variants: the difference of '
            'some variant is more than the margin from its final one'
        ),
        'fraction of the steps: 0.25': (
            'a quarter of the steps is too early to compare variants; after three quarters, no '
            'difference is more than the margin from its final one'
        ),
        'fraction of the steps: 0.25; 0.5': (
            'a quarter or half of the steps is too early to compare variants; after three '
            'quarters, no difference is more than the margin from its final one'
        ),
        'fails': (
            'variants can be compared before annealing: no difference is more than the margin '
            'from its final one'
        ),
        'undecided': 'not known whether variants can be compared before annealing',
    },
)

B7 = Claim(
    name='B7',
    title='the rank of W_Q W_K^T may be below the head size',
    statement='W_Q W_K^T may have a low rank: below the head size, the loss at equal parameter '
    'count is not worse.',
    source=f'{threads.NO_QUERY_MATRIX}: W_Q and W_K allow a low-rank W',
    rule='The rank of the baseline is the head size. Holds if no arm of lower rank is worse.',
    expectations=tuple(
        Expectation(
            'lm_rank', f'low_rank(rank={rank})/vo', 'not_worse', context={'rank': str(rank)}
        )
        for rank in (1, 4, 12)
    ),
    conditions={'rank: 12': 'the rank is 12, half of the head size 24, and not 4 or 1'},
    meanings={
        'holds': (
            'every lower rank tried for W_Q W_K^T is enough: no loss beyond the margin at equal '
            'parameter count'
        ),
        'holds only if': (
            'some lower ranks of W_Q W_K^T are enough, without a loss beyond the margin, and some '
            'are not'
        ),
        'rank: 12': (
            'half of the head size is enough as the rank of W_Q W_K^T: no loss beyond the margin '
            'at equal parameter count; a far lower rank costs more'
        ),
        'fails': (
            'W_Q W_K^T needs a rank as large as the head: each lower one tried costs more than '
            'the margin'
        ),
        'undecided': (
            'not known whether W_Q W_K^T can have a lower rank without a loss beyond the margin'
        ),
    },
)

B8 = Claim(
    name='B8',
    title='cross-attention works with one matrix for W_Q and W_K',
    statement='Cross-attention, whose two streams differ, works as well with one matrix in place '
    'of W_Q and W_K.',
    source=f'{threads.NO_QUERY_MATRIX}, on queries of a decoder and keys of an encoder',
    rule='Holds if a translation model whose cross-attention has no W_Q, no W_K or one merged '
    'matrix is not worse at equal parameter count.',
    expectations=tuple(
        Expectation('translation_long', f'qk/vo?cross_variant={variant}', 'not_worse', context=at)
        for variant, at in (
            ('query_free/vo', {'cross-attention': 'without W_Q'}),
            ('key_free/vo', {'cross-attention': 'without W_K'}),
            ('merged/vo', {'cross-attention': 'W_QK'}),
        )
    ),
    meanings={
        'holds': (
            'in cross-attention, W_Q or W_K can be dropped, or both merged, at equal parameter '
            'count without a loss beyond the margin'
        ),
        'holds only if': (
            'in cross-attention, dropping W_Q, dropping W_K or merging them costs more than the '
            'margin in one form or setting, and not in another'
        ),
        'fails': (
            'in cross-attention, dropping W_Q, dropping W_K and merging them each cost more than '
            'the margin'
        ),
        'undecided': 'not known whether cross-attention can do without W_Q or W_K',
    },
)

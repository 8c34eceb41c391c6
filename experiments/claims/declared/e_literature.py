"""Group E: what the literature adds."""

import itertools
from functools import partial

from experiments.claims import measures
from experiments.claims.checks import rewrites
from experiments.claims.claim import Claim, Expectation, Kind, Measure

# Each costs more than the one before it, and the first more than the baseline.
ASCENDING = {
    'qk/vo?num_kv_heads=2': 'GQA',
    'qk/vo?num_kv_heads=1': 'MQA',
    'qk/k_is_v': 'K = V',
    'shared_qk/vo': 'Q = K',
    'shared_qk/k_is_v': 'Q = K = V',
}
# The shapes at which an arm is compared, as `at` and `context` of an expectation.
SHAPES = ((Kind.SAME_SHAPE, {'shape': 'equal'}), (Kind.MATCHED, {'shape': 'matched'}))

E1 = Claim(
    name='E1',
    title='W_Q = I at twelve heads loses nothing',
    statement='W_Q = I at twelve heads loses nothing.',
    source='Karbevski and Mijoski 2025, arXiv 2510.23912',
    rule="Holds if the tests find equivalence within the margin, at the baseline's shape and at "
    'equal parameter count, with both arms tuned and annealed.',
    reported='no loss, with 8 % fewer parameters outside the embedding',
    expectations=tuple(
        Expectation('lm_twelve_heads', 'query_free/vo', 'equivalent', at=at, context=shape)
        for at, shape in SHAPES
    ),
    meanings={
        'holds': 'with twelve heads, W_Q can be dropped: the loss stays within the margin',
        'holds only if': (
            'with twelve heads, W_Q can be dropped without leaving the margin only at one shape, '
            'or in some settings'
        ),
        'fails': (
            'with twelve heads, dropping W_Q changes the loss by more than the margin, at the '
            'same shape and at equal parameter count'
        ),
        'undecided': (
            'not known whether dropping W_Q from twelve heads changes the loss by more than the '
            'margin'
        ),
    },
)

E2 = Claim(
    name='E2',
    title='a nonlinear query is better',
    statement='A nonlinear query is better than the baseline.',
    source='Karbevski 2026, arXiv 2603.13381. An audit by S. Sang, '
    'https://github.com/25simsa1/1beyond_query_linearity, finds no gain over a tuned baseline.',
    rule='Holds if a nonlinear query is better both with tuned arms and with both arms at the '
    'lowest learning rate of the first grid. If tuning takes the gain away, it holds only if the '
    'baseline is untuned.',
    reported='-0.037 nats untuned; at most 0.005 after the baseline is tuned',
    expectations=(
        Expectation('lm_added', 'nonlinear_query/vo', 'better', context={'baseline': 'tuned'}),
    ),
    measures=(Measure('lm_untuned', partial(measures.at_one_rate, variant='nonlinear_query/vo')),),
    meanings={
        'holds': (
            'a nonlinear query lowers the loss by more than the margin, with and without tuning'
        ),
        'holds only if': (
            'a nonlinear query lowers the loss by more than the margin against one of a tuned and '
            'an untuned baseline, or in some settings'
        ),
        'fails': (
            'a nonlinear query does not pay: the loss is not lower by more than the margin, with '
            'or without tuning'
        ),
        'undecided': 'not known whether a nonlinear query lowers the loss by more than the margin',
    },
)

E3 = Claim(
    name='E3',
    title='W_Q = W_K harms a masked language model',
    statement='Positive control: one matrix for queries and keys makes a masked language model '
    'worse.',
    source='Courtois et al. 2024, ACL Findings, arXiv 2406.06366',
    rule="Holds if shared_qk/vo is worse than qk/vo at the baseline's shape and at equal parameter "
    'count.',
    reported='+0.10 to +0.15 nats per masked token at equal width',
    expectations=(
        Expectation(
            'masked_lm',
            'shared_qk/vo',
            'worse',
            at=Kind.SAME_SHAPE,
            context={'shape': 'equal'},
            reported=(0.10, 0.15),
        ),
        Expectation(
            'masked_lm', 'shared_qk/vo', 'worse', at='matched', context={'shape': 'matched'}
        ),
    ),
    meanings={
        'holds': (
            'one matrix for queries and keys costs a masked language model more than the margin, '
            'at the same shape and at equal parameter count'
        ),
        'holds only if': (
            'one matrix for queries and keys costs a masked language model more than the margin '
            'at one shape, or in some settings'
        ),
        'fails': (
            'one matrix for queries and keys costs a masked language model no more than the margin'
        ),
        'undecided': (
            'not known whether one matrix for queries and keys costs a masked language model more '
            'than the margin'
        ),
    },
)

GQA_COSTS = [
    Expectation('lm_sharing', 'qk/vo?num_kv_heads=2', 'worse', at=at, context=shape)
    for at, shape in SHAPES
]
EACH_COSTS_MORE = [
    Expectation(
        'lm_sharing',
        variant,
        'worse',
        at=at,
        versus=before,
        context=shape | {'order': f'after {ASCENDING[before]}'},
        label=f'{ASCENDING[variant]} against {ASCENDING[before]}',
    )
    for at, shape in SHAPES
    for before, variant in itertools.pairwise(ASCENDING)
]

E4 = Claim(
    name='E4',
    title='the cost of sharing rises: GQA, MQA, K = V, Q = K, Q = K = V',
    statement='In a causal language model the cost of sharing rises in the order GQA, MQA, '
    'K = V, Q = K, Q = K = V.',
    source='Kayyam et al. 2026, arXiv 2606.04032; Shazeer 2019, arXiv 1911.02150',
    rule='Holds if GQA is worse than the baseline, and each of the others is worse than the one '
    "before it, both at the baseline's shape and at equal parameter count.",
    reported='perplexity at the same width +0.7 %, +1.5 %, +3.1 %, +4.9 %, +25.4 %',
    expectations=(*GQA_COSTS, *EACH_COSTS_MORE),
    conditions={
        'shape: equal, order: after MQA; shape: equal, order: after Q = K; '
        'shape: matched, order: after MQA; shape: matched, order: after K = V; '
        'shape: matched, order: after Q = K': (
            'the step is from MQA to K = V, from Q = K to Q = K = V, or (at equal parameter '
            'count) from K = V to Q = K'
        ),
    },
    meanings={
        'holds': (
            'less sharing is better: each step from GQA to MQA, K = V, Q = K and Q = K = V costs '
            'more than the margin'
        ),
        'holds only if': (
            'some steps from GQA to MQA, K = V, Q = K and Q = K = V cost more than the margin, '
            'and some do not'
        ),
        'shape: equal, order: after MQA; shape: equal, order: after Q = K; shape: matched, order: '
        'after MQA; shape: matched, order: after K = V; shape: matched, order: after Q = K': (
            'sharing key/value heads is the first choice: the steps to GQA and MQA are not shown '
            'to cost more than the margin, while the further steps to K = V, Q = K and Q = K = V '
            'each do at equal parameter count'
        ),
        'fails': (
            'the order GQA, MQA, K = V, Q = K, Q = K = V is no guide: no step in it costs more '
            'than the margin'
        ),
        'undecided': 'not known in which order GQA, MQA, K = V, Q = K and Q = K = V cost more',
    },
)

E5 = Claim(
    name='E5',
    title='decay is a nuclear norm of two matrices, a Frobenius norm of one',
    statement='Weight decay on W_Q and W_K penalizes the nuclear norm of W_Q W_K^T. Weight decay '
    'on W_QK penalizes its Frobenius norm.',
    source='Kobayashi et al. 2024, arXiv 2410.23819; Srebro et al. 2005',
    rule='Holds where (|W_Q|^2 + |W_K|^2) / 2 of balanced factors is the nuclear norm, and descent '
    'shrinks singular values d to max(0, d - lambda) in factors and to d / (1 + lambda) in '
    'one matrix; where the decay acts is a context.',
    checks=(rewrites.least_penalty, rewrites.shrunk_spectra),
    conditions={'decay: in the loss': 'the decay is part of the loss; the decay of AdamW is not'},
    meanings={
        'holds': (
            'merging W_Q and W_K changes what weight decay does: two matrices are pulled towards '
            'low rank, one is not'
        ),
        'decay: in the loss': (
            'merging W_Q and W_K changes what a decay in the loss does: two matrices are pulled '
            'towards low rank, one is not; this does not describe the decay of AdamW'
        ),
        'fails': 'weight decay does not pull W_Q W_K^T towards low rank',
    },
)

E6 = Claim(
    name='E6',
    title='it matters where the saved parameters go',
    statement='Where the saved parameters go (d_model, d_ff, heads, depth) changes the answer.',
    source='Shazeer 2019, arXiv 1911.02150, against equal-width comparisons; this project.',
    rule='Holds if, with K = V at equal parameter count, each other destination differs from '
    'd_model.',
    expectations=tuple(
        Expectation(
            'saved_parameters',
            f'qk/k_is_v [{destination}]',
            'different',
            versus='qk/k_is_v [d_model]',
            context={'destination': f'{destination}, not d_model'},
        )
        for destination in ('d_ff', 'num_heads', 'num_layers')
    ),
    meanings={
        'holds': (
            'where the saved parameters go matters: with K = V, every other destination changes '
            'the loss by more than the margin'
        ),
        'holds only if': (
            'with K = V, some destinations of the saved parameters change the loss by more than '
            'the margin, and some do not'
        ),
        'fails': (
            'where the saved parameters go does not matter: with K = V, all destinations agree '
            'within the margin'
        ),
        'undecided': 'not known whether it matters where the saved parameters go',
    },
)

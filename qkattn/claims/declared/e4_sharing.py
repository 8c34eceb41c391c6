"""E4: the order of MQA, GQA, K = V, Q = K and Q = K = V."""

from qkattn.claims.claim import Claim, Expectation

# Each costs more than the one before it, and the first more than the baseline.
ORDER = {
    'qk/vo?num_kv_heads=2': 'GQA',
    'qk/vo?num_kv_heads=1': 'MQA',
    'qk/k_is_v': 'K = V',
    'shared_qk/vo': 'Q = K',
    'shared_qk/k_is_v': 'Q = K = V',
}
STEPS = list(zip(list(ORDER)[1:], ORDER, strict=False))
SHAPES = (('removed', 'equal'), ('matched', 'matched'))

CLAIM = Claim(
    name='E4',
    title='costs ascend: GQA, MQA, K = V, Q = K, Q = K = V',
    statement='In a causal language model sharing costs, in ascending order: GQA, MQA, K = V, '
    'Q = K, Q = K = V.',
    source='Kayyam et al. 2026, arXiv 2606.04032; Shazeer 2019, arXiv 1911.02150',
    rule='Holds if GQA is worse than the baseline, and each other than the one before it, both at '
    'the same width and at equal parameter count.',
    reported='perplexity at the same width +0.7 %, +1.5 %, +3.1 %, +4.9 %, +25.4 %',
    expectations=(
        *(
            Expectation('sharing', next(iter(ORDER)), 'worse', at=at, context={'shape': shape})
            for at, shape in SHAPES
        ),
        *(
            Expectation(
                'sharing',
                variant,
                'worse',
                at=at,
                versus=before,
                context={'shape': shape, 'order': f'after {ORDER[before]}'},
                curve=ORDER[variant],
            )
            for at, shape in SHAPES
            for variant, before in STEPS
        ),
    ),
)

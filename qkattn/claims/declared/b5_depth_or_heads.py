"""B5: many single-head layers against fewer multi-head ones."""

from qkattn.claims.claim import Claim, Expectation

CLAIM = Claim(
    name='B5',
    title='many single-head layers beat fewer multi-head ones',
    statement='Many single-head layers are better than fewer multi-head layers at equal parameter '
    'count.',
    source='A forum thread; Liu et al. 2021, arXiv 2106.09650, with an initialization of its own.',
    rule='Holds if stacks of single-head layers, two and four times as deep as the multi-head '
    'baseline, are better.',
    expectations=tuple(
        Expectation(
            'depth_heads',
            f'qk/vo?num_heads=1&num_layers={layers}',
            'better',
            context={'depth': f'{times} times'},
            scales=(scale,),
        )
        for scale, depths in {'smoke': {4: 2}, 'cpu': {8: 2, 16: 4}, 'gpu': {24: 2, 48: 4}}.items()
        for layers, times in depths.items()
    ),
)

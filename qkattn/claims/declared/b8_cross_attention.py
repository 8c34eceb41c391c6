"""B8: merging and dropping in cross-attention."""

from qkattn.claims.claim import Claim, Expectation

MATRICES = {'query_free/vo': 'without W_Q', 'key_free/vo': 'without W_K', 'merged/vo': 'W_QK'}

CLAIM = Claim(
    name='B8',
    title='cross-attention works with one matrix for both',
    statement='Cross-attention, whose two streams differ, works as well with one matrix in place '
    'of W_Q and W_K.',
    source='A forum thread on queries of a decoder and keys of an encoder.',
    rule='Holds if a translation model whose cross-attention has no W_Q, no W_K or one merged '
    'matrix is not worse at equal parameter count.',
    expectations=tuple(
        Expectation(
            'cross',
            f'qk/vo?cross_variant={variant}',
            'not_worse',
            context={'cross-attention': name},
        )
        for variant, name in MATRICES.items()
    ),
)

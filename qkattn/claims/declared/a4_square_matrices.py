"""A4: square matrices of implementations."""

from qkattn.claims.checks import published_layouts
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='A4',
    title='Linear(D, D) is the matrices of all heads',
    statement='A square Linear(D, D) holds N rectangular D x H matrices side by side: equal '
    'function, equal parameter count.',
    source='A thread on multi-head attention',
    rule='Holds if both compute the same output in float64, and the heads of imported GPT-2 '
    'and nanoGPT tensors are slices of their square matrices, bit by bit.',
    checks=(
        published_layouts.side_by_side,
        published_layouts.imports,
    ),
)

"""B1: Q = X for a single head."""

from qkattn.claims.checks import identity_queries
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='B1',
    title='in a single head W_Q adds no functions',
    statement="With a single head, W_K' = W_K W_Q^T makes Q = X: the same functions with 3/4 "
    'of the attention parameters.',
    source='A forum thread: is W_Q needed?',
    rule='Holds where the best Q = X gives the same softmax input in float64 with 3/4 of the '
    'parameters; biases, RoPE and more heads are contexts.',
    checks=(
        identity_queries.single_head,
        identity_queries.single_head_with_more,
        identity_queries.many_heads,
    ),
)

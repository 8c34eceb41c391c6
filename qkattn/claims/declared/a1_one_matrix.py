"""A1: one W_QK in place of W_Q and W_K."""

from qkattn.claims.checks import one_matrix
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='A1',
    title='one W_QK can replace W_Q and W_K',
    statement='softmax(X W_Q W_K^T X^T) can be written with one D x D matrix W_QK, whose rank '
    'is at most H.',
    source='A thread on the mathematics of self-attention: why two matrices?',
    rule='Holds where one matrix gives the same softmax input, output and logits in float64 '
    'and has rank H; what stands between W_Q and W_K is a context.',
    checks=(
        one_matrix.same_function,
        one_matrix.ranks,
        one_matrix.what_stands_between,
    ),
)

"""E5: weight decay of factors and of their product."""

from qkattn.claims.checks import weight_decay
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='E5',
    title='decay is a nuclear norm of two matrices, a Frobenius norm of one',
    statement='Weight decay on W_Q and W_K is a penalty on the nuclear norm of W_Q W_K^T, on '
    'W_QK one on its Frobenius norm.',
    source='Kobayashi et al. 2024, arXiv 2410.23819; Srebro et al. 2005',
    rule='Holds where the least (|W_Q|^2 + |W_K|^2) / 2 is the nuclear norm, and descent '
    'shrinks singular values d to max(0, d - lambda) in factors and to d / (1 + lambda) in '
    'one matrix; where the decay acts is a context.',
    checks=(
        weight_decay.least_penalty,
        weight_decay.shrunk_spectra,
    ),
)

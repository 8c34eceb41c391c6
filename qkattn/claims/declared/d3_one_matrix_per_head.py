"""D3: what implementations learn."""

from qkattn.claims.checks import published_layouts
from qkattn.claims.claim import Claim

CLAIM = Claim(
    name='D3',
    title='implementations learn one matrix per head',
    statement='Implementations learn one matrix per head directly, for Q, K and V.',
    source='Threads on multi-head lectures and on the equations of Vaswani et al. 2017',
    rule='Holds if every number of c_attn in GPT-2 and nanoGPT, and of the projections in '
    'flax.nnx, belongs to exactly one head, and training heads inside one matrix trains each '
    'as by itself; the optimizer is a context.',
    checks=(
        published_layouts.one_matrix_per_head,
        published_layouts.steps_of_training,
    ),
)

"""Does a decoder of one head that has learned need W_Q?

W_Q dropped: at the same shape, and with the savings spent on width.

    python -m experiments.ablate --config=configs/claims/lm_one_head.py:cpu \\
        --workdir=runs/lm_one_head

Expected result and time: docs/claims_b.md, B2.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='lm_one_head',
        question='Does a decoder of one head that has learned need W_Q?',
        base=language_model(scale, seeds=24, num_heads=1),
        variants=('qk/vo', 'query_free/vo'),  # with and without W_Q
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **protocol(scale, max_excess=0.003),  # tuning, tolerance and controls
    )

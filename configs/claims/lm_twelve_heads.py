"""Does a decoder of twelve heads that has learned lose anything without W_Q?

W_Q dropped: at the same shape, and with the savings spent on the MLP.

    python -m experiments.ablate --config=configs/claims/lm_twelve_heads.py:cpu \\
        --workdir=runs/lm_twelve_heads

Expected result and time: docs/claims_e.md, E1.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='lm_twelve_heads',
        question='Does a decoder of twelve heads that has learned lose anything without W_Q?',
        base=language_model(scale, seeds=12, num_heads=12),
        variants=('qk/vo', 'query_free/vo'),  # with and without W_Q
        sizes=pick(scale, smoke=('d_model=48',), cpu=('d_model=96',), gpu=('d_model=768',)),
        destinations=('d_ff',),  # saved parameters widen the MLP
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **protocol(scale, max_excess=0.003),  # tuning, tolerance and controls
    )

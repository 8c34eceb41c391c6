"""Does W_Q[n] W_K[n]^T of a decoder that has learned need more than half of its rank?

Rank 12 in heads of 24 at seeds that `lm_rank`, whose 8 leave claim B7 open, does not use.

    python -m experiments.ablate --config=configs/claims/lm_rank_12.py:cpu \\
        --workdir=runs/lm_rank_12

Expected result and time: docs/claims_b.md, B7.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='lm_rank_12',
        repeats='lm_rank' if scale != 'smoke' else None,
        question='Does W_Q[n] W_K[n]^T of a decoder that has learned need more than half of '
        'its rank?',
        base=language_model(scale, seeds=28, first_seed=8),
        variants=('qk/vo', 'low_rank(rank=12)/vo'),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **protocol(scale, equal_shape=False, max_excess=0.004),  # tuning, tolerance and controls
    )

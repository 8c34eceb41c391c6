"""How much rank does W_Q[n] W_K[n]^T of a decoder that has learned need?

Ranks below the head size, which is the baseline's; the savings are spent on width.

    python -m experiments.ablate --config=configs/claims/lm_rank.py:cpu \\
        --workdir=runs/lm_rank

Expected result and time: docs/claims_b.md, B7.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='lm_rank',
        question='How much rank does W_Q[n] W_K[n]^T of a decoder that has learned need?',
        base=language_model(scale),
        variants=(
            'qk/vo',  # the baseline
            'low_rank(rank=1)/vo',
            'low_rank(rank=4)/vo',
            'low_rank(rank=12)/vo',
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **protocol(scale, equal_shape=False, max_excess=0.004),  # tuning, tolerance and controls
    )

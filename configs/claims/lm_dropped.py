"""What does a decoder that has learned lose without a matrix?

W_Q, W_K, W_V and W_O dropped, and W_Q and W_K merged: at the same shape, and with the savings
spent on width. One head instead of four is the positive control.

    python -m experiments.ablate --config=configs/claims/lm_dropped.py:cpu \\
        --workdir=runs/lm_dropped

Expected result and time: docs/claims_b.md, B4.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    tuned = scale != 'smoke'
    return Study(
        name='lm_dropped',
        question='What does a decoder that has learned lose without a matrix?',
        base=language_model(scale, seeds=16, evaluations=4),
        variants=(
            'qk/vo',  # the baseline
            'query_free/vo',  # no W_Q
            'key_free/vo',  # no W_K
            'merged/vo',  # W_Q and W_K merged
            'qk/no_v',  # no W_V
            'qk/no_o',  # no W_O
            'qk/vo?num_heads=1',
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        expected=('qk/vo?num_heads=1 is worse',) if tuned else (),  # the positive control
        **protocol(scale, max_excess=0.003, screening=4),  # tuning, tolerance and controls
    )

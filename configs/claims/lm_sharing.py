"""What does sharing cost a decoder that has learned, across heads and matrices?

GQA, MQA, K = V, Q = K and Q = K = V: at the same shape, and with the savings spent on width. Q = K
is the positive control.

    python -m experiments.ablate --config=configs/claims/lm_sharing.py:cpu \\
        --workdir=runs/lm_sharing

Expected result and time: docs/claims_e.md, E4.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    tuned = scale != 'smoke'
    return Study(
        name='lm_sharing',
        question='What does sharing across heads and matrices cost a decoder that has learned?',
        base=language_model(scale, seeds=16),
        variants=(
            'qk/vo',  # the baseline
            'qk/vo?num_kv_heads=2',  # GQA
            'qk/vo?num_kv_heads=1',  # MQA
            'qk/k_is_v',  # W_V = W_K
            'shared_qk/vo',  # W_Q = W_K
            'shared_qk/k_is_v',  # W_Q = W_K = W_V
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        expected=('shared_qk/vo is worse',) if tuned else (),  # the positive control
        **protocol(scale, max_excess=0.003, screening=4),  # tuning, tolerance and controls
    )

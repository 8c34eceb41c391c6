"""Which differences between decoders are left after four times the steps?

Decoders without W_Q, W_V or W_O, with one W_QK, with Q = K and with K = V, each at the parameter
count of the unchanged model. The model, corpus and margin are those of lm_dropped and lm_sharing;
the seeds are used by no other study.

    python -m experiments.ablate --config=configs/claims/lm_long.py:cpu \\
        --workdir=runs/lm_long

Expected result: the differences of lm_dropped and lm_sharing, or smaller ones. Time: about 13 hours
of a core.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    tuned = scale != 'smoke'
    return Study(
        name='lm_long',
        question='Which differences between decoders are left after four times the steps?',
        base=language_model(scale, seeds=6, first_seed=56, evaluations=8, times_as_long=4),
        variants=(
            'qk/vo',  # the baseline
            'query_free/vo',  # no W_Q
            'merged/vo',  # W_Q and W_K merged
            'qk/no_v',  # no W_V
            'qk/no_o',  # no W_O
            'shared_qk/vo',  # W_Q = W_K
            'qk/k_is_v',  # W_V = W_K
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        expected=('shared_qk/vo is worse',) if tuned else (),  # the positive control
        # Tuning, tolerance and controls.
        **protocol(scale, equal_shape=False, max_excess=0.003, max_screening=4),
    )

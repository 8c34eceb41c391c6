"""What does a decoder that has learned gain from more parameters in attention?

A nonlinear query, W_Q and W_K of D x D in every head, and two matrices in a row for each; a smaller
width pays for them. One head instead of four is the positive control.

    python -m experiments.ablate --config=configs/claims/lm_added.py:cpu \\
        --workdir=runs/lm_added

Expected result and time: docs/claims_a.md, A6.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    tuned = scale != 'smoke'
    return Study(
        name='lm_added',
        question='What do more parameters in attention give a decoder that has learned?',
        base=language_model(scale),
        variants=(
            'qk/vo',  # the baseline
            'nonlinear_query/vo',
            'full_size/vo',  # W_Q and W_K of D x D
            'double/double',  # a second matrix behind W_Q, W_K and W_V
            'qk/vo?num_heads=1',
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        expected=('qk/vo?num_heads=1 is worse',) if tuned else (),  # the positive control
        **protocol(scale, equal_shape=False, max_excess=0.004),  # tuning, tolerance and controls
    )

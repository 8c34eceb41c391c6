"""What are decoders worth that fewer seeds leave near the margin?

Without W_Q or W_K, with one matrix for both, and with many layers of one head. The outer two of
five learning rates bound the loss between them: the choice of a rate hides less than with three.

    python -m experiments.ablate --config=configs/claims/lm_near_margin.py:cpu \\
        --workdir=runs/lm_near_margin

Expected result and time: docs/claims_b.md, B4 and B5.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    # The layers of decoders with one head per layer.
    depths = pick(scale, smoke=(4, 8), cpu=(4, 8), gpu=(24, 48))
    learning_rates = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
    return Study(
        name='lm_near_margin',
        repeats='lm_dropped' if scale != 'smoke' else None,
        question='What are decoders worth that fewer seeds leave near the margin?',
        base=language_model(scale, seeds=40, first_seed=16, learning_rates=learning_rates),
        variants=(
            'qk/vo',  # the baseline
            'query_free/vo',  # no W_Q
            'key_free/vo',  # no W_K
            'merged/vo',  # W_Q and W_K merged
            *(f'qk/vo?num_heads=1&num_layers={layers}' for layers in depths),
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        # Tuning, tolerance and controls.
        **protocol(scale, equal_shape=False, max_excess=0.003, screening=8),
    )

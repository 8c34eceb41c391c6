"""Does it matter where the saved parameters go?

Claim E6. To d_model, d_ff, heads or layers; each is an arm of its own.

    python -m experiments.ablate --config=configs/claims/saved_parameters.py:cpu \\
        --workdir=runs/saved_parameters
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='saved_parameters',
        question='Does it matter where the saved parameters go?',
        base=language_model(scale, num_layers=pick(scale, smoke=8, cpu=8, gpu=12)),
        variants=(
            'qk/vo',  # the baseline
            'qk/k_is_v',  # W_V = W_K
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=64',), gpu=('d_model=768',)),
        destinations=('d_model', 'd_ff', 'num_heads', 'num_layers'),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **protocol(scale),  # tuning, tolerance and controls
    )

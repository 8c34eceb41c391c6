"""Which matrices does the cross-attention of a translator need?

Claim B8, on Multi30k, English to German.

    python -m experiments.ablate --config=configs/claims/translation_cross.py:cpu \\
        --workdir=runs/translation_cross
"""

from experiments.claims.protocol import pick, protocol, translator
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    learning_rates = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    return Study(
        name='translation_cross',
        question='Which matrices does the cross-attention of a translator need?',
        base=translator(scale, seeds=40, first_seed=8, learning_rates=learning_rates),
        variants=(
            'qk/vo',  # the baseline
            'qk/vo?cross_variant=query_free/vo',  # no W_Q in cross-attention
            'qk/vo?cross_variant=key_free/vo',  # no W_K
            'qk/vo?cross_variant=merged/vo',  # W_Q and W_K merged
        ),
        sizes=pick(scale, smoke=('d_model=40',), cpu=('d_model=96',), gpu=('d_model=512',)),
        destinations=('d_ff',),  # saved parameters widen the MLP
        margin=0.02,
        # Tuning, tolerance and controls.
        **protocol(scale, equal_shape=False, max_excess=0.006, screening=8),
    )

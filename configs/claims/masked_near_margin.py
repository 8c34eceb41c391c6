"""Is a masked language model better without W_O?

The arm of `masked_lm` that its seeds leave near the margin, with others.

    python -m experiments.ablate --config=configs/claims/masked_near_margin.py:cpu \\
        --workdir=runs/masked_near_margin

Expected result and time: docs/claims_c.md, C6.
"""

from experiments.claims.protocol import masked_language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='masked_near_margin',
        repeats='masked_lm' if scale != 'smoke' else None,
        question='Is a masked language model better without W_O?',
        base=masked_language_model(
            scale,
            seeds=40,
            first_seed=8,
            learning_rates=(7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2),
        ),
        variants=('qk/vo', 'qk/no_o'),  # with and without W_O
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # Saved parameters widen the MLP. Rotary heads have even sizes, so d_model has few values.
        destinations=('d_ff',),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        # Tuning, tolerance and controls.
        **protocol(scale, equal_shape=False, max_excess=0.003, screening=8),
    )

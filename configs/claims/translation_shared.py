"""Is an encoder with one matrix for queries and keys worse, at the shape of the baseline?

Claim C2: the arm of `translation` whose seeds lie far apart, with others.

    python -m experiments.ablate --config=configs/claims/translation_shared.py:cpu \\
        --workdir=runs/translation_shared

Expected result and time: docs/claims_c.md, C2.
"""

from experiments.claims.protocol import pick, protocol, translator
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    learning_rates = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    return Study(
        name='translation_shared',
        repeats='translation' if scale != 'smoke' else None,
        question='Is an encoder with one matrix for queries and keys worse at the same shape?',
        base=translator(scale, seeds=24, first_seed=8, learning_rates=learning_rates),
        variants=('qk/vo', 'qk/vo?encoder_variant=shared_qk/vo'),
        sizes=pick(
            scale,
            smoke=('d_model=40',),
            cpu=('d_model=96',),
            gpu=tuple(f'd_model={d}' for d in (128, 512, 2048)),
        ),
        match=None,  # all arms have the baseline's shape
        margin=0.02,
        # Tuning, tolerance and controls.
        **protocol(scale, equal_shape=False, max_excess=0.006, screening=8),
    )

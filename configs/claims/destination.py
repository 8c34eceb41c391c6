"""Does it matter where the saved parameters go: to d_model, d_ff, heads or layers?

Claim E6.

    python -m experiments.ablate --config=configs/claims/destination.py:cpu \\
        --workdir=runs/destination

Expected result and time: docs/claims_e.md, E6.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='destination',
            question='Does it matter where the saved parameters go?',
            base=language_model(
                scale,
                num_layers=pick(scale, smoke=8, cpu=8, gpu=12),
                num_heads=pick(scale, smoke=4, cpu=4, gpu=12),
            ),
            variants=(
                'qk/vo',
                'shared_qk(key_norm=True,self_mask=True)/vo',
                'qk/k_is_v',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=40',), gpu=('d_model=768',)),
            destinations=('d_model', 'd_ff', 'num_heads', 'num_layers'),
            **protocol(scale),
        )
    )

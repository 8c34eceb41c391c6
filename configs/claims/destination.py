"""Does it matter where the saved parameters go: width, MLP, heads or depth?

Claim E6.

    python -m experiments.ablate --config=configs/claims/destination.py:cpu \\
        --workdir=runs/destination
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='destination',
            question='Does it matter where the saved parameters go?',
            base=trained_language_model(scale, num_layers=pick(scale, smoke=8, cpu=8, gpu=12)),
            variants=(
                'qk/vo',
                'qk/k_is_v',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=64',), gpu=('d_model=768',)),
            destinations=('d_model', 'd_ff', 'num_heads', 'num_layers'),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            **protocol(scale, equal_shape=False, choice='minimax', max_excess=0.003),
        )
    )

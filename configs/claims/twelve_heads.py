"""Does a decoder of twelve heads lose anything without W_Q?

Claim E1 (arXiv 2510.23912).

    python -m experiments.ablate --config=configs/claims/twelve_heads.py:cpu \\
        --workdir=runs/twelve_heads
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='twelve_heads',
            question='Does a decoder of twelve heads lose anything without W_Q?',
            base=trained_language_model(scale, seeds=24, num_heads=12),
            variants=(
                'qk/vo',
                'query_free/vo',
            ),
            sizes=pick(scale, smoke=('d_model=48',), cpu=('d_model=96',), gpu=('d_model=768',)),
            destinations=('d_ff',),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            **protocol(scale, equal_shape=True, choice='minimax', max_excess=0.003),
        )
    )

"""Does a layer of one head need W_Q?

Claim B2.

    python -m experiments.ablate --config=configs/claims/single_head.py:cpu \\
        --workdir=runs/single_head
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='single_head',
            question='Does a layer of one head need W_Q?',
            base=trained_language_model(scale, seeds=32, num_heads=1),
            variants=(
                'qk/vo',
                'query_free/vo',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            **protocol(scale, equal_shape=True, choice='minimax', max_excess=0.003),
        )
    )

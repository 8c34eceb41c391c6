"""Does a layer of one head need W_Q?

Claim B2; its exact form is B1.

    python -m experiments.ablate --config=configs/claims/single_head.py:cpu \\
        --workdir=runs/single_head

Expected result and time: docs/claims.md, B2.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='single_head',
            question='Does a layer of one head need W_Q?',
            base=language_model(scale, seeds=96, num_heads=1),
            variants=(
                'qk/vo',
                'query_free/vo',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=48',), gpu=('d_model=768',)),
            **protocol(scale),
        )
    )

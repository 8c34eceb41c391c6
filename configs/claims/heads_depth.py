"""Do many layers of one head beat fewer layers of four?

One head at the same depth is the positive control.

    python -m experiments.ablate --config=configs/claims/heads_depth.py:cpu \\
        --workdir=runs/heads_depth

Expected result and time: docs/claims_b.md, B5.
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    depths = pick(scale, smoke=(4, 8), cpu=(4, 8), gpu=(24, 48))
    return to_config_dict(
        Study(
            name='heads_depth',
            question='Do many layers of one head beat fewer layers of four?',
            base=trained_language_model(scale),
            variants=(
                'qk/vo',
                'qk/vo?num_heads=1',
                *(f'qk/vo?num_heads=1&num_layers={layers}' for layers in depths),
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            expected=('qk/vo?num_heads=1 is worse',) if tuned else (),
            **protocol(scale, equal_shape=False, choice='minimax'),
        )
    )

"""Deep stacks of single-head layers against wide multi-head ones at equal parameter count.

Claim B5. One head in as many layers is the positive control.

    python -m experiments.ablate --config=configs/claims/depth_heads.py:cpu \\
        --workdir=runs/depth_heads
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    depths = pick(scale, smoke=(4,), cpu=(4, 8), gpu=(24, 48))
    return to_config_dict(
        Study(
            name='depth_heads',
            question='Do many single-head layers beat fewer multi-head ones?',
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
            **protocol(scale, equal_shape=False, choice='minimax', max_excess=0.003),
        )
    )

"""Loss against parameters, and how many standard-model parameters one of an arm's is worth.

At least four sizes of each arm, all trained on the same number of tokens. The number of heads
grows with d_model: heads have 64 dimensions at scale gpu and 16 at scale cpu, where the smallest
model has a single head of 22.

    python -m experiments.ablate --config=configs/claims/scaling.py:cpu \\
        --workdir=runs/scaling

Expected result: docs/claims.md, Scaling laws. Time: about two hours on two cores.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='scaling',
            question='How many parameters is one of an arm worth?',
            base=language_model(scale, steps=1500, seeds=6),
            variants=(
                'qk/vo',
                'query_free/vo',
                'shared_qk/vo',
                'qk/no_o',
                'qk/k_is_v',
            ),
            sizes=tuple(
                f'd_model={d_model}&num_heads={num_heads}'
                for d_model, num_heads in pick(
                    scale,
                    smoke=((32, 2), (48, 3)),
                    cpu=((22, 1), (32, 2), (48, 3), (64, 4), (96, 6)),
                    gpu=((192, 3), (384, 6), (768, 12), (1152, 18)),
                )
            ),
            **protocol(scale, equal_shape=False),
        )
    )

"""Loss against parameters, and how many parameters of the standard model one of an arm is worth.

At least four sizes of each arm, all trained on the same number of tokens.

    python -m experiments.ablate --config=configs/claims/scaling.py:cpu \\
        --workdir=runs/scaling
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='scaling',
            question='How many parameters is one of an arm worth?',
            base=language_model(scale, seeds=6),
            variants=(
                'qk/vo',
                'query_free/vo',
                'shared_qk/vo',
                'qk/no_o',
                'qk/k_is_v',
            ),
            sizes=pick(
                scale,
                smoke=('d_model=32', 'd_model=48'),
                cpu=tuple(f'd_model={d}' for d in (32, 48, 72, 108)),
                gpu=tuple(f'd_model={d}' for d in (192, 384, 768, 1152)),
            ),
            **protocol(scale, equal_shape=False),
        )
    )

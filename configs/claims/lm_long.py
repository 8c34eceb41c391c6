"""What is left of the differences after four times the steps?

The arms of `lm_stdlib` that most depend on the length of training.

    python -m experiments.ablate --config=configs/claims/lm_long.py:cpu \\
        --workdir=runs/lm_long
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    return to_config_dict(
        Study(
            name='lm_long',
            question='What is left of the differences after four times the steps?',
            base=trained_language_model(scale, steps=8000, seeds=4, data='packages'),
            variants=(
                'qk/vo',
                'query_free/vo',
                'shared_qk/vo',
                'qk/no_o',
                'qk/vo?num_heads=1',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            expected=('qk/vo?num_heads=1 is worse',) if tuned else (),
            **protocol(scale, equal_shape=False, choice='minimax'),
        )
    )

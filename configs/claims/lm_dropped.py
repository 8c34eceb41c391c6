"""What do W_K, W_V and two factors of W_QK give a decoder that has learned?

Beside `lm_stdlib`, which drops W_Q and W_O; one head instead of four is the positive control.

    python -m experiments.ablate --config=configs/claims/lm_dropped.py:cpu \\
        --workdir=runs/lm_dropped
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    return to_config_dict(
        Study(
            name='lm_dropped',
            question='What do W_K, W_V and two factors of W_QK give a decoder that has learned?',
            base=trained_language_model(scale),
            variants=(
                'qk/vo',
                'key_free/vo',
                'merged/vo',
                'qk/no_v',
                'qk/vo?num_heads=1',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            expected=('qk/vo?num_heads=1 is worse',) if tuned else (),
            **protocol(scale, equal_shape=False, choice='minimax', max_excess=0.004),
        )
    )

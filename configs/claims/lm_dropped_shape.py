"""What does a decoder that has learned lose without a matrix, at the same shape?

W_Q, W_K, W_V and W_O dropped, with nothing in their place; `lm_stdlib` and `lm_dropped` spend the
savings on width. One head instead of four is the positive control.

    python -m experiments.ablate --config=configs/claims/lm_dropped_shape.py:cpu \\
        --workdir=runs/lm_dropped_shape
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    return to_config_dict(
        Study(
            name='lm_dropped_shape',
            question='What does a decoder that has learned lose without a matrix?',
            base=trained_language_model(scale),
            variants=(
                'qk/vo',
                'query_free/vo',
                'key_free/vo',
                'qk/no_v',
                'qk/no_o',
                'qk/vo?num_heads=1',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            match=None,
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            expected=('qk/vo?num_heads=1 is worse',) if tuned else (),
            **protocol(scale, equal_shape=False, choice='minimax', max_excess=0.004),
        )
    )

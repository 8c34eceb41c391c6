"""What does sharing cost a decoder that has learned, at the same shape?

GQA, MQA, K = V, Q = K and Q = K = V, with nothing in place of what they save; `lm_sharing` spends
it on width. Q = K, which costs 0.06 nats there, is the positive control.

    python -m experiments.ablate --config=configs/claims/lm_sharing_shape.py:cpu \\
        --workdir=runs/lm_sharing_shape
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    return to_config_dict(
        Study(
            name='lm_sharing_shape',
            question='What does sharing cost a decoder that has learned, at the same shape?',
            base=trained_language_model(scale),
            variants=(
                'qk/vo',
                'qk/vo?num_kv_heads=2',
                'qk/vo?num_kv_heads=1',
                'qk/k_is_v',
                'shared_qk/vo',
                'shared_qk/k_is_v',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            match=None,
            # Parameters worth 8 % of the model cost this decoder about 0.021 nats.
            margin=0.01,
            expected=('shared_qk/vo is worse',) if tuned else (),
            **protocol(scale, equal_shape=False, choice='minimax', max_excess=0.004),
        )
    )

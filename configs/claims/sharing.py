"""Sharing across heads (MQA, GQA) and across matrices (K = V, Q = K, Q = K = V).

Claim E4. Controls of equal shape show the same arms at equal width.

    python -m experiments.ablate --config=configs/claims/sharing.py:cpu \\
        --workdir=runs/sharing

Expected result and time: docs/claims.md, E4.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='sharing',
            question='What does sharing cost, across heads and across matrices?',
            base=language_model(scale, seeds=24, num_heads=4),
            variants=(
                'qk/vo',
                'qk/vo?num_kv_heads=2',
                'qk/vo?num_kv_heads=1',
                'qk/k_is_v',
                'shared_qk/vo',
                'shared_qk/k_is_v',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=56',), gpu=('d_model=768',)),
            **protocol(scale),
        )
    )

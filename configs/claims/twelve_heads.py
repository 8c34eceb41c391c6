"""Does a decoder of twelve heads lose anything without W_Q?

Claim E1 (Karbevski & Mijoski 2025, arXiv 2510.23912), with an equivalence test.

    python -m experiments.ablate --config=configs/claims/twelve_heads.py:cpu \\
        --workdir=runs/twelve_heads

Expected result and time: docs/claims.md, E1.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='twelve_heads',
            question='Does a decoder of twelve heads lose anything without W_Q?',
            base=language_model(scale, seeds=40, num_heads=12),
            variants=(
                'qk/vo',
                'query_free/vo',
            ),
            sizes=pick(scale, smoke=('d_model=48',), cpu=('d_model=96',), gpu=('d_model=768',)),
            destinations=('d_ff',),
            **protocol(scale),
        )
    )

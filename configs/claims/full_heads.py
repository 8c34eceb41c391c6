"""What do W_Q and W_K of full size (D x D) in every head buy at equal parameter count?

Claims A6 and B4. Every arm has a learning-rate sweep of its own.

    python -m experiments.ablate --config=configs/claims/full_heads.py:cpu \\
        --workdir=runs/full_heads

Expected result: docs/claims.md, A6 and B4; time: A6.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='full_heads',
            question='What do W_Q and W_K of full size (D x D) in every head buy?',
            base=language_model(scale, seeds=40, num_heads=4),
            variants=(
                'qk/vo',
                'full_size/vo',
                'merged/vo',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=48',), gpu=('d_model=768',)),
            **protocol(scale),
        )
    )

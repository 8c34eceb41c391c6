"""How much rank does W_Q[n] W_K[n]^T need?

Claim B7. The rank goes from 1 over the head size (qk) to d_model (merged).

    python -m experiments.ablate --config=configs/claims/rank.py:cpu \\
        --workdir=runs/rank

Expected result and time: docs/claims.md, B7.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='rank',
            question='How much rank does W_Q[n] W_K[n]^T need?',
            base=language_model(scale, seeds=24),
            variants=(
                'qk/vo',
                'low_rank(rank=1)/vo',
                'low_rank(rank=2)/vo',
                'low_rank(rank=4)/vo',
                'low_rank(rank=8)/vo',
                'low_rank(rank=16)/vo',
                'merged/vo',
            ),
            sizes=pick(scale, smoke=('d_model=48',), cpu=('d_model=56',), gpu=('d_model=768',)),
            **protocol(scale),
        )
    )

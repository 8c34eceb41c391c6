"""Does a nonlinear query beat the standard one, each at its own tuned settings?

Claim E2 (arXiv 2603.13381); nonlinear_untuned compares the two untuned.

    python -m experiments.ablate --config=configs/claims/nonlinear.py:cpu \\
        --workdir=runs/nonlinear

Expected result and time, with nonlinear_untuned: docs/claims.md, E2.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='nonlinear',
            question='Does a nonlinear query beat the standard one?',
            base=language_model(scale, seeds=40, num_heads=4),
            variants=(
                'qk/vo',
                'nonlinear_query/vo',
                'query_free/vo',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=48',), gpu=('d_model=768',)),
            destinations=('d_ff',),
            **protocol(scale),
        )
    )

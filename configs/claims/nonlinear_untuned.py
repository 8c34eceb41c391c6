"""A nonlinear query and the standard one at the same learning rates, neither of them tuned.

Claim E2 (arXiv 2603.13381): what would be reported without tuning.

    python -m experiments.ablate --config=configs/claims/nonlinear_untuned.py:cpu \\
        --workdir=runs/nonlinear_untuned

Expected result and time: docs/claims.md, E2; lm_added compares the two tuned.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='nonlinear_untuned',
            question='Is a nonlinear query better than the standard one without tuning?',
            base=language_model(scale, seeds=16, num_heads=4),
            variants=(
                'qk/vo',
                'nonlinear_query/vo',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=48',), gpu=('d_model=768',)),
            destinations=('d_ff',),
            tolerance=protocol(scale)['tolerance'],
        )
    )

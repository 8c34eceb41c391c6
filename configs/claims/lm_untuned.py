"""A nonlinear query and the standard one at one learning rate, the lowest of their tuning grid.

Claim E2 (arXiv 2603.13381): what would be reported without tuning.

    python -m experiments.ablate --config=configs/claims/lm_untuned.py:cpu \\
        --workdir=runs/lm_untuned

Expected result and time: docs/claims_e.md, E2; lm_added compares the two tuned.
"""

import dataclasses

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    base = language_model(scale)
    lowest_rate = base.trials.learning_rates[:1]
    trials = dataclasses.replace(base.trials, learning_rates=lowest_rate)
    return Study(
        name='lm_untuned',
        question='Is a nonlinear query better than the standard one without tuning?',
        base=dataclasses.replace(base, trials=trials),
        variants=('qk/vo', 'nonlinear_query/vo'),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        tolerance=protocol(scale)['tolerance'],
    )

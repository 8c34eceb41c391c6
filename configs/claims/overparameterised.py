"""Does a second matrix behind W_Q, W_K and W_V change training, at equal shape?

Claim D2. `double` writes the same functions with more parameters, so shapes are equal, not counts.
The weight decay is tuned, too: it acts on the factors.

    python -m experiments.ablate --config=configs/claims/overparameterised.py:cpu \\
        --workdir=runs/overparameterised

Expected result and time: docs/claims.md, D2.
"""

import dataclasses

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    # In steps of sqrt 2: what coarser ones leave open is more than the arms differ by.
    rates = tuple(4e-3 * 2 ** (step / 2) for step in range(1, 6))
    base = language_model(scale, learning_rates=rates, seeds=40, num_heads=4)
    decays = pick(scale, smoke=(2e-3,), cpu=(1e-3, 2e-3, 4e-3), gpu=(2.5e-4, 5e-4, 1e-3))
    return to_config_dict(
        Study(
            name='overparameterised',
            question='Does a second matrix behind W_Q, W_K and W_V change training?',
            base=dataclasses.replace(
                base, trials=dataclasses.replace(base.trials, weight_decays=decays)
            ),
            variants=(
                'qk/vo',
                'double/vo',
                'qk/double',
                'double/double',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=48',), gpu=('d_model=768',)),
            match=None,
            **protocol(scale),
        )
    )

"""Does a second matrix behind W_Q, W_K and W_V change the training of a decoder that learns?

`double` writes the same functions with more parameters, so shapes are equal, not counts. The
weight decay is tuned, too: it acts on the factors.

    python -m experiments.ablate --config=configs/claims/lm_doubled.py:cpu \\
        --workdir=runs/lm_doubled

Expected result and time: docs/claims_d.md, D2.
"""

import dataclasses

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    base = language_model(scale)
    weight_decays = pick(scale, smoke=(2e-3,), cpu=(1e-3, 2e-3, 4e-3), gpu=(2.5e-4, 5e-4, 1e-3))
    trials = dataclasses.replace(base.trials, weight_decays=weight_decays)
    return Study(
        name='lm_doubled',
        question='Does a second matrix behind W_Q, W_K and W_V change training?',
        base=dataclasses.replace(base, trials=trials),
        # A second matrix nowhere, behind W_Q and W_K, behind W_V, and behind all three.
        variants=('qk/vo', 'double/vo', 'qk/double', 'double/double'),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        match=None,  # all arms have the baseline's shape
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **protocol(scale, equal_shape=False, max_excess=0.004),  # tuning, tolerance and controls
    )

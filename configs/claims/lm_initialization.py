"""Is what a dropped matrix costs a matter of how the others are initialized?

Decoders without W_Q, W_V or W_O at the parameter count of the unchanged model. The scales of the
initial matrices of the QK and the OV circuit are tuned of every arm, the unchanged one included: a
dropped matrix leaves a circuit with one random factor, whose best scale may be another one.

    python -m experiments.ablate --config=configs/claims/lm_initialization.py:cpu \\
        --workdir=runs/lm_initialization

Expected result: the differences of lm_dropped, or smaller ones. Unfinished (docs/claims.md).
"""

import dataclasses

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study

# The factors of the initial matrices that are tried, for each of the two circuits.
FACTORS = (0.5, 1.0, 2.0)


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    fields = protocol(scale, equal_shape=False, max_excess=0.004)  # tuning, tolerance and controls
    # At scale smoke, nothing is tuned.
    if scale != 'smoke':
        # The deviations of initial matrices are tuned, too.
        fields['tuning'] = dataclasses.replace(fields['tuning'], init_qks=FACTORS, init_vos=FACTORS)
    return Study(
        name='lm_initialization',
        question='Is what a dropped matrix costs a matter of how the others are initialized?',
        base=language_model(scale, first_seed=64),
        variants=('qk/vo', 'query_free/vo', 'qk/no_v', 'qk/no_o'),  # all, no W_Q, no W_V, no W_O
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **fields,
    )

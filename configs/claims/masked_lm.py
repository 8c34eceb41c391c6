"""Which matrices does a masked language model need?

Q = K at the same shape, known to be worse in a masked model, is the positive control. Positions are
rotary, as seeds with learned ones leave their plateaus at different times. A mask rate of 0.3 has
twice the predictions of 0.15 (in BERT-large 0.4 is better: Wettig et al. 2023, arXiv 2202.08005).

    python -m experiments.ablate --config=configs/claims/masked_lm.py:cpu \\
        --workdir=runs/masked_lm

Expected result and time: docs/claims_e.md, E3.
"""

import dataclasses

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    tuned = scale != 'smoke'
    base = language_model(scale, kind='encoder', positions='rope')
    data = dataclasses.replace(base.data, mask_rate=0.3)
    return Study(
        name='masked_lm',
        question='Which matrices does a masked language model need?',
        base=dataclasses.replace(base, data=data),
        variants=(
            'qk/vo',  # the baseline
            'shared_qk/vo',  # W_Q = W_K
            'qk/no_v',  # no W_V
            'qk/no_o',  # no W_O
        ),
        sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
        # Saved parameters widen the MLP. Rotary heads have even sizes, so d_model has few values.
        destinations=('d_ff',),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        expected=('shared_qk/vo is worse at equal shape',) if tuned else (),  # the positive control
        **protocol(scale),  # tuning, tolerance and controls
    )

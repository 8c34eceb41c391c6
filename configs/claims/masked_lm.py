"""Which matrices does a masked language model need?

Q = K at the same shape, known to be worse in a masked model, is the positive control.

    python -m experiments.ablate --config=configs/claims/masked_lm.py:cpu \\
        --workdir=runs/masked_lm

Expected result and time: docs/claims_e.md, E3.
"""

from experiments.claims.protocol import masked_language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    tuned = scale != 'smoke'
    return Study(
        name='masked_lm',
        question='Which matrices does a masked language model need?',
        base=masked_language_model(scale),
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

"""Which matrices does a masked language model need once it passes its yardstick?

The models of masked_lm, trained for four times the steps. A first baseline has a test loss of 1.025
then (experiments/results/masked_pilot); counts of the five nearest visible neighbours have 1.259.
Q = K at the same shape is the positive control, as in masked_lm. No other study uses these seeds.

    python -m experiments.ablate --config=configs/claims/masked_long.py:cpu \\
        --workdir=runs/masked_long

Expected result: Q = K is worse; the others unknown. Not trained.
"""

from experiments.claims.protocol import masked_language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    tuned = scale != 'smoke'
    return Study(
        name='masked_long',
        question='Which matrices does a masked language model need once it passes its yardstick?',
        base=masked_language_model(
            scale,
            learning_rates=(2e-3, 4e-3, 8e-3),
            seeds=6,
            first_seed=48,
            evaluations=8,
            times_as_long=4,
        ),
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

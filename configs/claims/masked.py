"""Which matrices does a masked language model need?

Claims C6 and E3. Q = K at equal shape, known to cost a masked model, is the positive control.

    python -m experiments.ablate --config=configs/claims/masked.py:cpu \\
        --workdir=runs/masked
"""

from qkattn.claims.protocol import pick, protocol, trained_language_model
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    tuned = scale != 'smoke'
    return to_config_dict(
        Study(
            name='masked',
            question='Which matrices does a masked language model need?',
            base=trained_language_model(
                scale,
                kind='encoder',
                # With fewer steps some seeds end on a plateau of the loss that others have left,
                # so that seeds spread by more than arms differ; so they do at high rates.
                steps=4000,
                learning_rates=(1.5e-3, 3e-3, 6e-3),
            ),
            variants=('qk/vo', 'shared_qk/vo', 'qk/no_v', 'qk/no_o'),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=96',), gpu=('d_model=768',)),
            # Parameters worth 8 % of the model cost a decoder of this size about 0.021 nats.
            margin=0.01,
            expected=('shared_qk/vo is worse at equal shape',) if tuned else (),
            **protocol(scale, choice='minimax', max_excess=0.006),
        )
    )

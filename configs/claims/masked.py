"""Which matrices does a masked language model need?

Claims C6 and E3.

    python -m experiments.ablate --config=configs/claims/masked.py:cpu \\
        --workdir=runs/masked

Expected result: docs/claims.md, C6 and E3; time: E3.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='masked',
            question='Which matrices does a masked language model need?',
            base=language_model(
                scale,
                kind='encoder',
                seeds=8,
                # With two heads and fewer steps most seeds end on a plateau of the loss that a few
                # have left, so that seeds spread by more than arms differ.
                num_heads=pick(scale, smoke=2, cpu=4, gpu=12),
                steps=2000,
                gpu_steps=20000,
                # At four times the best rate some seeds stay untrained, which hides the parabola.
                learning_rates=tuple(2e-3 * 2 ** (step / 2) for step in range(5)),
            ),
            variants=('qk/vo', 'shared_qk/vo', 'qk/no_v', 'qk/no_o'),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=64',), gpu=('d_model=768',)),
            **protocol(scale),
        )
    )

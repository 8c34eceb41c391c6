"""Deep stacks of single-head layers against wide multi-head ones at equal parameter count.

Claim B5.

    python -m experiments.ablate --config=configs/claims/depth_heads.py:cpu \\
        --workdir=runs/depth_heads

Expected result and time: docs/claims.md, B5.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='depth_heads',
            question='Do many single-head layers beat fewer multi-head ones?',
            base=language_model(
                scale,
                seeds=16,
                num_layers=pick(scale, smoke=2, cpu=4, gpu=12),
                num_heads=pick(scale, smoke=4, cpu=4, gpu=12),
            ),
            variants=pick(
                scale,
                smoke=('qk/vo', 'qk/vo?num_heads=1&num_layers=4'),
                cpu=(
                    'qk/vo',
                    'qk/vo?num_heads=1',
                    'qk/vo?num_heads=1&num_layers=8',
                    'qk/vo?num_heads=1&num_layers=16',
                ),
                gpu=(
                    'qk/vo',
                    'qk/vo?num_heads=1',
                    'qk/vo?num_heads=1&num_layers=24',
                    'qk/vo?num_heads=1&num_layers=48',
                ),
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=56',), gpu=('d_model=768',)),
            **protocol(scale),
        )
    )

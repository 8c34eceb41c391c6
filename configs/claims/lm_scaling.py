"""How many baseline parameters is one of an arm's worth in decoders that have learned?

The number of heads grows with d_model: heads have 16 dimensions at scale cpu and 64 at scale gpu.

    python -m experiments.ablate --config=configs/claims/lm_scaling.py:cpu \\
        --workdir=runs/lm_scaling

Expected result: docs/claims.md, Scaling laws. Time: about 10 hours of a core.
"""

from experiments.claims.protocol import language_model, pick, protocol
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    # Width and number of heads of each size.
    shapes = pick(
        scale,
        smoke=((32, 2), (48, 3)),
        cpu=((64, 4), (80, 5), (96, 6), (112, 7), (144, 9)),
        gpu=((192, 3), (384, 6), (768, 12), (1152, 18)),
    )
    return Study(
        name='lm_scaling',
        question='How many parameters of a decoder that has learned is one of an arm worth?',
        base=language_model(scale, seeds=5),
        variants=('qk/vo', 'query_free/vo', 'shared_qk/vo'),  # all, no W_Q, W_Q = W_K
        sizes=tuple(f'd_model={d_model}&num_heads={heads}' for d_model, heads in shapes),
        # For comparison: in lm_scaling, 8 % fewer than 259k parameters cost 0.007 nats/token.
        margin=0.01,
        **protocol(scale, equal_shape=False),  # tuning, tolerance and controls
    )

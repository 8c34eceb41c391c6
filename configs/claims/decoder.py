"""Which of W_Q, W_K, W_V, W_O does a causal language model need, at two sizes, budgets and texts?

Claims B4, B6, C6.

    python -m experiments.ablate --config=configs/claims/decoder.py:cpu \\
        --workdir=runs/decoder

Expected result: docs/claims.md, B4, B6 and C6; time: B6.
"""

from qkattn.claims.protocol import language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='decoder',
            question='Which of W_Q, W_K, W_V, W_O does a causal language model need?',
            base=language_model(scale, evaluations=4, seeds=16),
            baseline='qk/vo',
            variants=(
                'qk/vo',
                'query_free/vo',
                'key_free/vo',
                'shared_qk/vo',
                'qk/no_v',
                'qk/no_o',
            ),
            sizes=pick(
                scale,
                smoke=('d_model=32',),
                cpu=('d_model=40', 'd_model=72'),
                gpu=('d_model=384', 'd_model=768'),
            ),
            corpora=pick(
                scale,
                smoke=('stdlib',),
                cpu=('stdlib', 'packages'),
                gpu=('tfds:wiki40b/en', 'tfds:lm1b'),
            ),
            **protocol(scale, longer=True),
        )
    )

"""Which matrices does the cross-attention of a translator need?

Claim B8, on Multi30k, English to German.

    python -m experiments.ablate --config=configs/claims/translation_cross.py:cpu \\
        --workdir=runs/translation_cross
"""

from experiments.claims.protocol import pick, protocol, translator
from qkattn.config import Study


def get_config(scale='cpu'):
    rates = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    return Study(
        name='translation_cross',
        question='Which matrices does the cross-attention of a translator need?',
        base=translator(scale, seeds=40, first_seed=8, learning_rates=rates),
        variants=(
            'qk/vo',
            'qk/vo?cross_variant=query_free/vo',
            'qk/vo?cross_variant=key_free/vo',
            'qk/vo?cross_variant=merged/vo',
        ),
        sizes=pick(scale, smoke=('d_model=40',), cpu=('d_model=96',), gpu=('d_model=512',)),
        destinations=('d_ff',),
        margin=0.02,
        **protocol(scale, equal_shape=False, max_excess=0.006, screening=8),
    )

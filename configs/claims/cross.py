"""Which matrices does cross-attention, whose two streams differ, need?

Claim B8. The variant of the cross-attention changes; encoder and decoder attend as usual.

    python -m experiments.ablate --config=configs/claims/cross.py:cpu \\
        --workdir=runs/cross

Expected result and time: docs/claims_b.md, B8.
"""

from qkattn.claims.protocol import pick, protocol, translator
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='cross',
            question='Which matrices does cross-attention need?',
            base=translator(scale),
            variants=(
                'qk/vo',
                'qk/vo?cross_variant=query_free/vo',
                'qk/vo?cross_variant=key_free/vo',
                'qk/vo?cross_variant=shared_qk/vo',
                'qk/vo?cross_variant=qk/no_v',
                'qk/vo?cross_variant=qk/no_o',
                'qk/vo?cross_variant=merged/vo',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=64',), gpu=('d_model=512',)),
            destinations=('d_ff',),
            **protocol(scale),
        )
    )

"""Which matrices does a masked language model need?

Claims C6 and E3.

    python -m experiments.ablate --config=configs/claims/masked.py:cpu \\
        --workdir=runs/masked

Expected result: docs/claims.md, C6 and E3; time: E3.
"""

from qkattn.claims.protocol import masked_language_model, pick, protocol
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='masked',
            question='Which matrices does a masked language model need?',
            base=masked_language_model(scale),
            variants=(
                'qk/vo',
                'shared_qk/vo',
                'qk/no_v',
                'qk/no_o',
            ),
            sizes=pick(scale, smoke=('d_model=32',), cpu=('d_model=64',), gpu=('d_model=768',)),
            **protocol(scale),
        )
    )

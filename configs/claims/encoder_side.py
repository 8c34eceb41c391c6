"""Which matrices does the encoder of a translation model need, from small widths to large ones?

Claims C2 and C3. The variant of the encoder changes; the decoder and its cross-attention are
standard.

    python -m experiments.ablate --config=configs/claims/encoder_side.py:cpu \\
        --workdir=runs/encoder_side

Expected result and time: docs/claims_c.md, C2 and C3.
"""

from qkattn.claims.protocol import pick, protocol, translator
from qkattn.config import Study, to_config_dict


def get_config(scale='cpu'):
    return to_config_dict(
        Study(
            name='encoder_side',
            question='Which matrices does the encoder of a translation model need?',
            base=translator(scale, seeds=6),
            variants=(
                'qk/vo',
                'qk/vo?encoder_variant=shared_qk/vo',
                'qk/vo?encoder_variant=query_free/vo',
                'qk/vo?encoder_variant=qk/no_v',
                'qk/vo?encoder_variant=qk/no_o',
            ),
            sizes=pick(
                scale,
                smoke=('d_model=40',),
                cpu=('d_model=40', 'd_model=56', 'd_model=72'),
                gpu=tuple(f'd_model={d}' for d in (128, 256, 512, 1024, 2048)),
            ),
            corpora=pick(scale, smoke=('cldr',), cpu=('cldr', 'multi30k'), gpu=('multi30k',)),
            **protocol(scale),
        )
    )

"""Which matrices does the encoder of a translator need?

Claims C3 to C5, on Multi30k, English to German. The variant of the encoder changes; the
decoder and its cross-attention are standard.

    python -m experiments.ablate --config=configs/claims/translation.py:cpu \\
        --workdir=runs/translation

Expected result and time: docs/claims_c.md, C3 to C5.
"""

from experiments.claims.protocol import pick, protocol, translator
from qkattn.config import Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='translation',
        question='Which matrices does the encoder of a translator need?',
        base=translator(scale),
        variants=(
            'qk/vo',  # the baseline
            'qk/vo?encoder_variant=shared_qk/vo',  # W_Q = W_K in the encoder
            'qk/vo?encoder_variant=qk/no_v',  # no W_V
            'qk/vo?encoder_variant=qk/no_o',  # no W_O
        ),
        sizes=pick(
            scale,
            smoke=('d_model=40',),
            cpu=('d_model=96',),
            gpu=tuple(f'd_model={d}' for d in (128, 512, 2048)),
        ),
        margin=0.02,
        **protocol(scale, max_excess=0.006, screening=4),  # tuning, tolerance and controls
    )

"""Do differences between translators last once the baseline passes its yardstick?

Multi30k, English to German, with the recipe of configs/multi30k_tiny.py (4 + 4 layers, post-norm,
10,000 BPE tokens, lower case), annealed. Variants of the encoder or of the cross-attention; the
rest of the model is standard. In one encoder, W_O is trained from the identity: it starts as the
encoder without W_O, and so tells what a missing W_O does from what its initialization does.

    python -m experiments.ablate --config=configs/claims/translation_long.py:cpu \\
        --workdir=runs/translation_long

Expected result: unknown; not trained. In multi30k_tiny, BLEU is 33.8 after as many tokens as here.
"""

import dataclasses

from experiments.claims.protocol import pick, protocol, translator
from qkattn.config import DecodeConfig, Study


def get_config(scale='cpu'):
    """Returns the study at the scale 'smoke', 'cpu' or 'gpu'."""
    return Study(
        name='translation_long',
        question='Do differences between translators last once the baseline passes its yardstick?',
        base=_base(scale),
        variants=(
            'qk/vo',  # the baseline
            'qk/vo?encoder_variant=shared_qk/vo',  # W_Q = W_K in the encoder
            'qk/vo?encoder_variant=qk/no_v',  # no W_V
            'qk/vo?encoder_variant=qk/no_o',  # no W_O
            'qk/vo?encoder_variant=qk/examples.identity_start:OutputFromIdentity',
            'qk/vo?cross_variant=query_free/vo',  # no W_Q in cross-attention
            'qk/vo?cross_variant=key_free/vo',  # no W_K
            'qk/vo?cross_variant=merged/vo',  # W_Q and W_K merged
        ),
        sizes=pick(scale, smoke=('d_model=40',), cpu=('d_model=128',), gpu=('d_model=128',)),
        destinations=('d_ff',),  # saved parameters widen the MLP
        margin=0.02,
        **protocol(scale, max_excess=0.006),  # tuning, tolerance and controls
    )


def _base(scale):
    """Returns the recipe of multi30k_tiny; at scale smoke, in few steps on a small text."""
    base = translator(scale, learning_rates=(1.5e-3, 3e-3, 6e-3), seeds=6, first_seed=48)
    if scale == 'smoke':
        return base
    num_steps = 8000 if scale == 'gpu' else 1200
    model = dataclasses.replace(
        base.model,
        num_layers=4,
        num_encoder_layers=4,
        num_heads=4,
        d_ff=256,
        context=64,
        vocab_size=10000,
        norm_position='post',
        activation='relu',
        positions='sinusoidal',
        biases=True,
        scale_embeddings=True,
        dropout=0.3,
    )
    data = dataclasses.replace(base.data, lowercase=True, tokenizer_size=10000)
    optimizer = dataclasses.replace(base.optimizer, warmup_steps=num_steps // 6, clip_norm=None)
    train = dataclasses.replace(
        base.train,
        num_steps=num_steps,
        batch_size=64,
        eval_every=num_steps // 2,
        checkpoint_every=num_steps // 4,
    )
    return dataclasses.replace(
        base,
        model=model,
        data=data,
        optimizer=optimizer,
        train=train,
        trials=dataclasses.replace(base.trials, weight_decays=(0.0,)),
        decode=DecodeConfig(beam=5, length_penalty=1.0),
    )

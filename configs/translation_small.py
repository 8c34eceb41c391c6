"""Translation of CLDR's phrases, English to German: which matrices does an encoder need?

The variant of the encoder's self-attention changes; the decoder and its cross-attention stay
standard. A public discussion claims that on the encoder side W_Q W_Q^T instead of W_Q W_K^T, or
dropping W_V or W_O, at best breaks even at equal parameter count.

    python -m experiments.ablate --config=configs/translation_small.py \\
        --workdir=runs/translation_small

Expected: over 3 seeds at one learning rate no variant is worse than the standard one, and those
without W_V or W_O are better, -0.05 and -0.03 nats per token; see
experiments/results/translation_small.
Time: 19 minutes on one CPU core, ten on two idle ones.
"""

from qkattn.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
)


def get_config():
    return Study(
        name='translation_small',
        question='Which of W_Q, W_K, W_V, W_O does the encoder of a small translator need?',
        base=Config(
            model=ModelConfig(
                kind='encoder_decoder',
                num_layers=1,
                num_encoder_layers=4,
                num_heads=2,
                context=64,
                vocab_size=1000,
                dropout=0.1,
                attention_dropout=0.0,
            ),
            data=DataConfig(name='cldr', languages='en-de', tokenizer='bpe', tokenizer_size=1000),
            optimizer=OptimizerConfig(warmup_steps=100, beta2=0.98),
            train=TrainConfig(
                num_steps=600,
                batch_size=32,
                label_smoothing=0.1,
                steps_per_dispatch=20,
                log_every=20,
                eval_every=200,
                checkpoint_every=200,
                lifting='map',  # the trials of a run take turns
            ),
            trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(4e-3,)),
            decode=DecodeConfig(beam=4, max_sources=320),
        ),
        baseline='qk/vo',
        variants=(
            'qk/vo',  # the baseline
            'qk/vo?encoder_variant=shared_qk/vo',  # W_Q = W_K in the encoder
            'qk/vo?encoder_variant=query_free/vo',  # no W_Q
            'qk/vo?encoder_variant=qk/no_v',  # no W_V
            'qk/vo?encoder_variant=qk/no_o',  # no W_O
        ),
        sizes=('d_model=64',),
    )

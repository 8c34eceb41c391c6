"""Translation of the embedded phrases, English to German: which matrices does an encoder need?

The encoder's self-attention is what varies; the decoder and its attention to the encoder stay
standard. The question is C2 to C5 of a public discussion: on the encoder side of a translation
model, W_Q W_Q^T instead of W_Q W_K^T, W_V or W_O dropped, were "never better than about break-even
at equal total weights".

Found: at 3 seeds and one learning rate, no cell loses to the standard one, and those without W_V or
W_O gain 0.03 nats; half an hour on two CPU cores that other work shared (experiments/results).

python -m experiments.ablate --config=configs/translation_small.py --workdir=runs/translation_small
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
    to_config_dict,
)


def get_config():
    return to_config_dict(
        Study(
            name='translation_small',
            question='Which of W_Q, W_K, W_V, W_O does the encoder of a small translator need?',
            base=Config(
                model=ModelConfig(
                    kind='encoder_decoder',
                    num_layers=2,
                    num_heads=4,
                    context=64,
                    vocab_size=1000,
                    dropout=0.1,
                    attention_dropout=0.0,
                ),
                data=DataConfig(
                    name='cldr', languages='en-de', tokenizer='bpe', tokenizer_size=1000
                ),
                optimizer=OptimizerConfig(warmup_steps=100, beta2=0.98),
                train=TrainConfig(
                    num_steps=1000,
                    batch_size=32,
                    label_smoothing=0.1,
                    steps_per_dispatch=20,
                    log_every=20,
                    eval_every=200,
                    checkpoint_every=200,
                    lifting='map',
                ),
                trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(4e-3,), weight_decays=(0.0,)),
                decode=DecodeConfig(beam=4, max_sources=320),
            ),
            baseline='qk/vo',
            variants=(
                'qk/vo',
                'qk/vo?encoder_variant=shared_qk/vo',
                'qk/vo?encoder_variant=query_free/vo',
                'qk/vo?encoder_variant=qk/no_v',
                'qk/vo?encoder_variant=qk/no_o',
            ),
            sizes=('d_model=64',),
        )
    )

"""One small encoder-decoder that translates CLDR's phrases, English to German.

    python -m experiments.train --config=configs/phrases.py --workdir=runs/phrases

Expected: `translate runs/phrases --text='Sat, Jan 30, 1926'` prints 'Sa., 30. Jan. 1926'; model and
steps are those of configs/translation_small.py; see experiments/results/phrases.
Time: 64 seconds of CPU time; 85 seconds on two busy CPU cores.
"""

from qkattn.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
)


def get_config():
    return Config(
        model=ModelConfig(
            kind='encoder_decoder',
            d_model=64,
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
            eval_every=300,
            checkpoint_every=300,
        ),
        trials=TrialsConfig(learning_rates=(4e-3,)),
        decode=DecodeConfig(beam=4, max_sources=64),
    )

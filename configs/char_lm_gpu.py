"""Characters of tiny_shakespeare on one GPU: a published language-model baseline.

Source: config/train_shakespeare_char.py of nanoGPT: 6 layers, 6 heads, width 384, context 256,
batches of 64, 5,000 steps of AdamW from 1e-3 to 1e-4 (cosine, 100 steps of warm-up), beta2 0.99,
weight decay 0.1 times the learning rate, dropout 0.2, initialization with standard deviation 0.02.
The last 10 % of the file are the validation split.

    python -m experiments.train --config=configs/char_lm_gpu.py --workdir=runs/char_lm_gpu

Expected: near the published best validation loss of 1.4697 nats/character (on a sample of 200
batches; here on the whole split). Not run, because it needs an accelerator.
Time: not measured: needs a GPU.
"""

from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
)


def get_config():
    return Config(
        model=ModelConfig(
            d_model=384,
            num_layers=6,
            num_heads=6,
            context=256,
            vocab_size=67,
            activation='gelu',
            init='nanogpt',
            dropout=0.2,
        ),
        data=DataConfig(name='tiny_shakespeare', tokenizer='characters', shift_windows=True),
        optimizer=OptimizerConfig(schedule='cosine', final_fraction=0.1, decay='coupled'),
        train=TrainConfig(num_steps=5000, batch_size=64, eval_every=250, checkpoint_every=250),
        trials=TrialsConfig(learning_rates=(1e-3,), weight_decays=(0.1,)),
    )

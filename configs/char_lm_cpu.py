"""Characters of tiny_shakespeare on a CPU: a published language-model baseline.

Source: nanoGPT's README, "I only have a macbook" (karpathy/nanoGPT): 4 layers, 4 heads, width 128,
context 64, batches of 12, 2,000 steps of AdamW from 1e-3 to 1e-4 (cosine, 100 steps of warm-up),
beta2 0.99, weight decay 0.1 times the learning rate, no dropout, no biases; initialization with
standard deviation 0.02, and 0.02 / sqrt(2 L) for the last matrix of each branch. The last 10 % of
the file are the validation split.

    python -m experiments.train --config=configs/char_lm_cpu.py --workdir=runs/char_lm_cpu

Expected: validation loss 1.8946 nats/character on the whole split (published: 1.88 on a sample of
20 batches); see experiments/results/char_lm_cpu.
Time: two minutes on two CPU cores; a fifth of the work is evaluation.
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
            d_model=128,
            num_layers=4,
            num_heads=4,
            context=64,
            vocab_size=67,
            activation='gelu',
            init='nanogpt',
        ),
        data=DataConfig(name='tiny_shakespeare', tokenizer='characters'),
        optimizer=OptimizerConfig(schedule='cosine', final_fraction=0.1, decay='coupled'),
        train=TrainConfig(num_steps=2000, batch_size=12, eval_every=200, checkpoint_every=200),
        trials=TrialsConfig(learning_rates=(1e-3,), weight_decays=(0.1,)),
    )

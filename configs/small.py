"""One small decoder with standard attention on the standard library, three seeds.

    python -m experiments.train --config=configs/small.py --workdir=runs/small

Expected: validation loss 1.77 nats/token with every seed, 434,816 parameters; see
experiments/results/small. The examples in docs/ start from it.
Time: 69 seconds of CPU time; 96 seconds on two busy CPU cores.
"""

from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    TrainConfig,
    TrialsConfig,
)


def get_config():
    return Config(
        model=ModelConfig(d_model=128, num_layers=2, num_heads=4, context=64),
        data=DataConfig(eval_sequences=512),
        train=TrainConfig(num_steps=600, batch_size=16, eval_every=200, checkpoint_every=200),
        trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(2e-3,)),
    )

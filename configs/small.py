"""One small decoder with standard attention on the embedded text, three seeds.

    python -m experiments.train --config=configs/small.py --workdir=runs/small

Expected: runs/small/result.json with one object per seed; the base of the examples in docs/.
Time: not logged; 1,000 steps of 836,736 parameters take minutes on two CPU cores.
"""

from qkattn.config import Config, ModelConfig, TrainConfig, TrialsConfig, to_config_dict


def get_config():
    return to_config_dict(
        Config(
            model=ModelConfig(d_model=128, num_layers=4, num_heads=4, context=128),
            train=TrainConfig(num_steps=1000, batch_size=16),
            trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(2e-3,)),
        )
    )

"""Which of W_Q, W_K, W_V, W_O does a small causal language model need, at equal parameter count?

The full protocol on two CPU cores: every arm tunes its learning rate on a factor-2 grid with its
own seeds, extended until the optimum is bracketed, and is compared on sixteen fresh seeds.

    python -m experiments.ablate --config=configs/fair_small.py --workdir=runs/fair_small

Expected: better without W_O or with one key/value head; undecided without W_V or W_Q; worse without
W_K, with keys as values, and with one matrix for queries and keys; see
experiments/results/fair_small.
Time: 51 minutes of training on two busy CPU cores.
"""

from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
    TuningConfig,
    to_config_dict,
)


def get_config():
    return to_config_dict(
        Study(
            name='fair_small',
            question='Which of W_Q, W_K, W_V, W_O does a small causal language model need?',
            base=Config(
                model=ModelConfig(num_layers=2, num_heads=4, context=64),
                data=DataConfig(eval_sequences=1024),
                optimizer=OptimizerConfig(warmup_steps=100),
                train=TrainConfig(
                    num_steps=1000,
                    batch_size=16,
                    steps_per_dispatch=25,
                    log_every=50,
                    eval_every=250,
                    checkpoint_every=250,
                    lifting='map',
                ),
                trials=TrialsConfig(
                    seeds=tuple(range(16)), learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2)
                ),
            ),
            baseline='qk/vo',
            variants=(
                'qk/vo',
                'query_free/vo',
                'key_free/vo',
                'shared_qk/vo',
                'qk/no_v',
                'qk/no_o',
                'qk/k_is_v',
                'qk/vo?num_kv_heads=1',
            ),
            sizes=('d_model=96',),
            tuning=TuningConfig(seeds=(100, 101)),
        )
    )

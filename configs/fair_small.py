"""Which of W_Q, W_K, W_V, W_O does a small causal language model need, at equal parameter count?

The full protocol on two CPU cores: every arm tunes its learning rate on a factor-2 grid with
screening seeds, extended until the optimum is bracketed, and is compared on twelve fresh seeds.
Each variant is also trained at the baseline's shape, and decided arms are trained again with four
times as many tokens. shared_qk comes in two forms: plain, and as in Reformer, with keys of unit
length and without attention to a token's own position.

    python -m experiments.ablate --config=configs/fair_small.py --workdir=runs/fair_small

Expected: no verdict, as the models fall short of a 5-gram of the same bytes. Lower losses with one
matrix for queries and keys in Reformer's form; higher ones with the plain form and with keys as
values. With four times as many tokens, Reformer's form no longer differs from the baseline, and the
other two differ less; see experiments/results/fair_small.
Time: 137 core-minutes of training, shared by two workers with a CPU core each; evaluation, a fifth
of the work, comes on top.
"""

from qkattn.config import (
    Config,
    ControlsConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
    TuningConfig,
)


def get_config():
    return Study(
        name='fair_small',
        question='Which of W_Q, W_K, W_V, W_O does a small causal language model need?',
        base=Config(
            model=ModelConfig(num_layers=2, num_heads=2, context=64),
            data=DataConfig(eval_sequences=2048),
            optimizer=OptimizerConfig(warmup_steps=50),
            train=TrainConfig(
                num_steps=500,
                batch_size=16,
                steps_per_dispatch=25,
                log_every=50,
                eval_every=250,
                checkpoint_every=250,
                lifting='map',  # the trials of a run take turns
            ),
            trials=TrialsConfig(
                seeds=tuple(range(12)), learning_rates=(4e-3, 8e-3, 1.6e-2, 3.2e-2)
            ),
        ),
        baseline='qk/vo',
        variants=(
            'qk/vo',  # the baseline
            'query_free/vo',  # no W_Q
            'key_free/vo',  # no W_K
            'shared_qk/vo',  # W_Q = W_K
            'shared_qk(key_norm=True,self_mask=True)/vo',  # as in Reformer
            'qk/no_v',  # no W_V
            'qk/no_o',  # no W_O
            'qk/k_is_v',  # W_V = W_K
            'qk/vo?num_kv_heads=1',  # MQA
        ),
        sizes=('d_model=48',),
        tuning=TuningConfig(seeds=(100, 101)),
        # The baseline and decided arms also train four times as long.
        controls=ControlsConfig(longer=4, longer_seeds=tuple(range(6))),
    )

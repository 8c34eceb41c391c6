"""Quickstart: eight attention variants at equal parameter count, three seeds each.

    python -m experiments.ablate --config=configs/quickstart.py --workdir=runs/quickstart

or launch/quickstart.sh, which also installs the dependencies and adds --workers=auto.

Expected: a table and runs/quickstart/report.html; three seeds at one learning rate decide nothing,
and the report says so; see experiments/results/quickstart.
Time: seven minutes on one CPU core, four on two idle ones; an eighth of the work is evaluation.
"""

from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
)


def get_config():
    return Study(
        name='quickstart',
        question='Which of W_Q, W_K, W_V, W_O does a small causal language model need?',
        base=Config(
            model=ModelConfig(num_layers=2, num_heads=4, context=64),
            data=DataConfig(eval_sequences=512),
            optimizer=OptimizerConfig(warmup_steps=40),
            train=TrainConfig(
                num_steps=400,
                batch_size=16,
                steps_per_dispatch=20,
                log_every=20,
                eval_every=100,
                checkpoint_every=200,
                lifting='map',  # the trials of a run take turns
            ),
            trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(4e-3,)),
        ),
        baseline='qk/vo',
        variants=(
            'qk/vo',  # the baseline
            'merged/vo',  # W_Q and W_K merged
            'shared_qk/vo',  # W_Q = W_K
            'query_free/vo',  # no W_Q
            'key_free/vo',  # no W_K
            'qk/no_v',  # no W_V
            'qk/no_o',  # no W_O
            'qk/vo?num_kv_heads=1',  # MQA
        ),
        sizes=('d_model=96',),
    )

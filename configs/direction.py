"""A control that must fail: one symmetric head without positions cannot point in one direction.

In the probe `successor`, the label of every key in a shuffled set is the payload of the next key
around a circle. A symmetric score is the same for (k, k + 1) and (k + 1, k), so it cannot prefer
the successor at every key; `Successor` in qkattn/data/tasks/probe_tasks.py shows the bound, and how
much an MLP helps. The pairwise score also shares its matrix, but is not symmetric.

    python -m experiments.ablate --config=configs/direction.py --workdir=runs/direction

Expected: standard and pairwise scores 100 % correct, symmetric ones 86 % and 92 %; see
experiments/results/direction.
Time: two and a half minutes on two CPU cores.
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
        name='direction',
        question='Which scores can point from one token to the next without positions?',
        base=Config(
            model=ModelConfig(
                kind='encoder',
                num_layers=1,
                num_heads=1,
                context=16,
                vocab_size=256,
                positions='none',
            ),
            data=DataConfig(name='successor(keys=16, payloads=16)'),
            optimizer=OptimizerConfig(warmup_steps=100),
            train=TrainConfig(
                num_steps=1000,
                batch_size=128,
                steps_per_dispatch=20,
                log_every=20,
                eval_every=100,
                checkpoint_every=500,
                lifting='map',  # the trials of a run take turns
            ),
            trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(3e-3,)),
        ),
        baseline='qk/vo',
        # Of W_Q and W_K; W_Q = W_K; the same, signed; W_Q = W_K F with a free F.
        variants=('qk/vo', 'shared_qk/vo', 'symmetric/vo', 'pairwise/vo'),
        sizes=('d_model=64',),
    )

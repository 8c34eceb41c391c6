"""How much of a difference between variants does the initialization explain?

Three variants under two initializations, all at equal parameter count and each at its own learning
rate: the project's own (fan-in) and that of nanoGPT (standard deviation 0.02). A difference between
variants that is smaller than the difference between the two initializations of one of them says as
much about initialization as about W_K or W_O.

    python -m experiments.ablate --config=configs/initialization.py --workdir=runs/initialization

Expected: nanoGPT's initialization costs the baseline +0.28 nats per token; see
experiments/results/initialization.
Time: 24 minutes of training on two very busy CPU cores; evaluation, a sixth of the work, comes on
top.
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
        name='initialization',
        question='How much of a difference between variants does the initialization explain?',
        base=Config(
            model=ModelConfig(num_layers=2, num_heads=2, context=64),
            data=DataConfig(eval_sequences=2048),
            optimizer=OptimizerConfig(warmup_steps=50),
            train=TrainConfig(
                num_steps=400,
                batch_size=16,
                steps_per_dispatch=25,
                log_every=50,
                eval_every=400,
                checkpoint_every=200,
                lifting='map',  # the trials of a run take turns
            ),
            trials=TrialsConfig(seeds=tuple(range(8)), learning_rates=(4e-3, 8e-3, 1.6e-2)),
        ),
        baseline='qk/vo',
        variants=(
            'qk/vo',  # the baseline
            'qk/no_o',  # no W_O
            'shared_qk/vo',  # W_Q = W_K
            'qk/vo?init=nanogpt',  # each of these again, with the initialization of nanoGPT
            'qk/no_o?init=nanogpt',
            'shared_qk/vo?init=nanogpt',
        ),
        sizes=('d_model=48',),
        tuning=TuningConfig(seeds=(100, 101), max_seeds=4),
        controls=ControlsConfig(equal_shape=False, longer=None),
    )

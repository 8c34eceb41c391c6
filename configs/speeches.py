"""Must the queries of a small decoder differ from its keys? The study of docs/tutorial.md.

    python -m experiments.ablate --config=configs/speeches.py --workdir=runs/speeches

Its text is one file, ../plays.txt, the 1.1 MB of plays that tiny_shakespeare has; name yours with
--config.base.data.path=FILE.

Expected: Q = K is worse by 0.097 nats/token [0.075, 0.169] at this length of training; the log is
in experiments/results/speeches.
Time: 42 minutes with two workers on two CPU cores that also had other work.
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
    base = Config(
        model=ModelConfig(num_layers=2, num_heads=4, context=64, vocab_size=512),
        data=DataConfig(
            name='text',
            path='../plays.txt',
            documents='blank_line',
            tokenizer='bpe',
            tokenizer_size=512,
        ),
        optimizer=OptimizerConfig(warmup_steps=100),
        train=TrainConfig(num_steps=2000, batch_size=16, eval_every=500),
        # Six seeds compare the variants, each at its own tuned rate; these rates are tried first.
        trials=TrialsConfig(seeds=(0, 1, 2, 3, 4, 5), learning_rates=(4e-3, 8e-3, 1.6e-2)),
    )
    return Study(
        name='speeches',
        question='Must the queries of a small decoder differ from its keys?',
        base=base,
        variants=('qk/vo', 'shared_qk/vo'),
        sizes=('d_model=64',),
        margin=0.02,
        # Other seeds than those above choose the learning rate.
        tuning=TuningConfig(seeds=(100, 101), choice='minimax'),
        controls=ControlsConfig(equal_shape=False, longer=None),
    )

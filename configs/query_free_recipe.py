"""Does the published recipe for W_Q = I, with half the logit scale, change what it costs?

Karbevski & Mijoski 2025, arXiv 2510.23912, train W_Q = I with logits divided by 2 sqrt(H) and
weight decay 2^-5, their baseline with sqrt(H) and 0.1 (github.com/MarkoKarbevski/Wqkv_necessity).
Arms at equal parameter count: the baseline, query_free at the usual scale and at theirs. The
optimizer is theirs: AdamW with decay coupled to the learning rate, beta2 0.95, cosine to a tenth of
the peak. The learning rate is tuned per arm. Every arm has weight decay 2^-5, which at a rate of
0.008 takes 7 % off a matrix in 500 steps, where 0.1 takes 20 %; that of their baseline is
--config.base.trials.weight_decays='(0.1,)'.

    python -m experiments.ablate --config=configs/query_free_recipe.py --workdir=runs/query_free

Expected: query_free/vo +0.007 nats per token, at their scale +0.033; no verdict, as the models fall
short of a 5-gram of the same bytes; see experiments/results/query_free_recipe.
Time: 6 minutes of training on two very busy CPU cores; evaluation, a seventh of the work, comes on
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
        name='query_free_recipe',
        question='Does the published recipe for W_Q = I change what it costs?',
        base=Config(
            model=ModelConfig(num_layers=2, num_heads=2, context=64),
            data=DataConfig(eval_sequences=2048),
            optimizer=OptimizerConfig(
                warmup_steps=50,
                schedule='cosine',
                final_fraction=0.1,
                beta2=0.95,
                decay='coupled',
            ),
            train=TrainConfig(
                num_steps=500,
                batch_size=16,
                steps_per_dispatch=25,
                log_every=50,
                eval_every=500,
                checkpoint_every=250,
                lifting='map',  # the trials of a run take turns
            ),
            trials=TrialsConfig(
                seeds=tuple(range(8)),
                learning_rates=(4e-3, 8e-3, 1.6e-2),
                weight_decays=(2**-5,),
            ),
        ),
        baseline='qk/vo',
        variants=('qk/vo', 'query_free/vo', 'query_free/vo?score_scale=0.5'),
        sizes=('d_model=48',),
        tuning=TuningConfig(seeds=(100, 101), max_seeds=4),
        controls=ControlsConfig(equal_shape=False, longer=None),
    )

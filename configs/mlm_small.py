"""Masked language models of the standard library: which matrices does an encoder need?

A positive control: one matrix for queries and keys (shared_qk) costs BERT 0.10 to 0.15 nats per
masked token at equal width (Courtois et al. 2024, ACL Findings, arXiv 2406.06366), so it should be
clearly worse at equal parameter count as well.

    python -m experiments.ablate --config=configs/mlm_small.py --workdir=runs/mlm_small

Expected: shared_qk +0.19 nats per masked token over 3 seeds at one learning rate; see
experiments/results/mlm_small.
Time: ten minutes on one CPU core, five on two idle ones; a fifth of the work is evaluation.
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
        name='mlm_small',
        question='Which of W_Q, W_K, W_V, W_O does a small masked language model need?',
        base=Config(
            model=ModelConfig(
                kind='encoder', num_layers=2, num_heads=4, context=64, vocab_size=257
            ),
            data=DataConfig(eval_sequences=2048),
            optimizer=OptimizerConfig(warmup_steps=100),
            train=TrainConfig(
                num_steps=2000,
                batch_size=16,
                steps_per_dispatch=20,
                log_every=20,
                eval_every=200,
                checkpoint_every=500,
                lifting='map',  # the trials of a run take turns
            ),
            trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(4e-3,)),
        ),
        baseline='qk/vo',
        variants=('qk/vo', 'shared_qk/vo', 'query_free/vo'),  # all, W_Q = W_K, no W_Q
        sizes=('d_model=96',),
    )

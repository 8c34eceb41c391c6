"""qkattn's training as a work: the compiled program of a run, as the training loop calls it."""

from typing import Any

import jax
import numpy as np

from qkattn.benchmark.work import Work
from qkattn.config import Config, from_json
from qkattn.model import cost
from qkattn.train import program
from qkattn.train.placement import place_batch


def batch_of(config: Config) -> dict[str, np.ndarray]:
    """Random tokens of one dispatch, [C, X, B, T], the same for all trials, and their targets."""
    train, trials = config.train, len(config.trials.trials())
    shape = (train.steps_per_dispatch, 1, train.batch_size, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    tokens = np.repeat(tokens, trials, axis=1)
    arrays = {'tokens_BT': tokens[..., :-1], 'targets_BT': tokens[..., 1:]}
    return arrays | {'loss_weights_BT': np.ones(arrays['tokens_BT'].shape, np.float32)}


def costs(config: Config) -> dict[str, Any]:
    """Parameters of a trial; tokens and FLOPs of a step of all trials."""
    tokens = len(config.trials.trials()) * config.train.batch_size * config.model.context
    flops = tokens * cost.training_flops_per_token(config.model)
    return {'parameters': cost.count(config.model)['total'], 'tokens': tokens, 'flops': flops}


def train(config: dict[str, Any]) -> Work:
    """The train program of a config (JSON) of a decoder; a step is one of all its trials."""
    of_run = from_json(Config, config)
    built = program.build(of_run)
    batch = place_batch(of_run, built.mesh, batch_of(of_run))
    state = built.init()

    def run(calls: int) -> dict:
        nonlocal state
        for _ in range(calls):
            state, metrics = built.train(state, batch)
        return jax.block_until_ready((state, metrics))[1]

    extra = {
        **costs(of_run),
        'compile_seconds': built.compile_seconds,
        'lifting': built.lifting,
    }
    return Work(run, of_run.train.steps_per_dispatch, extra)

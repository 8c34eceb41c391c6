"""Programs of qkattn to be timed, as its scripts run them."""

from typing import Any

import jax
import numpy as np

from experiments.benchmark.race import Work
from qkattn.config import Config, ModelConfig, from_json
from qkattn.decode.generate import generate
from qkattn.decode.kv_cache import init_cache
from qkattn.model import build, cost
from qkattn.train import program
from qkattn.train.sharding import place_batch


def batch_of(config: Config) -> dict[str, np.ndarray]:
    """Random tokens of one dispatch, [C, X, B, T], the same for all trials, and their targets."""
    train, trials = config.train, len(config.trials.trials())
    shape = (train.steps_per_dispatch, 1, train.batch_size, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    tokens = np.repeat(tokens, trials, axis=1)
    arrays = {'tokens_BT': tokens[..., :-1], 'targets_BT': tokens[..., 1:]}
    return arrays | {'loss_weights_BT': np.ones(arrays['tokens_BT'].shape, np.float32)}


def train(config: Any) -> Work:
    """The train program of a decoder's config (JSON); a step is one of one of its trials."""
    config = from_json(Config, config)
    built = program.build(config)
    batch = place_batch(config, built.mesh, batch_of(config))
    state = built.init()

    def run(calls: int) -> dict:
        nonlocal state
        for _ in range(calls):
            state, metrics = built.train(state, batch)
        return jax.block_until_ready((state, metrics))[1]

    return Work(run, config.train.steps_per_dispatch * len(config.trials.trials()))


def greedy(model: dict[str, Any], rows: int, prompt: int, tokens: int) -> Work:
    """Greedy continuation of `rows` prompts by `tokens` tokens each; a step is one token a row.

    Its extra has the bytes of the real cache at full context, and those predicted.
    """
    config = from_json(ModelConfig, model)
    decoder = build(config, key=jax.random.key(0))
    shape = (rows, prompt)
    prompts = jax.device_get(jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size))
    arrays = jax.tree.leaves(init_cache(decoder, rows, config.context).layers)
    floats = cost.cache_floats_per_token(config) * rows * config.context
    extra = {
        'tokens': rows,
        'cache_bytes': sum(array.nbytes for array in arrays),
        'predicted_cache_bytes': floats * arrays[0].dtype.itemsize,
    }

    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(generate(decoder, prompts, tokens))

    return Work(run, tokens, extra)

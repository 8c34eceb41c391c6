"""The program that measures the attention of a stack of trials during training."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from qkattn.analysis import means
from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.metrics import ATTENTION
from qkattn.model import with_params
from qkattn.model.stack import placing
from qkattn.train.lifting import lift
from qkattn.train.sharding import place_activations, row_sharding


def measure(
    config: Config, params: dict, inputs: dict, rows_B: jax.Array | None = None
) -> dict[str, jax.Array]:
    """`metrics.ATTENTION` of one trial, as `means`."""
    found = means(with_params(config.model, params), inputs, rows_B)
    return {name: found[name] for name in ATTENTION}


def program(config: Config, lifting: str, mesh: Mesh) -> Callable[[dict, dict], dict]:
    """The program (params of X trials, one batch) -> `measure`, each [X]."""

    def measured(params: dict, batch: dict) -> dict:
        batch = jax.lax.with_sharding_constraint(batch, row_sharding(mesh))
        inputs = {n: a for n, a in batch.items() if n not in ('targets_BT', 'loss_weights_BT')}
        rows_B = batch['loss_weights_BT'].any(-1)  # rows that pad the batch have no targets
        of_trial = functools.partial(measure, config, inputs=inputs, rows_B=rows_B)
        with placing(place_activations(mesh)), choice.on(mesh):
            return lift(of_trial, lifting, mesh)(params)

    return measured

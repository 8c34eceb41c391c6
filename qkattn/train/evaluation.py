"""The evaluation program: what the declared metrics sum over each row, for a stack of trials."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qkattn import metrics
from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.model.stack import placing
from qkattn.train import step, targets
from qkattn.train.lifting import lift
from qkattn.train.sharding import place_activations, row_sharding


def measure(config: Config, params: dict, batch: dict) -> dict[str, jax.Array]:
    """`metrics.row_sums` of one trial [B], without dropout or label smoothing."""
    found = step.on_targets(config, params, batch, _of_targets)
    return metrics.row_sums(
        metrics.Predictions(
            targets_BT=batch['targets_BT'], loss_weights_BT=batch['loss_weights_BT'], **found
        )
    )


def _of_targets(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
    return {
        'nats_BT': targets.cross_entropy(logits_BTV, targets_BT),
        'correct_BT': jnp.argmax(logits_BTV, -1) == targets_BT,
    }


def eval_step(config: Config, lifting: str, mesh: Mesh) -> Callable[[dict, dict], dict]:
    """The program (params of X trials, one batch) -> the sums of `measure`, each [X, B]."""

    def evaluate(params: dict, batch: dict) -> dict:
        batch = jax.lax.with_sharding_constraint(batch, row_sharding(mesh))
        with placing(place_activations(mesh)), choice.on(mesh):
            return lift(lambda params: measure(config, params, batch), lifting, mesh)(params)

    return evaluate

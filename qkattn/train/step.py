"""One optimizer step of one trial, and the program that takes it for a stack of trials.

A trial's state is {'params', 'opt_state', 'alive'}; `alive` is False once its loss or gradient was
not finite. A stack is {'step': scalar, 'trials': states of trials with a leading axis X}.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.model import build, with_params
from qkattn.model.stack import placing
from qkattn.model.transformer import Transformer
from qkattn.train import sharding, targets
from qkattn.train.lifting import lift
from qkattn.train.optimizer import optimizer
from qkattn.train.schedules import schedule


def init_trial(config: Config, seed: jax.Array) -> dict:
    """The state of one trial before step 0."""
    params = nnx.to_pure_dict(nnx.state(build(config.model, key=jax.random.key(seed))))
    opt_state = optimizer(config.optimizer, jnp.float32(0), jnp.float32(0)).init(params)
    return {'params': params, 'opt_state': opt_state, 'alive': jnp.bool(True)}


def init_stack(config: Config, seeds: jax.Array) -> dict:
    """The state of X trials before step 0."""
    trials = jax.vmap(functools.partial(init_trial, config))(seeds)
    return {'step': jnp.int32(0), 'trials': trials}


def on_targets(
    config: Config,
    params: dict,
    batch: dict,
    measure: targets.OnTargets,
    dropout_key: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """`measure` of the logits and targets of a batch, train.logits_chunk positions at a time."""
    dtype = jnp.dtype(config.model.compute_dtype)
    model = with_params(config.model, jax.tree.map(lambda p: p.astype(dtype), params))
    x_BTD = model.stream(**_inputs(batch), dropout_key=dropout_key)
    chunk = config.train.logits_chunk
    return targets.on_targets(model.logits, x_BTD, batch['targets_BT'], measure, chunk)


def _inputs(batch: dict) -> dict:
    """All arrays of a batch but targets and loss weights."""
    return {k: v for k, v in batch.items() if k not in ('targets_BT', 'loss_weights_BT')}


def loss(model: Transformer, batch: dict) -> jax.Array:
    """Cross-entropy of the targets of a batch, nats per target, weighted by the loss weights."""
    nats_BT = targets.cross_entropy(model(**_inputs(batch)), batch['targets_BT'])
    return jnp.average(nats_BT, weights=batch['loss_weights_BT'])


def loss_sum(
    config: Config, params: dict, batch: dict, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Sum over the batch of loss weight times loss, in nats, with train.label_smoothing."""

    def measure(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
        epsilon = config.train.label_smoothing
        return {'nats_BT': targets.smoothed(logits_BTV, targets_BT, epsilon)}

    nats_BT = on_targets(config, params, batch, measure, dropout_key)['nats_BT']
    return jnp.sum(nats_BT * batch['loss_weights_BT'])


def gradients(
    config: Config, params: dict, batch: dict, key: jax.Array | None = None
) -> tuple[jax.Array, dict]:
    """Mean loss per token and its gradient over a batch whose leading axis is microbatches.

    Sums of losses and gradients are accumulated and divided once by all tokens, so that a
    microbatch counts in proportion to its tokens.
    """
    count = batch['loss_weights_BT'].shape[0]
    grad = jax.value_and_grad(functools.partial(loss_sum, config))
    if count == 1:
        total = grad(params, jax.tree.map(lambda a: a[0], batch), key)
    else:
        keys = None if key is None else jax.random.split(key, count)

        def add(total: tuple, inputs: tuple) -> tuple[tuple, None]:
            one, one_key = inputs
            return jax.tree.map(jnp.add, total, grad(params, one, one_key)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zero, (batch, keys))
    total_weight = jnp.maximum(batch['loss_weights_BT'].sum(), 1)
    return jax.tree.map(lambda a: a / total_weight, total)


def train_trial(
    config: Config, step: jax.Array, trial: dict, hyper: dict, batch: dict
) -> tuple[dict, dict]:
    """One step of one trial.

    Args:
      step: number of steps done, the same for all trials.
      trial: its state.
      hyper: 'seed', 'learning_rate' (peak), 'weight_decay', scalars.
      batch: tokens_BT, targets_BT, loss_weights_BT and the model's other inputs, each with a
        leading axis of microbatches.

    Returns:
      The next state, or the old one with alive=False where the loss or the gradient is not finite;
      and the metrics: loss (nats per token, with label smoothing), the norms of gradient,
      parameters and update, and the learning rate.
    """
    key = None
    if config.model.drops:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(hyper['seed']), 1), step)
    loss, grads = gradients(config, trial['params'], batch, key)
    grad_norm = optax.tree.norm(grads)

    fraction = schedule(config.optimizer, config.train.num_steps)(step)
    learning_rate, weight_decay = hyper['learning_rate'], hyper['weight_decay']
    transform = optimizer(config.optimizer, learning_rate, weight_decay, fraction)
    updates, opt_state = transform.update(grads, trial['opt_state'], trial['params'])
    params = optax.apply_updates(trial['params'], updates)

    alive = trial['alive'] & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    after = {'params': params, 'opt_state': opt_state}
    before = {name: trial[name] for name in after}
    state = jax.tree.map(lambda new, old: jnp.where(alive, new, old), after, before)
    metrics = {
        'loss': loss,
        'grad_norm': grad_norm,
        'param_norm': optax.tree.norm(params),
        'update_norm': optax.tree.norm(updates),
        'learning_rate': learning_rate * fraction,
    }
    metrics = {name: jnp.where(alive, value, jnp.nan) for name, value in metrics.items()}
    return {**state, 'alive': alive}, metrics


def train_steps(
    config: Config, lifting: str, mesh: Mesh
) -> Callable[[dict, dict, dict], tuple[dict, dict]]:
    """The program (state, hyper, batch [C, X, A, B, ...]) -> (state, metrics [C, X]) of C steps.

    With 'map' a trial takes all C steps before the next one begins: its state stays near the
    processor, and is copied once per dispatch.
    """

    def steps_of_trial(step: jax.Array, trial: dict, hyper: dict, batches: dict) -> tuple:
        steps_C = step + jnp.arange(batches['targets_BT'].shape[0])
        return jax.lax.scan(
            lambda trial, inputs: train_trial(config, inputs[0], trial, hyper, inputs[1]),
            trial,
            (steps_C, batches),
        )

    def many_steps(state: dict, hyper: dict, batches: dict) -> tuple[dict, dict]:
        swap = functools.partial(jax.tree.map, lambda a: jnp.swapaxes(a, 0, 1))  # C and X
        run = lift(functools.partial(steps_of_trial, state['step']), lifting, mesh)
        with placing(sharding.place_activations(mesh)), choice.on(mesh):
            trials, metrics = run(state['trials'], hyper, swap(batches))
        step = state['step'] + batches['targets_BT'].shape[0]
        return {'step': step, 'trials': trials}, swap(metrics)

    return many_steps

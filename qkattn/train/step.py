"""One optimizer step of one trial: loss, gradient, update.

A trial's state is {'params', 'opt_state', 'alive'}; `alive` is False once its loss or gradient was
not finite. A stack is {'step': scalar, 'trials': states of trials with a leading axis X}.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from qkattn.config import Config
from qkattn.model import build, with_params
from qkattn.model.transformer import cross_entropy, inputs_of
from qkattn.train.optimizer import optimizer, schedule


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
    config: Config, params: dict, batch: dict, measure: Callable, key: jax.Array | None = None
) -> dict[str, jax.Array]:
    """`measure`(logits_BTV, targets_BT) of a batch: [B, T, ...] by name.

    With train.logits_chunk = C, B C V logits are held instead of B T V, and computed twice.
    """
    dtype = jnp.dtype(config.model.compute_dtype)
    model = with_params(config.model, jax.tree.map(lambda p: p.astype(dtype), params))
    x_BTD = model.stream(**inputs_of(batch), dropout_key=key)
    targets_BT = batch['targets_BT']
    C = config.train.logits_chunk
    B, T = targets_BT.shape
    if C is None or C >= T:
        return measure(model.logits(x_BTD), targets_BT)
    chunks = -(-T // C)

    def cut(a_BT: jax.Array) -> jax.Array:
        """[chunks, B, C, ...]; the last chunk is padded."""
        padding = [(0, 0), (0, chunks * C - T)] + [(0, 0)] * (a_BT.ndim - 2)
        return jnp.moveaxis(jnp.pad(a_BT, padding).reshape(B, chunks, C, *a_BT.shape[2:]), 1, 0)

    one = jax.checkpoint(lambda xt: measure(model.logits(xt[0]), xt[1]), prevent_cse=False)
    values = jax.lax.map(one, (cut(x_BTD), cut(targets_BT)))

    def joined(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a, 0, 1).reshape(B, chunks * C, *a.shape[3:])[:, :T]

    return jax.tree.map(joined, values)


def objective(
    config: Config, params: dict, batch: dict, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """What a step minimizes, and the loss in it: sums over the batch by loss weight, in nats.

    With train.label_smoothing = e, the loss is (1 - e) cross-entropy + e times its mean over all V
    tokens. With train.z_loss = c, a step minimizes loss + c (log Z)^2, where Z is the sum of
    exp(logits), the normalizer of the predicted distribution (Chowdhery et al. 2022, section 5).
    """
    epsilon = config.train.label_smoothing
    z_loss = config.train.z_loss

    def losses(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
        nats_BT = cross_entropy(logits_BTV, targets_BT)
        if epsilon:
            uniform_BT = jax.nn.logsumexp(logits_BTV, -1) - logits_BTV.mean(-1)
            nats_BT = (1 - epsilon) * nats_BT + epsilon * uniform_BT
        if not z_loss:
            return {'nats_BT': nats_BT}
        log_z_BT = jax.nn.logsumexp(logits_BTV, -1)
        return {'nats_BT': nats_BT, 'penalty_BT': z_loss * log_z_BT**2}

    measured = on_targets(config, params, batch, losses, key)
    weights_BT = batch['loss_weights_BT']
    loss = jnp.sum(measured['nats_BT'] * weights_BT)
    if not z_loss:
        return loss, loss
    penalty = jnp.sum(measured['penalty_BT'] * weights_BT)
    return loss + penalty, loss


def gradients(
    config: Config, params: dict, batch: dict, key: jax.Array | None = None
) -> tuple[jax.Array, dict]:
    """Mean loss per token and the gradient of the mean `objective`.

    Microbatches, the leading axis of the batch, count by their tokens.
    """
    count = batch['loss_weights_BT'].shape[0]
    value_and_grad = jax.value_and_grad(functools.partial(objective, config), has_aux=True)

    def grad(*inputs: Any) -> tuple[jax.Array, dict]:
        (_, loss), grads = value_and_grad(*inputs)
        return loss, grads

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
    """One step of one trial, after `step` steps: its next state, and metrics.

    `hyper`: scalars seed, learning_rate (peak), weight_decay; `batch`: [microbatches, ...]. The
    loss is in nats per token, smoothed, without z-loss. Where it or the gradient is not finite,
    only `alive` changes, to False.
    """
    key = None
    if config.model.drops:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(hyper['seed']), 1), step)
    loss, grads = gradients(config, trial['params'], batch, key)
    grad_norm = optax.tree.norm(grads)

    fraction = schedule(config.optimizer, config.train.num_steps)(step)
    learning_rate = hyper['learning_rate']
    weight_decay = hyper['weight_decay']
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

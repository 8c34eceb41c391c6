"""One optimizer step of one trial: loss, gradient, update.

A trial's state is {'params', 'opt_state', 'alive'}; `alive` is False once its loss or gradient was
not finite. A stack is {'step': scalar, 'trials': states of trials with a leading axis X}.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from qkattn.config import Config
from qkattn.model import build, with_params
from qkattn.model.transformer import cross_entropy, inputs_of
from qkattn.train.optimizer import optimizer, schedule


def init_trial(config: Config, seed: jax.Array) -> dict:
    """Returns the state of one trial before step 0."""
    params = nnx.to_pure_dict(nnx.state(build(config.model, key=jax.random.key(seed))))
    opt_state = optimizer(config.optimizer, jnp.float32(0), jnp.float32(0)).init(params)
    return {'params': params, 'opt_state': opt_state, 'alive': jnp.bool(True)}


def init_stack(config: Config, seeds: jax.Array) -> dict:
    """Returns the state of X trials before step 0, stacked."""
    trials = jax.vmap(functools.partial(init_trial, config))(seeds)
    return {'step': jnp.int32(0), 'trials': trials}


def measure_on_targets(
    config: Config,
    params: dict,
    batch: dict,
    measure: Callable[[jax.Array, jax.Array], dict[str, jax.Array]],
    key: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Runs the model on a batch; returns what `measure` computes from its logits and the targets.

    With train.logits_chunk = C, the logits of C positions are computed and measured at a time. The
    memory then holds B C V logits instead of B T V. The backward pass computes them again.

    Args:
      config: the settings of the run.
      params: the parameters of one trial.
      batch: arrays [B, ...] by name.
      measure: maps (logits_BTV, targets_BT) to arrays [B, T, ...] by name, each position by itself.
      key: the key of dropout. None is no dropout.
    """
    dtype = jnp.dtype(config.model.compute_dtype)
    model = with_params(config.model, jax.tree.map(lambda p: p.astype(dtype), params))
    x_BTD = model.stream(**inputs_of(batch), dropout_key=key)
    targets_BT = batch['targets_BT']
    T = targets_BT.shape[1]
    C = config.train.logits_chunk
    if C is None or C >= T:
        return measure(model.logits(x_BTD), targets_BT)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def measure_chunk(chunk: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        x_BCD, targets_BC = chunk
        return measure(model.logits(x_BCD), targets_BC)

    chunks = (_cut_into_chunks(x_BTD, C), _cut_into_chunks(targets_BT, C))
    measured_chunks = jax.lax.map(measure_chunk, chunks)
    return jax.tree.map(lambda array: _join_chunks(array, T), measured_chunks)


def _cut_into_chunks(array_BT: jax.Array, C: int) -> jax.Array:
    """Cuts the T positions of an array into chunks of C: [B, T, ...] to [chunks, B, C, ...].

    The last chunk is padded with zeros. For example, 10 positions are 3 chunks of 4, the last one
    with 2 positions of padding.
    """
    B, T, *other_sizes = array_BT.shape
    num_chunks = math.ceil(T / C)
    padding = [(0, 0)] * array_BT.ndim
    padding[1] = (0, num_chunks * C - T)  # after the last position
    padded = jnp.pad(array_BT, padding)
    return jnp.moveaxis(padded.reshape(B, num_chunks, C, *other_sizes), 1, 0)


def _join_chunks(chunks: jax.Array, T: int) -> jax.Array:
    """Joins chunks to an array of T positions, the inverse of `_cut_into_chunks`."""
    num_chunks, B, C, *other_sizes = chunks.shape
    padded = jnp.moveaxis(chunks, 0, 1).reshape(B, num_chunks * C, *other_sizes)
    return padded[:, :T]


def objective(
    config: Config, params: dict, batch: dict, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns what a step minimizes, and the loss, both summed over the targets of a batch.

    Both are in nats, and the terms of a target are multiplied by its loss weight.

    With train.label_smoothing = e, the loss of a target is (1 - e) times its cross-entropy plus e
    times the mean cross-entropy of all V tokens. With train.z_loss = c, a step minimizes
    loss + c (log Z)^2, where Z is the sum of exp(logits), the normalizer of the predicted
    distribution (Chowdhery et al. 2022, section 5).
    """
    epsilon = config.train.label_smoothing
    z_loss = config.train.z_loss

    def losses(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
        nats_BT = cross_entropy(logits_BTV, targets_BT)
        if epsilon:
            # The mean of log Z - logit over all V tokens.
            mean_nats_BT = jax.nn.logsumexp(logits_BTV, -1) - logits_BTV.mean(-1)
            nats_BT = (1 - epsilon) * nats_BT + epsilon * mean_nats_BT
        if not z_loss:
            return {'nats_BT': nats_BT}
        log_z_BT = jax.nn.logsumexp(logits_BTV, -1)
        return {'nats_BT': nats_BT, 'penalty_BT': z_loss * log_z_BT**2}

    measured = measure_on_targets(config, params, batch, losses, key)
    weights_BT = batch['loss_weights_BT']
    loss = jnp.sum(measured['nats_BT'] * weights_BT)
    if not z_loss:
        return loss, loss
    penalty = jnp.sum(measured['penalty_BT'] * weights_BT)
    return loss + penalty, loss


def gradients(
    config: Config, params: dict, batch: dict, key: jax.Array | None = None
) -> tuple[jax.Array, dict]:
    """Returns the mean loss per target, and the gradient of the mean `objective` per target.

    The arrays of the batch have a leading axis of A microbatches. Loss and gradient are summed over
    all of them and then divided by the total loss weight.
    """
    A = batch['loss_weights_BT'].shape[0]
    # has_aux: `objective` returns a pair, and its first entry is differentiated.
    objective_and_gradient = jax.value_and_grad(functools.partial(objective, config), has_aux=True)

    def sums_of(microbatch: dict, key: jax.Array | None) -> tuple[jax.Array, dict]:
        """Returns the loss and the gradient, summed over the targets of a microbatch."""
        (_, loss), gradient = objective_and_gradient(params, microbatch, key)
        return loss, gradient

    if A == 1:
        sums = sums_of(jax.tree.map(lambda array: array[0], batch), key)
    else:
        keys_A = None if key is None else jax.random.split(key, A)

        def add_microbatch(sums: tuple, inputs: tuple) -> tuple[tuple, None]:
            microbatch, microbatch_key = inputs
            return jax.tree.map(jnp.add, sums, sums_of(microbatch, microbatch_key)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(add_microbatch, zeros, (batch, keys_A))
    # In a batch without targets, the sums and the weight are 0.
    total_weight = jnp.maximum(batch['loss_weights_BT'].sum(), 1)
    return jax.tree.map(lambda total: total / total_weight, sums)


def train_trial(
    config: Config, step: jax.Array, trial: dict, hyper: dict, batch: dict
) -> tuple[dict, dict]:
    """Takes a training step of one trial; returns its next state, and the metrics of the step.

    The metric 'loss' is in nats per target, with label smoothing and without z-loss.

    If the loss or the gradient is not finite, the trial has diverged: `alive` becomes False and
    stays so, nothing else in the state changes from then on, and the metrics are NaN.

    Args:
      config: the settings of the run.
      step: the number of steps before this one.
      trial: the state of the trial.
      hyper: the scalars 'seed', 'learning_rate' (at its peak) and 'weight_decay' of the trial.
      batch: arrays [A, B, ...] by name, of A microbatches.
    """
    key = None
    if config.model.drops:
        # The key of the seed itself draws the initial parameters.
        dropout_key = jax.random.fold_in(jax.random.key(hyper['seed']), 1)
        key = jax.random.fold_in(dropout_key, step)
    loss, gradient = gradients(config, trial['params'], batch, key)
    grad_norm = optax.tree.norm(gradient)

    fraction = schedule(config.optimizer, config.train.num_steps)(step)
    learning_rate = hyper['learning_rate']
    weight_decay = hyper['weight_decay']
    transform = optimizer(config.optimizer, learning_rate, weight_decay, fraction)
    updates, opt_state = transform.update(gradient, trial['opt_state'], trial['params'])
    params = optax.apply_updates(trial['params'], updates)

    alive = trial['alive'] & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    before = {'params': trial['params'], 'opt_state': trial['opt_state']}
    after = {'params': params, 'opt_state': opt_state}
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

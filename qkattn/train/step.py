"""One optimizer step of one trial: loss, gradient, update.

The state of a trial is {'params', 'opt_state', 'alive'}. `alive` becomes False when the loss or the
gradient is not finite. A stack is {'step': scalar, 'trials': states of X trials, [X, ...]}.
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
    """Returns the state of one trial before step 0, with parameters drawn from its seed."""
    params = nnx.to_pure_dict(nnx.state(build(config.model, key=jax.random.key(seed))))
    return trial_before_step_0(config, params)


def trial_before_step_0(config: Config, params: dict) -> dict:
    """Returns the state of one trial that starts from the parameters `params`."""
    opt_state = optimizer(config.optimizer, jnp.float32(0), jnp.float32(0)).init(params)
    return {'params': params, 'opt_state': opt_state, 'alive': jnp.bool(True)}


def init_stack(config: Config, seeds: jax.Array) -> dict:
    """Returns the stack of X trials before step 0; `seeds` is [X]."""
    trials = jax.vmap(functools.partial(init_trial, config))(seeds)
    return {'step': jnp.int32(0), 'trials': trials}


def stack_before_step_0(config: Config, params_X: dict) -> dict:
    """Returns the stack of X trials that start from the parameters `params_X`, [X, ...]."""
    trials = jax.vmap(functools.partial(trial_before_step_0, config))(params_X)
    return {'step': jnp.int32(0), 'trials': trials}


def measure_on_targets(
    config: Config,
    params: dict,
    batch: dict,
    measure: Callable[[jax.Array, jax.Array], dict[str, jax.Array]],
    key: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Runs the model on a batch and applies `measure` to its logits and the targets.

    With train.logits_chunk = C, only the logits of C positions are in memory at a time. The
    backward pass recomputes them.

    Args:
        config: The settings of the run.
        params: The parameters of one trial.
        batch: Arrays [B, ...] by name.
        measure: Maps (logits_BTV, targets_BT) to arrays [B, T, ...] by name. Positions must not
            depend on each other.
        key: The dropout key; None for no dropout.
    """
    dtype = jnp.dtype(config.model.compute_dtype)
    model = with_params(config.model, jax.tree.map(lambda p: p.astype(dtype), params))
    x_BTD = model.stream(**inputs_of(batch), dropout_key=key)
    targets_BT = batch['targets_BT']
    T = targets_BT.shape[1]
    C = config.train.logits_chunk
    if C is None or C >= T:
        return measure(model.logits(x_BTD), targets_BT)

    # In the loop of `lax.map`, XLA cannot merge the recomputation with the forward pass.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def measure_chunk(chunk: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        x_BCD, targets_BC = chunk
        return measure(model.logits(x_BCD), targets_BC)

    chunks = (_cut_into_chunks(x_BTD, C), _cut_into_chunks(targets_BT, C))
    measured_by_chunk = jax.lax.map(measure_chunk, chunks)
    return jax.tree.map(lambda array: _join_chunks(array, T), measured_by_chunk)


def _cut_into_chunks(array_BT: jax.Array, C: int) -> jax.Array:
    """Cuts [B, T, ...] into chunks of C positions, [chunks, B, C, ...].

    The last chunk is padded with zeros.
    """
    B, T, *other_sizes = array_BT.shape
    num_chunks = math.ceil(T / C)
    padding = [(0, 0)] * array_BT.ndim
    padding[1] = (0, num_chunks * C - T)  # after the last position
    padded = jnp.pad(array_BT, padding)
    chunks = padded.reshape(B, num_chunks, C, *other_sizes)
    return jnp.moveaxis(chunks, 1, 0)


def _join_chunks(chunks: jax.Array, T: int) -> jax.Array:
    """Joins [chunks, B, C, ...] to [B, T, ...] and drops the padding."""
    num_chunks, B, C, *other_sizes = chunks.shape
    padded = jnp.moveaxis(chunks, 0, 1).reshape(B, num_chunks * C, *other_sizes)
    return padded[:, :T]


def objective(
    config: Config, params: dict, batch: dict, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (objective, loss) in nats, both summed over the targets of a batch.

    The objective is what a step minimizes: the loss plus the z-loss, z_loss * (log Z)^2, where Z is
    the sum of exp(logits) (Chowdhery et al. 2022, section 5). Label smoothing mixes the
    cross-entropy of a target with the mean cross-entropy of all V tokens. The terms of each target
    are multiplied by its loss weight.
    """
    smoothing = config.train.label_smoothing
    z_loss = config.train.z_loss

    def losses(logits_BTV: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
        nats_BT = cross_entropy(logits_BTV, targets_BT)
        if smoothing:
            # The mean of log Z - logit over all tokens.
            mean_nats_BT = jax.nn.logsumexp(logits_BTV, -1) - logits_BTV.mean(-1)
            nats_BT = (1 - smoothing) * nats_BT + smoothing * mean_nats_BT
        if not z_loss:
            return {'nats_BT': nats_BT}
        log_z_BT = jax.nn.logsumexp(logits_BTV, -1)
        return {'nats_BT': nats_BT, 'z_loss_BT': z_loss * log_z_BT**2}

    measured = measure_on_targets(config, params, batch, losses, key)
    weights_BT = batch['loss_weights_BT']
    loss = jnp.sum(measured['nats_BT'] * weights_BT)
    if not z_loss:
        return loss, loss
    total_z_loss = jnp.sum(measured['z_loss_BT'] * weights_BT)
    return loss + total_z_loss, loss


def gradients(
    config: Config, params: dict, batch: dict, key: jax.Array | None = None
) -> tuple[jax.Array, dict]:
    """Returns the loss and the gradient of the `objective`, both as means over targets.

    The arrays of the batch are [A, B, ...], of A microbatches. Each mean is a sum over all
    microbatches divided by the total loss weight.
    """
    A = batch['loss_weights_BT'].shape[0]
    objective_and_gradient = jax.value_and_grad(functools.partial(objective, config), has_aux=True)

    def summed_over_targets(
        microbatch: dict, microbatch_key: jax.Array | None
    ) -> tuple[jax.Array, dict]:
        values, gradient = objective_and_gradient(params, microbatch, microbatch_key)
        _, loss = values  # (objective, loss)
        return loss, gradient

    if A == 1:
        microbatch = jax.tree.map(lambda array: array[0], batch)
        sums = summed_over_targets(microbatch, key)
    else:
        keys_A = None if key is None else jax.random.split(key, A)

        def add_microbatch(sums: tuple, inputs: tuple) -> tuple[tuple, None]:
            microbatch, microbatch_key = inputs
            loss_and_gradient = summed_over_targets(microbatch, microbatch_key)
            return jax.tree.map(jnp.add, sums, loss_and_gradient), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(add_microbatch, zeros, (batch, keys_A))
    # A batch without targets has weight 0, and sums of 0. Avoid 0 / 0, so that its means are 0.
    total_weight = batch['loss_weights_BT'].sum()
    divisor = jnp.where(total_weight > 0, total_weight, 1)
    return jax.tree.map(lambda total: total / divisor, sums)


def train_trial(
    config: Config, step: jax.Array, trial: dict, hyper: dict, batch: dict
) -> tuple[dict, dict]:
    """Takes a training step of one trial; returns (next state, metrics of the step).

    A trial diverges if its loss or gradient is not finite. From then on its state is frozen, with
    `alive` False, and its metrics are NaN.

    Args:
        config: The settings of the run.
        step: The number of steps before this one.
        trial: The state of the trial.
        hyper: The scalars 'seed', 'learning_rate' (the peak) and 'weight_decay' of the trial.
        batch: Arrays [A, B, ...] by name, of A microbatches.
    """
    step_key = None
    if config.model.drops:  # with dropout
        # `init_trial` uses the key of the seed, so dropout needs another one.
        dropout_key = jax.random.fold_in(jax.random.key(hyper['seed']), 1)
        step_key = jax.random.fold_in(dropout_key, step)
    loss, gradient = gradients(config, trial['params'], batch, step_key)
    grad_norm = optax.tree.norm(gradient)

    fraction_at = schedule(config.optimizer, config.train.num_steps)
    fraction_of_peak = fraction_at(step)
    learning_rate = hyper['learning_rate']
    weight_decay = hyper['weight_decay']
    transform = optimizer(config.optimizer, learning_rate, weight_decay, fraction_of_peak)
    updates, opt_state = transform.update(gradient, trial['opt_state'], trial['params'])
    params = optax.apply_updates(trial['params'], updates)

    alive = trial['alive'] & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    old_state = {'params': trial['params'], 'opt_state': trial['opt_state']}
    new_state = {'params': params, 'opt_state': opt_state}
    state = jax.tree.map(lambda new, old: jnp.where(alive, new, old), new_state, old_state)
    metrics = {
        'loss': loss,  # with label smoothing, without z-loss
        'grad_norm': grad_norm,
        'param_norm': optax.tree.norm(params),
        'update_norm': optax.tree.norm(updates),
        'learning_rate': learning_rate * fraction_of_peak,
    }
    metrics = {name: jnp.where(alive, value, jnp.nan) for name, value in metrics.items()}
    return {**state, 'alive': alive}, metrics

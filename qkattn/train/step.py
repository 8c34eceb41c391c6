"""One optimizer step, written for one trial and lifted over a stack of them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qkattn.config import Config
from qkattn.model import Decoder
from qkattn.train.optimizer import adamw, schedule
from qkattn.train.sharding import BATCH_AXES

# A trial's state: params, opt_state and `alive`, False once its loss or gradient was not finite.
# A stack is {'step': scalar, 'trials': trial states with a leading axis X}.


def graph_of(config: Config) -> nnx.GraphDef:
    """The model without its numbers."""
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(config.model, key=jax.random.key(0))))


def init_trial(config: Config, seed: jax.Array) -> dict:
    """Fresh parameters and optimizer state of one trial."""
    params = nnx.to_pure_dict(nnx.state(Decoder(config.model, key=jax.random.key(seed))))
    opt_state = adamw(config.optimizer, jnp.float32(0), jnp.float32(0)).init(params)
    return {'params': params, 'opt_state': opt_state, 'alive': jnp.bool(True)}


def init_stack(config: Config, seeds: jax.Array) -> dict:
    """The state of X trials before step 0."""
    trials = jax.vmap(functools.partial(init_trial, config))(seeds)
    return {'step': jnp.int32(0), 'trials': trials}


def language_batch(tokens_ABT1: jax.Array) -> dict[str, jax.Array]:
    """Windows of T + 1 tokens, in A microbatches, as inputs, targets and weights."""
    return {
        'tokens_BT': tokens_ABT1[..., :-1],
        'targets_BT': tokens_ABT1[..., 1:],
        'weights_BT': jnp.ones(tokens_ABT1[..., 1:].shape, jnp.float32),
    }


def loss_sum(
    config: Config, graph: nnx.GraphDef, params: dict, batch: dict, dropout_key: jax.Array | None
) -> jax.Array:
    """Sum over the batch of weight times cross-entropy, in nats."""
    dtype = jnp.dtype(config.model.compute_dtype)
    model = nnx.merge(graph, jax.tree.map(lambda p: p.astype(dtype), params))
    logits_BTV = model(batch['tokens_BT'], dropout_key=dropout_key)
    nats_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch['targets_BT'])
    return jnp.sum(nats_BT * batch['weights_BT'])


def gradients(
    config: Config, graph: nnx.GraphDef, params: dict, batch: dict, key: jax.Array | None
) -> tuple[jax.Array, dict]:
    """Mean loss per token and its gradient over a batch whose leading axis is microbatches.

    Sums of losses and gradients are accumulated and divided once by all tokens, so a microbatch
    weighs as much as it has tokens.
    """
    count = batch['weights_BT'].shape[0]
    grad = jax.value_and_grad(functools.partial(loss_sum, config, graph))
    if count == 1:
        total = grad(params, jax.tree.map(lambda a: a[0], batch), key)
    else:
        keys = None if key is None else jax.random.split(key, count)

        def add(total, inputs):
            one, one_key = inputs
            return jax.tree.map(jnp.add, total, grad(params, one, one_key)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zero, (batch, keys))
    total_weight = jnp.maximum(batch['weights_BT'].sum(), 1)
    return jax.tree.map(lambda a: a / total_weight, total)


def train_trial(
    config: Config, graph: nnx.GraphDef, step: jax.Array, trial: dict, hyper: dict, batch: dict
) -> tuple[dict, dict]:
    """One step of one trial.

    Args:
      step: number of steps done, the same for all trials.
      trial: its state.
      hyper: 'seed', 'learning_rate' (peak), 'weight_decay', scalars.
      batch: tokens_BT, targets_BT, weights_BT, each with a leading axis of microbatches.

    Returns:
      The next state, or the old one with alive=False where loss or gradient is not finite; and
      loss (nats per token), gradient, parameter and update norms, learning rate.
    """
    key = None
    if config.model.dropout:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(hyper['seed']), 1), step)
    loss, grads = gradients(config, graph, trial['params'], batch, key)
    grad_norm = optax.tree.norm(grads)

    fraction = schedule(config.optimizer, config.train.num_steps)(step)
    learning_rate = hyper['learning_rate'] * fraction
    optimizer = adamw(config.optimizer, learning_rate, hyper['weight_decay'])
    updates, opt_state = optimizer.update(grads, trial['opt_state'], trial['params'])
    params = optax.apply_updates(trial['params'], updates)

    alive = trial['alive'] & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    moved = {'params': params, 'opt_state': opt_state}
    kept = {name: trial[name] for name in moved}
    state = jax.tree.map(lambda new, old: jnp.where(alive, new, old), moved, kept)
    metrics = {
        'loss': loss,
        'grad_norm': grad_norm,
        'param_norm': optax.tree.norm(params),
        'update_norm': optax.tree.norm(updates),
        'learning_rate': learning_rate,
    }
    metrics = {name: jnp.where(alive, value, jnp.nan) for name, value in metrics.items()}
    return {**state, 'alive': alive}, metrics


def lift(one: Callable, lifting: str, mesh: Mesh) -> Callable:
    """`one` over the leading axis X of all its arguments, trials never talking to each other.

    'vmap' runs them side by side; 'map' one after another on each slice of the mesh's trial axis.
    """
    side_by_side = jax.vmap(one, spmd_axis_name='trial')
    if lifting == 'vmap':
        return side_by_side
    slices = mesh.shape['trial']

    def mapped(*stacked):
        # Slice i of the mesh holds X / slices trials in a row; a turn takes one of each slice.
        turns = jax.tree.map(
            lambda a: jnp.swapaxes(a.reshape(slices, -1, *a.shape[1:]), 0, 1), stacked
        )
        done = jax.lax.map(lambda turn: side_by_side(*turn), turns)
        return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:]), done)

    if slices > 1:
        return mapped
    return lambda *stacked: jax.lax.map(lambda args: one(*args), stacked)


def train_steps(
    config: Config, graph: nnx.GraphDef, lifting: str, mesh: Mesh
) -> Callable[[dict, dict, jax.Array], tuple[dict, dict]]:
    """The program (state, hyper, tokens_CXABT1) -> (state, metrics [C, X]) of C steps."""

    def one_step(state, hyper, tokens_XABT1):
        def one(trial, hyper, tokens_ABT1):
            batch = language_batch(tokens_ABT1)
            return train_trial(config, graph, state['step'], trial, hyper, batch)

        trials, metrics = lift(one, lifting, mesh)(state['trials'], hyper, tokens_XABT1)
        return {'step': state['step'] + 1, 'trials': trials}, metrics

    def many_steps(state, hyper, tokens_CXABT1):
        return jax.lax.scan(lambda s, tokens: one_step(s, hyper, tokens), state, tokens_CXABT1)

    return many_steps


def eval_step(
    config: Config, graph: nnx.GraphDef, lifting: str, mesh: Mesh
) -> Callable[[dict, dict], jax.Array]:
    """The program (params of X trials, one batch) -> summed loss [X] in nats, without dropout."""
    batch_spec = jax.sharding.NamedSharding(mesh, P(BATCH_AXES))

    def evaluate(params, batch):
        batch = jax.lax.with_sharding_constraint(batch, batch_spec)

        def one(params):
            return loss_sum(config, graph, params, batch, None)

        return lift(one, lifting, mesh)(params)

    return evaluate

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
from qkattn.model import abstract_model, build
from qkattn.train.optimizer import adamw, schedule
from qkattn.train.sharding import BATCH_AXES

# A trial's state: params, opt_state and `alive`, False once its loss or gradient was not finite.
# A stack is {'step': scalar, 'trials': trial states with a leading axis X}.


def graph_of(config: Config) -> nnx.GraphDef:
    """The model without its numbers."""
    return nnx.graphdef(abstract_model(config.model))


def init_trial(config: Config, seed: jax.Array) -> dict:
    """Fresh parameters and optimizer state of one trial."""
    params = nnx.to_pure_dict(nnx.state(build(config.model, key=jax.random.key(seed))))
    opt_state = adamw(config.optimizer, jnp.float32(0), jnp.float32(0)).init(params)
    return {'params': params, 'opt_state': opt_state, 'alive': jnp.bool(True)}


def init_stack(config: Config, seeds: jax.Array) -> dict:
    """The state of X trials before step 0."""
    trials = jax.vmap(functools.partial(init_trial, config))(seeds)
    return {'step': jnp.int32(0), 'trials': trials}


def predict(
    config: Config, graph: nnx.GraphDef, params: dict, batch: dict, dropout_key: jax.Array | None
) -> jax.Array:
    """logits_BTV: the model on everything in the batch but targets and weights."""
    dtype = jnp.dtype(config.model.compute_dtype)
    model = nnx.merge(graph, jax.tree.map(lambda p: p.astype(dtype), params))
    inputs = {k: v for k, v in batch.items() if k not in ('targets_BT', 'loss_weights_BT')}
    return model(**inputs, dropout_key=dropout_key)


def loss_sum(
    config: Config, graph: nnx.GraphDef, params: dict, batch: dict, dropout_key: jax.Array | None
) -> jax.Array:
    """Sum over the batch of weight times loss, in nats.

    The loss is (1 - e) times the cross-entropy of the target plus e times the mean cross-entropy of
    all V tokens, e = train.label_smoothing.
    """
    logits_BTV = predict(config, graph, params, batch, dropout_key)
    nats_BT = cross_entropy(logits_BTV, batch['targets_BT'])
    if epsilon := config.train.label_smoothing:
        uniform_BT = jax.nn.logsumexp(logits_BTV, -1) - logits_BTV.mean(-1)
        nats_BT = (1 - epsilon) * nats_BT + epsilon * uniform_BT
    return jnp.sum(nats_BT * batch['loss_weights_BT'])


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], nats_BT.

    The target's logit is picked by a mask: picked by index, as optax does it, its gradient is a
    scatter, for which XLA copies all logits to every device where V is split (fsdp).
    """
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    picked_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    return jax.nn.logsumexp(logits_BTV, -1) - picked_BT


def measure(config: Config, graph: nnx.GraphDef, params: dict, batch: dict) -> dict:
    """Sums over the batch, without dropout or smoothing.

    Returns:
      nats: weight times cross-entropy; correct: weight of the targets that are the likeliest token;
      solved: rows all of whose targets are, as far as they have any; weight; rows; and over rows,
      with their weight w and excess e, the nats above the batch's mean loss times w: ee, ew and ww.
    """
    logits_BTV = predict(config, graph, params, batch, None)
    targets_BT, loss_weights_BT = batch['targets_BT'], batch['loss_weights_BT']
    nats_BT = cross_entropy(logits_BTV, targets_BT)
    correct_BT = jnp.argmax(logits_BTV, -1) == targets_BT
    used_B = loss_weights_BT.any(-1)
    nats_B, weight_B = jnp.sum(nats_BT * loss_weights_BT, -1), jnp.sum(loss_weights_BT, -1)
    nats, weight = nats_B.sum(), weight_B.sum()
    # Rows differ little from their mean: squares of nats themselves would cancel in float32.
    excess_B = nats_B - nats / jnp.maximum(weight, 1) * weight_B
    return {
        'nats': nats,
        'correct': jnp.sum(correct_BT * loss_weights_BT),
        'solved': jnp.sum(used_B & (correct_BT | (loss_weights_BT == 0)).all(-1)),
        'weight': weight,
        'rows': jnp.sum(used_B),
        'ee': jnp.sum(excess_B**2),
        'ew': jnp.sum(excess_B * weight_B),
        'ww': jnp.sum(weight_B**2),
    }


def gradients(
    config: Config, graph: nnx.GraphDef, params: dict, batch: dict, key: jax.Array | None
) -> tuple[jax.Array, dict]:
    """Mean loss per token and its gradient over a batch whose leading axis is microbatches.

    Sums of losses and gradients are accumulated and divided once by all tokens, so a microbatch
    weighs as much as it has tokens.
    """
    count = batch['loss_weights_BT'].shape[0]
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
    total_weight = jnp.maximum(batch['loss_weights_BT'].sum(), 1)
    return jax.tree.map(lambda a: a / total_weight, total)


def train_trial(
    config: Config, graph: nnx.GraphDef, step: jax.Array, trial: dict, hyper: dict, batch: dict
) -> tuple[dict, dict]:
    """One step of one trial.

    Args:
      step: number of steps done, the same for all trials.
      trial: its state.
      hyper: 'seed', 'learning_rate' (peak), 'weight_decay', scalars.
      batch: tokens_BT, targets_BT, loss_weights_BT and the model's other inputs, each with a
        leading axis of microbatches.

    Returns:
      The next state, or the old one with alive=False where loss or gradient is not finite; and
      loss (nats per token, smoothed where the config says so), gradient, parameter and update
      norms, learning rate.
    """
    key = None
    if config.model.drops:
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
) -> Callable[[dict, dict, dict], tuple[dict, dict]]:
    """The program (state, hyper, batch [C, X, A, B, ...]) -> (state, metrics [C, X]) of C steps."""

    def one_step(state, hyper, batch):
        def one(trial, hyper, batch):
            return train_trial(config, graph, state['step'], trial, hyper, batch)

        trials, metrics = lift(one, lifting, mesh)(state['trials'], hyper, batch)
        return {'step': state['step'] + 1, 'trials': trials}, metrics

    def many_steps(state, hyper, batches):
        return jax.lax.scan(lambda s, batch: one_step(s, hyper, batch), state, batches)

    return many_steps


def eval_step(
    config: Config, graph: nnx.GraphDef, lifting: str, mesh: Mesh
) -> Callable[[dict, dict], dict]:
    """The program (params of X trials, one batch) -> the sums of `measure`, each [X]."""
    batch_spec = jax.sharding.NamedSharding(mesh, P(BATCH_AXES))

    def evaluate(params, batch):
        batch = jax.lax.with_sharding_constraint(batch, batch_spec)

        def one(params):
            return measure(config, graph, params, batch)

        return lift(one, lifting, mesh)(params)

    return evaluate

"""AdamW with warm-up and decay, its learning rate and weight decay given as arrays."""

import jax
import jax.numpy as jnp
import optax

from qkattn.config import OptimizerConfig


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Fraction of the peak learning rate at step 0, 1, ..., num_steps - 1.

    Step s < W of the warm-up has (s + 1) / (W + 1), so that no step is wasted at zero; the decay
    reaches final_fraction after the last step, but for 'inverse_sqrt', which is sqrt(W / s).
    """
    warmup = config.warmup_steps
    decay_steps = num_steps - warmup
    decay = {
        'linear': optax.schedules.linear_schedule(1.0, config.final_fraction, decay_steps),
        'cosine': optax.schedules.cosine_decay_schedule(1.0, decay_steps, config.final_fraction),
        'constant': optax.schedules.constant_schedule(1.0),
        'inverse_sqrt': lambda steps: jnp.sqrt(warmup / (warmup + jnp.maximum(steps, 0))),
    }[config.schedule]
    if not warmup:
        return decay
    rise = optax.schedules.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.schedules.join_schedules([rise, decay], [warmup])


def decayed(params: dict) -> dict:
    """True for matrices and embeddings (w_...) that train, False for biases, gains and frozen."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key.startswith('w_') and not is_frozen(path), params
    )


def is_frozen(path: tuple) -> bool:
    """Whether a parameter never trains (w_frozen_...): its gradient is 0 and it does not decay."""
    return path[-1].key.startswith('w_frozen_')


def adamw(
    config: OptimizerConfig, learning_rate: jax.Array, weight_decay: jax.Array
) -> optax.GradientTransformation:
    """Clip by global norm, then p <- p - learning_rate (adam(g) + weight_decay p).

    The state does not depend on the two numbers, which may be traced: built anew in each step, one
    compiled program serves all trials and all points of the schedule.
    """
    update = optax.adamw(
        learning_rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=weight_decay,
        mask=decayed,
    )
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(jnp.float32(config.clip_norm))
    return optax.chain(clip, update)

"""Optimizers and schedules by name; learning rate and weight decay are arrays.

Another optimizer or schedule is one function and one line in OPTIMIZERS or SCHEDULES.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from qkattn.config import OptimizerConfig
from qkattn.errors import ConfigError

# Update of Muon relative to that of Adam (Liu et al. 2025, section 2.2).
MUON_RMS = 0.2


def optimizer(
    config: OptimizerConfig, learning_rate: jax.Array, weight_decay: jax.Array
) -> optax.GradientTransformation:
    """Clips by global norm, then p <- p - learning_rate (u + weight_decay p), u by config.name.

    The state depends on neither number, and both may be traced: built anew in each step, one
    compiled program serves all trials and all points of the schedule.
    """
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(jnp.float32(config.clip_norm))
    return optax.chain(clip, OPTIMIZERS[config.name](config, learning_rate, weight_decay))


def adamw(
    config: OptimizerConfig, learning_rate: jax.Array, weight_decay: jax.Array
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019)."""
    return optax.adamw(
        learning_rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=weight_decay,
        mask=decayed,
    )


def muon(
    config: OptimizerConfig, learning_rate: jax.Array, weight_decay: jax.Array
) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks (Jordan et al. 2024), Adam for all other parameters.

    Both with Nesterov momentum, as in optax. Updates of matrices are scaled to the root mean square
    of Adam's (Liu et al. 2025, 'Muon is scalable for LLM training'), so that learning rates
    compare. Each head is a matrix of its own.
    """
    return optax.chain(
        optax.contrib.muon(
            1.0,
            beta=config.momentum,
            eps=config.epsilon,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=matrix_axes,
            consistent_rms=MUON_RMS,
        ),
        optax.add_decayed_weights(-weight_decay, mask=decayed),
        optax.scale(learning_rate),
    )


def sgd(
    config: OptimizerConfig, learning_rate: jax.Array, weight_decay: jax.Array
) -> optax.GradientTransformation:
    """Gradient descent with momentum: u <- gradient + momentum u."""
    return optax.chain(
        optax.trace(config.momentum),
        optax.add_decayed_weights(weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate),
    )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    'adamw': adamw,
    'muon': muon,
    'sgd': sgd,
}


def decayed(params: dict) -> dict:
    """True for matrices and embeddings (w_...) that train, False for biases, gains and frozen."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key.startswith('w_') and not is_frozen(path), params
    )


def is_frozen(path: tuple) -> bool:
    """Whether a parameter never trains (w_frozen_...): its gradient is 0 and it does not decay."""
    return path[-1].key.startswith('w_frozen_')


def matrix_axes(params: dict) -> dict:
    """The two matrix axes of every parameter that Muon trains, None for the others.

    They are the matrices of the blocks. Axes of layers (L) and heads (N, K), with at least two
    letters besides, are batches of matrices: w_q_DNH is one [D, H] matrix a layer and head.
    """

    def axes(path: tuple, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        name = path[-1].key
        letters = name.rpartition('_')[2]
        in_block = any(entry.key == 'blocks' for entry in path)
        if not (in_block and name.startswith('w_') and len(letters) > 1) or is_frozen(path):
            return None
        first = leaf.ndim - len(letters)
        kept = [i for i, letter in enumerate(letters) if letter not in 'NK']
        kept = kept if len(kept) == 2 else range(len(letters))
        *rows, columns = (first + i for i in kept)
        return optax.contrib.MuonDimensionNumbers(tuple(rows), (columns,))

    return jax.tree_util.tree_map_with_path(axes, params)


def linear(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    return optax.schedules.linear_schedule(1.0, config.final_fraction, decay_steps)


def cosine(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    return optax.schedules.cosine_decay_schedule(1.0, decay_steps, config.final_fraction)


def constant(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    return optax.schedules.constant_schedule(1.0)


def inverse_sqrt(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    warmup = config.warmup_steps
    return lambda steps: jnp.sqrt(warmup / (warmup + jnp.maximum(steps, 0)))


# (config, number of steps after the warm-up) -> fraction of the peak at each of these steps.
SCHEDULES: dict[str, Callable[[OptimizerConfig, int], optax.Schedule]] = {
    'linear': linear,
    'cosine': cosine,
    'constant': constant,
    'inverse_sqrt': inverse_sqrt,
}


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Fraction of the peak learning rate at step 0, 1, ..., num_steps - 1.

    Step s < W of the warm-up has (s + 1) / (W + 1), so that no step is wasted at zero; the decay
    reaches final_fraction after the last step, except 'inverse_sqrt', which is sqrt(W / s).
    """
    warmup = config.warmup_steps
    decay = SCHEDULES[config.schedule](config, num_steps - warmup)
    if not warmup:
        return decay
    rise = optax.schedules.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.schedules.join_schedules([rise, decay], [warmup])


def check_optimizer(config: OptimizerConfig) -> None:
    """Raises ConfigError for an unknown optimizer or schedule."""
    for field, known in (('name', OPTIMIZERS), ('schedule', SCHEDULES)):
        if getattr(config, field) not in known:
            raise ConfigError(
                f'optimizer.{field}={getattr(config, field)!r} must be one of {", ".join(known)}'
            )

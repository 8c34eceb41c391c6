"""Optimizers and learning rate schedules, by registered name or import path."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Transformation

from qkattn.config import OptimizerConfig
from qkattn.config.calls import accepts_arguments, call_with_config_errors, resolve
from qkattn.errors import ConfigError


def optimizer(
    config: OptimizerConfig,
    learning_rate: jax.Array,
    weight_decay: jax.Array,
    fraction: jax.Array | float = 1.0,
) -> Transformation:
    """Returns the optimizer `config.name` with gradient clipping and weight decay.

    The optimizer computes u from clipped gradients. A parameter p becomes

        p - fraction * (learning_rate * u + weight_decay * p)    if config.decay = 'independent',
        p - fraction * learning_rate * (u + weight_decay * p)    if config.decay = 'coupled'.

    Args:
        config: The settings of the optimizer.
        learning_rate: The peak learning rate; may be traced, like the other two scalars.
        weight_decay: The weight decay.
        fraction: The value of the learning rate schedule, from 0 to 1.
    """
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(jnp.float32(config.clip_norm))
    rate = learning_rate * fraction
    make_optimizer = _optimizer_function(config)
    if config.decay == 'coupled':
        return optax.chain(clip, make_optimizer(config, rate, weight_decay))
    # Negative, because updates are added to p.
    decay = optax.add_decayed_weights(-fraction * weight_decay, mask=decay_mask)
    without_decay = make_optimizer(config, rate, 0.0)
    return optax.chain(clip, without_decay, decay)


def decay_mask(params: dict) -> dict:
    """Returns True for parameters that decay: matrices and embeddings (w_...), unless frozen."""

    def decays(path: tuple, _: jax.Array) -> bool:
        name = path[-1].key  # such as 'w_q_DNH'
        return name.startswith('w_') and not _is_frozen(path)

    return jax.tree_util.tree_map_with_path(decays, params)


def _is_frozen(path: tuple) -> bool:
    """Whether a parameter is frozen, by its name (w_frozen_...)."""
    return path[-1].key.startswith('w_frozen_')


def adamw(config: OptimizerConfig, rate: jax.Array, weight_decay: jax.Array) -> Transformation:
    """AdamW (Loshchilov & Hutter 2019)."""
    return optax.adamw(
        rate,
        config.beta1,
        config.beta2,
        config.epsilon,
        weight_decay=weight_decay,
        mask=decay_mask,
    )


def sgd(config: OptimizerConfig, rate: jax.Array, weight_decay: jax.Array) -> Transformation:
    """Gradient descent with momentum: u <- gradient + momentum u."""
    return optax.chain(
        optax.trace(config.momentum),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(rate),
    )


def muon(config: OptimizerConfig, rate: jax.Array, weight_decay: jax.Array) -> Transformation:
    """Muon for the matrices of blocks (Jordan et al. 2024), Adam for other parameters.

    Muon's updates get the root mean square of Adam's (Liu et al. 2025), so that both work with the
    same learning rate. Each head is a separate matrix. Both use Nesterov momentum.
    """
    return optax.chain(
        optax.contrib.muon(
            1.0,  # the learning rate is applied below
            beta=config.momentum,
            eps=config.epsilon,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=matrix_axes,
            consistent_rms=0.2,  # as Adam's updates (Liu et al. 2025, section 2.2)
        ),
        # Negative, like the updates of Muon.
        optax.add_decayed_weights(-weight_decay, mask=decay_mask),
        optax.scale(rate),
    )


def matrix_axes(params: dict) -> dict:
    """Returns the `_axes_of_parameter` of every parameter."""
    return jax.tree_util.tree_map_with_path(_axes_of_parameter, params)


def _axes_of_parameter(path: tuple, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the axes that are rows and columns of a matrix; None if Muon does not train it.

        name         shape of the leaf    rows, columns
        w_in_DF      [L, D, F]            (1,), (2,)
        w_q_DNH      [L, D, N, H]         (1,), (3,)       a matrix for each head N
        w_talk_NN    [L, N, N]            (1,), (2,)

    L is the axis of layers, and N and K are axes of heads. The letters in a name leave out L.
    """
    name = path[-1].key
    letters = name.rpartition('_')[2]  # 'DNH' in 'w_q_DNH'
    is_in_block = any(entry.key == 'blocks' for entry in path)
    is_matrix = name.startswith('w_') and len(letters) > 1
    if not is_in_block or not is_matrix or _is_frozen(path):
        return None

    first_axis = leaf.ndim - len(letters)  # the axis of the first letter, after L
    axes = []
    for axis, letter in enumerate(letters, start=first_axis):
        is_axis_of_heads = letter in ('N', 'K')
        if not is_axis_of_heads:
            axes.append(axis)
    if len(axes) != 2:
        # A head has no matrix of its own, so all axes of a layer form one, as in w_talk_NN.
        axes = list(range(first_axis, leaf.ndim))
    *row_axes, column_axis = axes
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(row_axes), output_axis=(column_axis,)
    )


# (config, learning rate, weight decay) -> the optimizer, by the value of optimizer.name.
OPTIMIZERS: dict[str, Callable[..., Any]] = {'adamw': adamw, 'muon': muon, 'sgd': sgd}


def linear(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """From 1 to final_fraction on a line."""
    return optax.linear_schedule(
        init_value=1.0, end_value=config.final_fraction, transition_steps=decay_steps
    )


def cosine(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """From 1 to final_fraction on half a period of a cosine."""
    return optax.cosine_decay_schedule(
        init_value=1.0, decay_steps=decay_steps, alpha=config.final_fraction
    )


def wsd(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """Warm-up, stable, decay (Hu et al. 2024): 1, then from 1 to final_fraction on a line.

    The line takes optimizer.decay_fraction of all steps, warm-up included. Hu et al. decay
    exponentially instead.
    """
    num_steps = config.warmup_steps + decay_steps
    line_steps = config.wsd_decay_steps(num_steps)
    stable_steps = decay_steps - line_steps
    return optax.linear_schedule(
        init_value=1.0,
        end_value=config.final_fraction,
        transition_steps=line_steps,
        transition_begin=stable_steps,
    )


def constant(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """1 at every step."""
    return optax.constant_schedule(1.0)


def inverse_sqrt(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """sqrt(W / (W + s)) at step s after a warm-up of W steps."""
    warmup = config.warmup_steps

    def fraction(steps: jax.Array) -> jax.Array:
        return jnp.sqrt(warmup / (warmup + jnp.maximum(steps, 0)))

    return fraction


# (config, number of steps after the warm-up) -> fraction of the peak at each of these steps.
SCHEDULES: dict[str, Callable[[OptimizerConfig, int], optax.Schedule]] = {
    'linear': linear,
    'cosine': cosine,
    'wsd': wsd,
    'constant': constant,
    'inverse_sqrt': inverse_sqrt,
}


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the fraction of the peak learning rate as a function of the step, from step 0.

    A warm-up of W = 3 steps has the fractions 1/4, 1/2 and 3/4. Then the schedule goes from 1 to
    final_fraction, which it reaches after the last step. 'constant' and 'inverse_sqrt' ignore
    final_fraction.
    """
    W = config.warmup_steps
    make_decay = _schedule_function(config)
    decay = make_decay(config, num_steps - W)
    if W == 0:
        return decay
    warmup = optax.linear_schedule(init_value=1 / (W + 1), end_value=1.0, transition_steps=W)
    # `decay` counts its steps from the end of the warm-up.
    return optax.join_schedules([warmup, decay], boundaries=[W])


def _optimizer_function(config: OptimizerConfig) -> Callable[..., Any]:
    """Returns the function that config.name names; raises ConfigError if it is no optimizer."""
    return _function_named(config.name, 'name', OPTIMIZERS, ('learning_rate', 'weight_decay'))


def _schedule_function(config: OptimizerConfig) -> Callable[..., Any]:
    """Returns the function that config.schedule names; raises ConfigError if it is no schedule."""
    return _function_named(config.schedule, 'schedule', SCHEDULES, ('decay_steps',))


def _function_named(
    text: str, field: str, registry: Mapping[str, Any], arguments: tuple[str, ...]
) -> Callable[..., Any]:
    """Returns the function that a setting names, with its options bound.

    For example, 'module:name(a=1)' gives functools.partial(name, a=1).

    Args:
        text: The value of the setting, a registered name such as 'muon' or an import path.
        field: The name of the setting in OptimizerConfig, for error messages.
        registry: The registered functions by name.
        arguments: The names of the function's arguments after `config`, such as ('decay_steps',).

    Raises:
        ConfigError: There is no such function, or it takes other arguments.
    """
    function, options = resolve(
        text,
        known=registry,
        field=f'optimizer.{field}',
        needs=f'a function (config, {", ".join(arguments)}, *, options)',
        is_valid=accepts_arguments('config', *arguments),
    )
    return functools.partial(function, **options)


def check_optimizer(config: OptimizerConfig, num_steps: int) -> None:
    """Raises ConfigError if the optimizer or the schedule is unknown or invalid.

    Calls a function that is named by an import path, module:name. An optimizer must return a
    GradientTransformation. A schedule must end at final_fraction after `num_steps`.
    """
    make_optimizer = _optimizer_function(config)
    make_decay = _schedule_function(config)
    is_imported_optimizer = ':' in config.name
    if is_imported_optimizer:
        _check_imported_optimizer(config, make_optimizer)

    is_imported_schedule = ':' in config.schedule
    decay_steps = num_steps - config.warmup_steps
    if is_imported_schedule and decay_steps > 0:
        _check_imported_schedule(config, make_decay, decay_steps)


def _check_imported_optimizer(config: OptimizerConfig, make_optimizer: Callable[..., Any]) -> None:
    """Raises ConfigError if `make_optimizer` fails or returns no GradientTransformation."""

    def make_example() -> Any:
        learning_rate = 1e-3
        weight_decay = 0.0
        return make_optimizer(config, learning_rate, weight_decay)

    transform = call_with_config_errors('optimizer.name', config.name, make_example)
    if not isinstance(transform, Transformation):
        raise ConfigError(
            f'optimizer.name={config.name!r} must return an optax.GradientTransformation, '
            f'not {transform!r}'
        )


def _check_imported_schedule(
    config: OptimizerConfig, make_decay: Callable[..., Any], decay_steps: int
) -> None:
    """Raises ConfigError if a schedule fails or does not end at final_fraction."""

    def fraction_at_end() -> float:
        decay = make_decay(config, decay_steps)
        return float(decay(decay_steps))

    end = call_with_config_errors('optimizer.schedule', config.schedule, fraction_at_end)
    # Reports rely on final_fraction.
    if not math.isclose(end, config.final_fraction, abs_tol=1e-3):
        raise ConfigError(
            f'optimizer.final_fraction={config.final_fraction} must be {end:.4g}, where '
            f'optimizer.schedule={config.schedule!r} ends'
        )

"""Optimizers and schedules by name, with learning rate and weight decay as arrays.

Either is a function in OPTIMIZERS or SCHEDULES, or by import path; options are keyword arguments.
"""

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
    """Returns the transformation of gradients into updates: clipping, a step along u, decay.

    The optimizer config.name computes u from gradients that are clipped by their global norm.
    `fraction` is the value of the learning rate's schedule at the step, from 0 to 1. A parameter p
    becomes

        p - fraction (learning_rate u + weight_decay p)    if config.decay = 'independent',
        p - fraction learning_rate (u + weight_decay p)    if config.decay = 'coupled'.

    All numbers may be traced, and the state does not depend on them. So one compiled program serves
    all trials and steps.
    """
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(jnp.float32(config.clip_norm))
    rate = learning_rate * fraction
    make = _optimizer_function(config)
    if config.decay == 'coupled':
        return optax.chain(clip, make(config, rate, weight_decay))
    # Updates are added to p, so the decay has a minus sign. `decay_mask` selects the parameters.
    decay = optax.add_decayed_weights(-fraction * weight_decay, mask=decay_mask)
    return optax.chain(clip, make(config, rate, 0.0), decay)


def decay_mask(params: dict) -> dict:
    """Returns which parameters decay: matrices and embeddings (w_...) that are not frozen.

    Biases (b_...) and gains (g_...) do not.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key.startswith('w_') and not _is_frozen(path), params
    )


def _is_frozen(path: tuple) -> bool:
    """Whether a parameter never trains (w_frozen_...): its gradient is 0 and it does not decay."""
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
    """Muon for the matrices of the blocks (Jordan et al. 2024), Adam for all other parameters.

    Both use Nesterov momentum, as in optax. Updates of matrices are scaled to the root mean square
    of Adam's updates (Liu et al. 2025), so that both work with the same learning rate. Each head is
    a matrix of its own.
    """
    return optax.chain(
        optax.contrib.muon(
            1.0,  # the rate scales both the update and the decay, below
            beta=config.momentum,
            eps=config.epsilon,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=matrix_axes,
            consistent_rms=0.2,  # that of Adam's updates (section 2.2)
        ),
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

    num_leading = leaf.ndim - len(letters)  # the axis L
    axes_of_layer = range(num_leading, leaf.ndim)
    axes_within_head = []
    for axis, letter in zip(axes_of_layer, letters, strict=True):
        if letter not in ('N', 'K'):
            axes_within_head.append(axis)

    has_matrix_per_head = len(axes_within_head) == 2
    # Otherwise all axes of a layer form one matrix.
    axes_of_matrix = axes_within_head if has_matrix_per_head else axes_of_layer
    *row_axes, column_axis = axes_of_matrix
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(row_axes), output_axis=(column_axis,)
    )


# (config, learning rate, weight decay) -> the optimizer, by the value of optimizer.name.
OPTIMIZERS: dict[str, Callable[..., Any]] = {'adamw': adamw, 'muon': muon, 'sgd': sgd}


def linear(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """From 1 to final_fraction on a line."""
    return optax.linear_schedule(1.0, config.final_fraction, decay_steps)


def cosine(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """From 1 to final_fraction on half a period of a cosine."""
    return optax.cosine_decay_schedule(1.0, decay_steps, config.final_fraction)


def wsd(config: OptimizerConfig, decay_steps: int) -> optax.Schedule:
    """Warm-up, stable, decay (Hu et al. 2024): 1, then from 1 to final_fraction on a line.

    The line spans the last optimizer.decay_fraction of all steps, warm-up included. Hu et al. decay
    exponentially; a line goes to final_fraction, which may be 0.
    """
    num_steps = config.warmup_steps + decay_steps
    line_steps = config.wsd_decay_steps(num_steps)
    stable_steps = decay_steps - line_steps
    return optax.linear_schedule(1.0, config.final_fraction, line_steps, stable_steps)


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
    """Returns the fraction of the peak learning rate as a function of the step, counted from 0.

    In a warm-up of W steps, step s has the fraction (s + 1) / (W + 1), so that no step has a rate
    of zero: with W = 3 the fractions are 1/4, 1/2, 3/4 and then 1. Then the decay begins, and
    reaches final_fraction after the last step. Two schedules
    ignore final_fraction: 'constant' is 1, and 'inverse_sqrt' is sqrt(W / s) at step s.
    """
    warmup = config.warmup_steps
    make_decay = _schedule_function(config)
    decay = make_decay(config, num_steps - warmup)
    if not warmup:
        return decay
    rise = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    # `decay` counts its steps from the end of the warm-up.
    return optax.join_schedules([rise, decay], [warmup])


def _optimizer_function(config: OptimizerConfig) -> Callable[..., Any]:
    """Returns the function that config.name names. Raises ConfigError if it names no optimizer."""
    return _function_named(config.name, 'name', OPTIMIZERS, ('learning_rate', 'weight_decay'))


def _schedule_function(config: OptimizerConfig) -> Callable[..., Any]:
    """Returns the function that config.schedule names. Raises ConfigError if it is no schedule."""
    return _function_named(config.schedule, 'schedule', SCHEDULES, ('decay_steps',))


def _function_named(
    text: str, field: str, registry: Mapping[str, Any], arguments: tuple[str, ...]
) -> Callable[..., Any]:
    """Returns the function that a setting names, with its options filled in.

    For example, 'module:name(a=1)' gives functools.partial(name, a=1).

    Args:
        text: The value of the setting: a registered name such as 'muon', or an import path.
        field: The name of the setting in OptimizerConfig, for error messages.
        registry: The registered functions by name.
        arguments: The names of the positional arguments that the function has to take after a
            config, such as ('decay_steps',).

    Raises:
        ConfigError: There is no such function, or it takes other arguments.
    """
    function, options = resolve(
        text,
        registry,
        f'optimizer.{field}',
        needs=f'a function (config, {", ".join(arguments)}, *, options)',
        is_valid=accepts_arguments('config', *arguments),
    )
    return functools.partial(function, **options)


def check_optimizer(config: OptimizerConfig, num_steps: int) -> None:
    """Raises ConfigError if the optimizer or the schedule is unknown or does not work.

    An optimizer or schedule from outside the package, which the setting names by an import path
    such as 'module:name', is called once. The optimizer has to return a GradientTransformation. The
    schedule has to end at final_fraction after `num_steps`.
    """
    make_optimizer = _optimizer_function(config)
    make_decay = _schedule_function(config)
    if ':' in config.name:  # an import path
        transform = call_with_config_errors(
            'optimizer.name', config.name, lambda: make_optimizer(config, 1e-3, 0.0)
        )
        if not isinstance(transform, Transformation):
            raise ConfigError(
                f'optimizer.name={config.name!r} must return an optax.GradientTransformation, '
                f'not {transform!r}'
            )
    decay_steps = num_steps - config.warmup_steps
    if ':' in config.schedule and decay_steps > 0:

        def fraction_at_end() -> float:
            decay = make_decay(config, decay_steps)
            return float(decay(decay_steps))

        end = call_with_config_errors('optimizer.schedule', config.schedule, fraction_at_end)
        # Reports tell from final_fraction whether the learning rate decays to the end of a run, so
        # it has to be true.
        if not math.isclose(end, config.final_fraction, abs_tol=1e-3):
            raise ConfigError(
                f'optimizer.final_fraction={config.final_fraction} must be {end:.4g}, where '
                f'optimizer.schedule={config.schedule!r} ends'
            )

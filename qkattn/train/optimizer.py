"""Optimizers by name, with learning rate and weight decay as arrays.

An optimizer is one function and one line in OPTIMIZERS, or a function named by import path; options
in the name are its keyword-only arguments.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from qkattn.config import OptimizerConfig
from qkattn.config.calls import called, resolve, takes
from qkattn.errors import ConfigError
from qkattn.train.muon import muon
from qkattn.train.parameter_names import decayed
from qkattn.train.schedules import decay_of


def optimizer(
    config: OptimizerConfig,
    learning_rate: jax.Array,
    weight_decay: jax.Array,
    fraction: jax.Array | float = 1.0,
) -> optax.GradientTransformation:
    """Clips by global norm, then takes a step along u, which config.name determines.

    p <- p - fraction (learning_rate u + weight_decay p) with config.decay = 'independent',
    p <- p - fraction learning_rate (u + weight_decay p) with 'coupled'.

    The state depends on none of the numbers, and all may be traced: built anew in each step, one
    compiled program serves all trials and all points of the schedule.

    Args:
      learning_rate: the peak.
      fraction: of the peak, at this step.
    """
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(jnp.float32(config.clip_norm))
    rate, named = learning_rate * fraction, _named(config)
    if config.decay == 'coupled':
        return optax.chain(clip, named(config, rate, weight_decay))
    decay = optax.add_decayed_weights(-fraction * weight_decay, mask=decayed)
    return optax.chain(clip, named(config, rate, 0.0), decay)


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


def _named(config: OptimizerConfig) -> Callable[..., optax.GradientTransformation]:
    found, options = resolve(
        config.name,
        OPTIMIZERS,
        'optimizer.name',
        needs='a function (config, learning_rate, weight_decay, *, options)',
        fits=takes('config', 'learning_rate', 'weight_decay'),
    )
    return functools.partial(found, **options)


def check_optimizer(config: OptimizerConfig, num_steps: int) -> None:
    """Raises ConfigError for an optimizer or schedule that is unknown or not what it has to be.

    A schedule from outside has to end at the final_fraction that decides whether a run anneals.
    """
    named, decay = _named(config), decay_of(config)
    if ':' in config.name:
        made = called('optimizer.name', config.name, lambda: named(config, 1e-3, 0.0))
        if not isinstance(made, optax.GradientTransformation):
            raise ConfigError(
                f'optimizer.name={config.name!r} must return an optax.GradientTransformation, '
                f'not {made!r}'
            )
    if ':' in config.schedule:
        steps = num_steps - config.warmup_steps
        end = called(
            'optimizer.schedule', config.schedule, lambda: float(decay(config, steps)(steps))
        )
        if not math.isclose(end, config.final_fraction, abs_tol=1e-3):
            raise ConfigError(
                f'optimizer.final_fraction={config.final_fraction} must be {end:.4g}, where '
                f'optimizer.schedule={config.schedule!r} ends'
            )

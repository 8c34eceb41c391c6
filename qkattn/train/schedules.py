"""Schedules of the learning rate by name: one function and one line in SCHEDULES each.

One from outside is named by import path; options in the name are its keyword-only arguments.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import optax

from qkattn.config import OptimizerConfig
from qkattn.config.calls import resolve, takes


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


def decay_of(config: OptimizerConfig) -> Callable[[OptimizerConfig, int], optax.Schedule]:
    """The function that `config.schedule` names; ConfigError where it names none."""
    found, options = resolve(
        config.schedule,
        SCHEDULES,
        'optimizer.schedule',
        needs='a function (config, decay_steps, *, options)',
        fits=takes('config', 'decay_steps'),
    )
    return functools.partial(found, **options)


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Fraction of the peak learning rate at step 0, 1, ..., num_steps - 1.

    Step s < W of the warm-up has (s + 1) / (W + 1), so that no step is wasted at zero; the decay
    reaches final_fraction after the last step, except 'inverse_sqrt', which is sqrt(W / s).
    """
    warmup = config.warmup_steps
    decay = decay_of(config)(config, num_steps - warmup)
    if not warmup:
        return decay
    rise = optax.schedules.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.schedules.join_schedules([rise, decay], [warmup])

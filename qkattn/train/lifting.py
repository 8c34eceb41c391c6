"""From one trial to a stack: a function of a trial applied over the leading axis X."""

import operator
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

LIFTINGS = {'map': 'one after another', 'vmap': 'side by side'}


def lift(one: Callable, lifting: str, mesh: Mesh) -> Callable:
    """`one` over the leading axis X of all its arguments; no trial reads another.

    'vmap' computes the trials side by side, 'map' one after another on each slice of the mesh's
    trial axis. A single trial is computed without either.
    """
    slices = mesh.shape['trial']
    side_by_side = jax.vmap(one, spmd_axis_name='trial')

    def lifted(*stacked: Any) -> Any:
        if len(jax.tree.leaves(stacked)[0]) == 1:
            alone = one(*jax.tree.map(operator.itemgetter(0), stacked))
            return jax.tree.map(lambda a: a[None], alone)
        if lifting == 'vmap':
            return side_by_side(*stacked)
        if slices == 1:
            return jax.lax.map(lambda turn: one(*turn), stacked)
        # Slice i of the mesh holds X / slices trials in a row; a turn takes one of each slice.
        turns = jax.tree.map(
            lambda a: jnp.swapaxes(a.reshape(slices, -1, *a.shape[1:]), 0, 1), stacked
        )
        done = jax.lax.map(lambda turn: side_by_side(*turn), turns)
        return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:]), done)

    return lifted


def seconds_per_dispatch(steps: Callable, inputs: Callable[[], tuple]) -> float:
    """The faster of two timed calls of `steps`.

    Args:
      steps: (state, *others) -> (state, metrics).
      inputs: makes the arguments of the first call.
    """
    state, *others = jax.block_until_ready(inputs())
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        state, metrics = steps(state, *others)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measured_text(seconds: Mapping[str, float]) -> str:
    """The measured seconds per step by lifting, the fastest first, in a sentence."""
    kinds = sorted(seconds, key=lambda kind: seconds[kind])
    parts = [f'{LIFTINGS[kind]} ({kind}): {seconds[kind]:.3g} s per step' for kind in kinds]
    return f'trials are trained {"; ".join(parts)}'

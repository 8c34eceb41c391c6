"""What a contestant times, and the works that there are by name."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Work:
    """Something to time, compiled.

    Attributes:
      run: does its work `calls` times, and returns once all results are there.
      steps: steps (or tokens, rows, ...) of one call; times are given per step.
      extra: facts for the row: 'parameters', 'compile_seconds', ...
    """

    run: Callable[[int], object]
    steps: float = 1
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


# The function that builds a work from keyword arguments of JSON values. It is imported in the
# contestant's process alone: torch and jax share none.
WORKS = {
    'qkattn': 'qkattn.benchmark.peers.own:train',
    'functional': 'qkattn.benchmark.peers.jax_gpt:train',
    'torch': 'qkattn.benchmark.peers.torch_gpt:train',
    'part': 'qkattn.benchmark.peers.parts:part',
    'jax_product': 'qkattn.benchmark.peers.ceilings:product',
    'torch_product': 'qkattn.benchmark.peers.torch_gpt:product',
    'jax_copy': 'qkattn.benchmark.peers.ceilings:copy',
}

"""A worker that a crew has started: measures a way to use the machine, then trains.

python -m qkattn.study.member, whose parent is a `crew`.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from qkattn.config import Config
from qkattn.errors import ConfigError
from qkattn.run import children, cli, signals
from qkattn.run.progress import Progress
from qkattn.study import worker
from qkattn.train import program
from qkattn.train.placement import constant_batch, require_memory
from qkattn.train.program_cache import keep_programs

_TOLD_EVERY = 0.5  # seconds


class _Candidate:
    """The program of a run on constant rows, which can be timed."""

    def __init__(self, config: Config):
        require_memory(config)
        self._program = program.build(config)
        self._steps = config.train.steps_per_dispatch
        self._batch = constant_batch(config, self._program.mesh)
        # Ones: drawing the parameters would have to be compiled.
        self._state = jax.tree.map(
            lambda a: jax.device_put(np.ones(a.shape, a.dtype), a.sharding),
            self._program.abstract_state,
        )

    def seconds_per_step(self, at_least: float) -> float:
        """The mean over dispatches that take `at_least` seconds together."""
        start, steps = time.perf_counter(), 0
        while steps == 0 or time.perf_counter() - start < at_least:
            self._state, metrics = self._program.train(self._state, self._batch)
            jax.block_until_ready((self._state, metrics))
            steps += self._steps
        return (time.perf_counter() - start) / steps


def work(pipe: Connection) -> None:
    """Follows the orders of the parent until the study has its results.

        ('prepare', config)  -> ('ready', peak memory in bytes, 0.0)
        ('time', seconds)    -> ('ready', peak memory in bytes, seconds per step)
        ('train', study, workdir, options of `worker.run`)
                             -> ('lease', ...), ('step', step, total, peak), ...

    An error that has a sentence is told as ('error', sentence), and is the exit code.
    """
    Progress.told = _telling(pipe)
    try:
        candidate: _Candidate | None = None
        while (order := pipe.recv())[0] != 'train':
            seconds = 0.0
            if order[0] == 'prepare':
                candidate = _Candidate(order[1])
            elif candidate is not None:
                seconds = candidate.seconds_per_step(order[1])
            pipe.send(('ready', _peak(), seconds))
        candidate = None
        _, study, workdir, options = order
        worker.run(study, workdir, tell=_sending(pipe), **options)
    except Exception as error:
        if (expected := cli.outcome(error)) is None:
            raise
        _sending(pipe)('error', expected[0])
        sys.exit(expected[1])


def _sending(pipe: Connection) -> Callable[..., None]:
    def send(*news: Any) -> None:
        with contextlib.suppress(OSError):  # the parent was killed
            pipe.send(news)

    return send


def _telling(pipe: Connection) -> Callable[[int, int], None]:
    send, told = _sending(pipe), -_TOLD_EVERY

    def tell(step: int, total: int) -> None:
        nonlocal told
        if step == total or time.monotonic() - told >= _TOLD_EVERY:
            told = time.monotonic()
            send('step', step, total, _peak())

    return tell


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    unit = 1 if sys.platform == 'darwin' else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@signals.leaving_at_once()
def main() -> None:
    keep_programs()
    if (pipe := children.parent()) is None:
        raise ConfigError('qkattn.study.member is started by ablate --workers')
    work(pipe)


if __name__ == '__main__':
    cli.run(main)

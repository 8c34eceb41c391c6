"""Where the time of training goes: seconds of a run, and a profiler's trace of some steps."""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from qkattn.jobs import agreement

T = TypeVar('T')

PARTS = ('input_seconds', 'logging_seconds')  # of train_seconds, without waiting for steps
# Dispatches of a start before a trace begins, and those that are traced.
SKIPPED = 2
TRACED = 3

log = logging.getLogger(__name__)


class Clock:
    """Seconds of steps and their PARTS, over all starts; tokens per second are of this one."""

    def __init__(self, record: Mapping[str, Any]):
        self.seconds = {name: record[name] for name in ('train_seconds', *PARTS)}
        self.tokens_per_second: float | None = None
        self._before = self.seconds['train_seconds']
        self._since = 0.0
        self._tokens = 0

    def start(self) -> None:
        """The next dispatch is the first, or the first after a pause."""
        self._since = time.perf_counter()

    def pause(self, tokens: int) -> None:
        """The steps since `start` have ended; `tokens` were trained in them."""
        self.seconds['train_seconds'] += time.perf_counter() - self._since
        self._tokens += tokens
        self.tokens_per_second = self._tokens / (self.seconds['train_seconds'] - self._before)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A block that counts as one of PARTS."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def inputs(self, items: Iterable[T]) -> Iterator[T]:
        """Yields `items`; waiting for them is a part."""
        iterator = iter(items)
        while True:
            with self.part('input_seconds'):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


def traced(directory: Path | None, batches: Iterable[T], state: Callable[[], Any]) -> Generator[T]:
    """Yields the batch of each dispatch; traces the third to fifth of a start, in process 0.

    `state` is what the dispatches before it compute.
    """
    if directory is None or not agreement.owner():
        yield from batches
        return
    number = -1
    with contextlib.ExitStack() as tracing:
        for number, batch in enumerate(batches):
            if number in (SKIPPED, SKIPPED + TRACED):
                jax.block_until_ready(state())
                tracing.close()
            if number == SKIPPED:
                jax.profiler.start_trace(directory, create_perfetto_trace=True)
                tracing.callback(_stop, directory)
            yield batch
    if number < SKIPPED:
        log.warning(
            'no trace written to %s: it begins at dispatch %s of a start, and this one had %s',
            *(directory, SKIPPED + 1, number + 1),
        )


def _stop(directory: Path) -> None:
    jax.profiler.stop_trace()
    log.info('trace written to %s; open it with xprof or https://ui.perfetto.dev', directory)

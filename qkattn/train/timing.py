"""Where the time of training goes: seconds of a run, and a profiler's trace of some steps."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from qkattn.errors import ConfigError
from qkattn.jobs import agreement
from qkattn.storage import buckets

T = TypeVar('T')

PARTS = ('input_seconds', 'logging_seconds')  # of train_seconds, without waiting for steps
SKIPPED, TRACED = 2, 3  # dispatches of a start before the trace, and of it

log = logging.getLogger(__name__)


class Clock:
    """Seconds of steps and their PARTS, over all starts; tokens per second are of this one."""

    def __init__(self, record: Mapping[str, Any]):
        self.seconds = {name: record[name] for name in ('train_seconds', *PARTS)}
        self.tokens_per_second: float | None = None
        self._before, self._since, self._tokens = self.seconds['train_seconds'], 0.0, 0

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


class Trace:
    """Traces three dispatches after the first two of a start, in process 0."""

    def __init__(self, directory: str | None):
        """Takes --profile; raises ConfigError for a directory that cannot be written."""
        self._directory, self._dispatches, self._begun = directory, 0, False
        if directory is None:
            return
        if buckets.is_url(directory):
            raise ConfigError(f'--profile={directory} must be a directory on a file system')
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise ConfigError(f'--profile={directory} cannot be used ({error.strerror})') from error

    def dispatching(self, state: Any) -> None:
        """Starts or ends the trace between two dispatches."""
        self._dispatches += 1
        if self._directory is None or not agreement.owner():
            return
        if self._dispatches == SKIPPED + 1:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._begun = True
        elif self._dispatches == SKIPPED + TRACED + 1:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Writes the trace, if one has begun."""
        if self._begun:
            self._begun = False
            jax.profiler.stop_trace()
            log.info('traced: see %s by xprof or https://ui.perfetto.dev', self._directory)

"""Where the time of training goes: parts of it on a clock, and a profiler's trace of some steps."""

import concurrent.futures
import contextlib
import logging
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from qkattn.config import TrainConfig
from qkattn.errors import ConfigError
from qkattn.jobs import agreement
from qkattn.storage import buckets

T = TypeVar('T')

PARTS = ('input_seconds', 'gap_seconds', 'logging_seconds')
"""Of TIMES: parts of `train_seconds` in which the loop does other things than wait for steps."""

SKIPPED, TRACED = 2, 3
"""Dispatches of a start before the trace, and of it, where no steps are named."""

log = logging.getLogger(__name__)


class Clock:
    """Seconds of training steps, over all starts of a run.

    Attributes:
      seconds: `train_seconds`, and its PARTS.
      tokens_per_second: of this start; None before its first step.
    """

    def __init__(self, record: Mapping[str, Any]):
        """Continues from the seconds in a checkpoint's record."""
        self.seconds = {name: record[name] for name in ('train_seconds', *PARTS)}
        self.tokens_per_second: float | None = None
        self._before, self._since, self._tokens = self.seconds['train_seconds'], 0.0, 0
        self._watch = concurrent.futures.ThreadPoolExecutor(1, 'clock')
        self._ended: concurrent.futures.Future[float] | None = None
        self.close = self._watch.shutdown

    def start(self) -> None:
        """The next dispatch is the first, or the first after a pause."""
        self._since, self._ended = time.perf_counter(), None

    def pause(self, tokens: int) -> None:
        """The steps since `start` have ended; `tokens` were trained in them."""
        self.seconds['train_seconds'] += time.perf_counter() - self._since
        self._tokens += tokens
        self.tokens_per_second = self._tokens / (self.seconds['train_seconds'] - self._before)

    def dispatching(self) -> None:
        """The next dispatch goes to the devices, which may have been without work."""
        if self._ended is not None and self._ended.done():
            self.seconds['gap_seconds'] += time.perf_counter() - self._ended.result()

    def dispatched(self, outputs: Any) -> None:
        """`outputs` are those of the dispatch."""

        def end() -> float:
            jax.block_until_ready(outputs)
            return time.perf_counter()

        self._ended = self._watch.submit(end)

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
        iterator, end = iter(items), object()
        while True:
            with self.part('input_seconds'):
                item: Any = next(iterator, end)
            if item is end:
                return
            yield item


class Trace:
    """Traces the dispatches of the chosen steps, in process 0; none without a directory."""

    def __init__(self, directory: str | None, steps: str | None, train: TrainConfig):
        """Takes --profile, and --profile_steps: 'FIRST:LAST', counted from 1, both included.

        Raises:
          ConfigError: steps without a directory, of another form or beyond the run; a directory
            that cannot be written, or is in a bucket.
        """
        self._directory, self._train, self._begun = directory, train, False
        self._steps: range | None = None  # that are traced
        if steps is not None:
            parts = re.fullmatch(r'(\d+):(\d+)', steps)
            if not parts or not 1 <= int(parts[1]) <= int(parts[2]) <= train.num_steps:
                valid = f'FIRST:LAST with 1 <= FIRST <= LAST <= {train.num_steps}'
                raise ConfigError(f'--profile_steps={steps} must be {valid}')
            if directory is None:
                raise ConfigError(f'--profile_steps={steps} needs --profile=DIRECTORY')
            self._steps = range(int(parts[1]) - 1, int(parts[2]))
        if buckets.is_url(directory or ''):
            raise ConfigError(f'--profile={directory} must be a directory on a file system')
        if directory is not None:
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=directory).close()
            except OSError as error:
                reason = error.strerror
                raise ConfigError(f'--profile={directory} cannot be used ({reason})') from error

    def at(self, step: int, state: Any) -> None:
        """Starts or ends the trace between two dispatches, after `step` steps."""
        if self._directory is None or not agreement.owner():
            return
        each = self._train.steps_per_dispatch
        if self._steps is None:
            first = max(step, min(step + SKIPPED * each, self._train.num_steps - each))
            self._steps = range(first, first + TRACED * each)
        inside = step < self._steps.stop and step + each > self._steps.start
        if inside != self._begun:
            jax.block_until_ready(state)
            if inside:
                jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
                self._begun = True
            else:
                self.close()

    def close(self) -> None:
        """Writes the trace, if one has begun."""
        if self._begun:
            self._begun = False
            jax.profiler.stop_trace()
            log.info('traced: see %s by xprof or https://ui.perfetto.dev', self._directory)

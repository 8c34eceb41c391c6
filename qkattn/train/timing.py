"""The time that training takes, and a profiler trace of some steps."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from qkattn.jobs import agreement
from qkattn.storage.files import join_without_links, make_directory

T = TypeVar('T')

# Parts of train_seconds: the time for waiting for batches, and for writing metrics.
PARTS = ('input_seconds', 'logging_seconds')
# The number of dispatches before the trace begins.
SKIPPED = 2
# The number of dispatches that are traced.
TRACED = 3

log = logging.getLogger(__name__)


class Lap(NamedTuple):
    """The speed of training between two readings of a clock, without pauses."""

    steps_per_second: float
    # The fraction of the time that training waited for batches.
    input_wait_fraction: float


class Clock:
    """Measures the time and the speed of training.

    A run that is interrupted and resumed has several starts.

    Attributes:
        seconds: 'train_seconds' and its PARTS, summed over all starts.
        tokens_per_second: The mean speed of this start; None before the first pause.
    """

    def __init__(self, record: Mapping[str, Any], step: int = 0):
        """Continues from the times in a checkpoint.

        Args:
            record: The record of the checkpoint, with 'train_seconds', 'input_seconds' and
                'logging_seconds'. Missing times are 0.
            step: The number of completed steps.
        """
        names = ('train_seconds', *PARTS)  # PARTS are 'input_seconds' and 'logging_seconds'
        self.seconds: dict[str, float] = {name: record.get(name, 0.0) for name in names}
        self.tokens_per_second: float | None = None
        # The training time before the run was resumed.
        self._earlier_train_seconds = self.seconds['train_seconds']
        # None in a pause.
        self._start_time: float | None = None
        # The number of tokens trained since the run was resumed.
        self._tokens = 0
        # The values at the last call of `lap`.
        self._lap_step = step
        self._lap_train_seconds = self.seconds['train_seconds']
        self._lap_input_seconds = self.seconds['input_seconds']

    def start(self) -> None:
        """Starts the clock, or continues it after a pause."""
        self._start_time = time.perf_counter()

    def pause(self, tokens: int) -> None:
        """Pauses the clock; `tokens` is the number of tokens trained since `start`."""
        self.seconds['train_seconds'] = self._train_seconds()
        self._start_time = None
        self._tokens += tokens
        seconds_since_resuming = self.seconds['train_seconds'] - self._earlier_train_seconds
        self.tokens_per_second = self._tokens / seconds_since_resuming

    def lap(self, step: int) -> Lap:
        """Returns the speed since the last call, or since this start began.

        `step` is the number of completed steps.
        """
        train_seconds = self._train_seconds()
        input_seconds = self.seconds['input_seconds']
        elapsed = train_seconds - self._lap_train_seconds
        elapsed_input = input_seconds - self._lap_input_seconds
        lap = Lap(
            steps_per_second=(step - self._lap_step) / elapsed,
            input_wait_fraction=elapsed_input / elapsed,
        )
        self._lap_step = step
        self._lap_train_seconds = train_seconds
        self._lap_input_seconds = input_seconds
        return lap

    def _train_seconds(self) -> float:
        """Returns the seconds of training up to this moment, summed over all starts."""
        if self._start_time is None:
            return self.seconds['train_seconds']
        return self.seconds['train_seconds'] + (time.perf_counter() - self._start_time)

    @contextlib.contextmanager
    def counted_as(self, name: str) -> Iterator[None]:
        """Adds the time of a `with` block to `name`, one of PARTS."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def inputs(self, items: Iterator[T]) -> Iterator[T]:
        """Yields `items`, and adds the time of waiting for them to 'input_seconds'."""
        while True:
            with self.counted_as('input_seconds'):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


def trace_directory(profile: str) -> Path:
    """Makes the directory of traces; raises RunDirectoryError if it cannot be written to."""
    directory = make_directory(profile, name='profile')
    # Raises if plugins/profile, where the profiler writes, is a link.
    join_without_links(directory, 'plugins', 'profile')
    return directory


class Trace:
    """A profiler trace of a few dispatches in process 0.

        with Trace(directory) as trace:
            for batch in batches:
                trace.before_dispatch(state)
                state = dispatch(state, batch)

    The first SKIPPED dispatches are not traced, and the next TRACED are. With a directory of None,
    nothing is traced.
    """

    def __init__(self, directory: Path | None):
        self._directory = directory if agreement.is_process_0() else None
        self._num_dispatches = 0
        self._is_tracing = False

    def before_dispatch(self, state: Any) -> None:
        """Begins or ends the trace if it is time; must be called before every dispatch.

        `state` is the result of the last dispatch.
        """
        if self._directory is None:
            return
        is_first_of_trace = self._num_dispatches == SKIPPED
        is_first_after_trace = self._num_dispatches == SKIPPED + TRACED
        if is_first_of_trace or is_first_after_trace:
            jax.block_until_ready(state)  # so that no dispatch is traced in part
        if is_first_of_trace:
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._is_tracing = True
        if is_first_after_trace:
            self._end()
        self._num_dispatches += 1

    def _end(self) -> None:
        """Ends the trace and logs its directory."""
        self._is_tracing = False
        jax.profiler.stop_trace()
        log.info(
            'trace written to %s; open it with xprof or https://ui.perfetto.dev', self._directory
        )

    def __enter__(self) -> 'Trace':
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Ends the trace if it is in progress; warns if there were too few dispatches for it."""
        if self._is_tracing:
            self._end()
        is_requested = self._directory is not None
        was_begun = self._num_dispatches > SKIPPED
        if is_requested and not was_begun and error_type is None:
            log.warning(
                'no trace written to %s: it begins at dispatch %s of a start, and this one had %s',
                self._directory,
                SKIPPED + 1,
                self._num_dispatches,
            )

"""The time of training: seconds of a run by part, and a profiler's trace of some steps."""

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

# Parts of train_seconds: waiting for batches, and writing metrics. The steps take the rest.
PARTS = ('input_seconds', 'logging_seconds')
# The number of dispatches that a start makes before the trace begins.
SKIPPED = 2
# The number of dispatches that are traced.
TRACED = 3

log = logging.getLogger(__name__)


class Lap(NamedTuple):
    """How training went between two readings of a clock; pauses do not count."""

    steps_per_second: float
    # Fraction of the time that was a wait for batches.
    input_wait_fraction: float


class Clock:
    """Counts the seconds of training and their PARTS over all starts of a run.

    It also measures the tokens per second of this start, and how training goes between records.
    """

    def __init__(self, record: Mapping[str, Any], step: int = 0):
        """Continues from the seconds in the `record` of a checkpoint after `step` steps.

        The seconds are 0 if the record lacks them, as before the first step.
        """
        names = ('train_seconds', *PARTS)
        self.seconds: dict[str, float] = {name: record.get(name, 0.0) for name in names}
        self.tokens_per_second: float | None = None
        self._seconds_of_earlier_starts = self.seconds['train_seconds']
        # When training began, or continued after a pause; None in a pause.
        self._start_time: float | None = None
        # Tokens that were trained in this start.
        self._tokens = 0
        # `lap` returns differences to these numbers: steps, seconds of training, and seconds of
        # waits for batches at its last call.
        self._lap_step = step
        self._lap_train_seconds = self.seconds['train_seconds']
        self._lap_input_seconds = self.seconds['input_seconds']

    def start(self) -> None:
        """Starts the clock, when training begins or continues after a pause."""
        self._start_time = time.perf_counter()

    def pause(self, tokens: int) -> None:
        """Stops the clock; `tokens` is the number of tokens trained since `start`."""
        self.seconds['train_seconds'] = self._train_seconds()
        self._start_time = None
        self._tokens += tokens
        seconds_of_start = self.seconds['train_seconds'] - self._seconds_of_earlier_starts
        self.tokens_per_second = self._tokens / seconds_of_start

    def lap(self, step: int) -> Lap:
        """Returns the speed since the last call, or since training began.

        `step` is the number of steps that are done.
        """
        train_seconds = self._train_seconds()
        input_seconds = self.seconds['input_seconds']
        elapsed = train_seconds - self._lap_train_seconds
        lap = Lap(
            steps_per_second=(step - self._lap_step) / elapsed,
            input_wait_fraction=(input_seconds - self._lap_input_seconds) / elapsed,
        )
        self._lap_step = step
        self._lap_train_seconds = train_seconds
        self._lap_input_seconds = input_seconds
        return lap

    def _train_seconds(self) -> float:
        """Returns the seconds of training over all starts, up to this moment."""
        if self._start_time is None:
            return self.seconds['train_seconds']
        return self.seconds['train_seconds'] + (time.perf_counter() - self._start_time)

    @contextlib.contextmanager
    def counted_as(self, name: str) -> Iterator[None]:
        """Adds the time of a `with` block to one of PARTS, such as 'logging_seconds'."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def inputs(self, items: Iterator[T]) -> Iterator[T]:
        """Yields `items`, and adds the time that they take to 'input_seconds'."""
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
    # The profiler writes into plugins/profile. `join_without_links` raises if that
    # is a link.
    join_without_links(directory, 'plugins', 'profile')
    return directory


class Trace:
    """A profiler's trace of TRACED dispatches of a start, after SKIPPED ones, in process 0.

        with Trace(directory) as trace:
            for batch in batches:
                trace.before_dispatch(state)
                state = dispatch(state, batch)

    If the directory is None, nothing is traced.
    """

    def __init__(self, directory: Path | None):
        self._directory = directory if agreement.is_process_0() else None
        self._num_dispatches = 0
        self._is_tracing = False

    def before_dispatch(self, state: Any) -> None:
        """Begins or ends the trace, if it is time; call it before every dispatch.

        With SKIPPED = 2 and TRACED = 3, the trace has the dispatches 3, 4 and 5: it begins before
        dispatch 3 and ends before dispatch 6. Both moments wait for `state`, the result of the
        dispatches so far, so that none of them is traced in part.
        """
        if self._directory is None:
            return
        num_done = self._num_dispatches
        if num_done == SKIPPED:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._is_tracing = True
        if num_done == SKIPPED + TRACED:
            jax.block_until_ready(state)
            self._end()
        self._num_dispatches += 1

    def _end(self) -> None:
        """Ends the trace, and logs where it is."""
        self._is_tracing = False
        jax.profiler.stop_trace()
        log.info(
            'trace written to %s; open it with xprof or https://ui.perfetto.dev', self._directory
        )

    def __enter__(self) -> 'Trace':
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Ends the trace if it is still in progress, at the end of the `with` block.

        Logs a warning if a trace was requested, and the block ended without an error before
        dispatch SKIPPED + 1, with which the trace begins.
        """
        if self._is_tracing:
            self._end()
        is_requested = self._directory is not None
        has_begun = self._num_dispatches > SKIPPED
        if is_requested and not has_begun and error_type is None:
            log.warning(
                'no trace written to %s: it begins at dispatch %s of a start, and this one had %s',
                self._directory,
                SKIPPED + 1,
                self._num_dispatches,
            )

"""Where the time of training goes: steps, and what keeps devices from the next one."""

import concurrent.futures
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax

T = TypeVar('T')

PARTS = ('input_seconds', 'gap_seconds', 'logging_seconds')
"""Of TIMES: parts of `train_seconds` in which the loop does other things than wait for steps."""


class Clock:
    """Seconds of training steps, over all starts of a run.

    Attributes:
      seconds: `train_seconds`, and its PARTS.
      tokens_per_second: of this start.
    """

    def __init__(self, record: Mapping[str, Any]):
        """Continues from the seconds in a checkpoint's record."""
        self.seconds = {name: record[name] for name in ('train_seconds', *PARTS)}
        self._tokens, self._since = 0, time.perf_counter()
        self._before = self.seconds['train_seconds']
        self._watch = concurrent.futures.ThreadPoolExecutor(1, 'clock')
        self._ended: concurrent.futures.Future[float] | None = None

    def start(self) -> None:
        """The next dispatch is the first, or the first after a pause."""
        self._since, self._ended = time.perf_counter(), None

    def pause(self, tokens: int) -> None:
        """The steps since `start` have ended; `tokens` were trained in them."""
        self.seconds['train_seconds'] += time.perf_counter() - self._since
        self._tokens += tokens

    def dispatching(self) -> None:
        """The next dispatch goes to the devices, which may have been without work."""
        if self._ended is not None and self._ended.done():
            self.seconds['gap_seconds'] += time.perf_counter() - self._ended.result()

    def dispatched(self, outputs: Any) -> None:
        """`outputs` are those of the dispatch."""
        self._ended = self._watch.submit(_end_of, outputs)

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

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.seconds['train_seconds'] - self._before
        return self._tokens / seconds if seconds else None

    def close(self) -> None:
        self._watch.shutdown()


def _end_of(outputs: Any) -> float:
    """The time at which a dispatch has ended."""
    jax.block_until_ready(outputs)
    return time.perf_counter()

"""How much of a study several workers have done, and how long the rest of it takes."""

import dataclasses

import tqdm

_duration = tqdm.tqdm.format_interval


@dataclasses.dataclass
class _Run:
    """The run that a worker trains: its work, the fractions done at first and last report."""

    run: str
    work: float
    first: float | None = None
    done: float = 0.0


class Tally:
    """Adds up what workers report: runs, and work (tokens x parameters) done and left."""

    def __init__(self) -> None:
        self._runs = 0
        self._left: dict[str, float] = {}
        self._training: dict[int, _Run] = {}
        self._done = 0.0  # of runs that are over
        self._since: float | None = None
        self._said = -1

    def leased(self, worker: int, run: str | None, runs: int, left: dict[str, float]) -> None:
        """A worker begins a run, or waits (None); `left` is the work of all runs without result."""
        self.ended(worker)
        self._runs, self._left = runs, left
        if run is not None:
            self._training[worker] = _Run(run, left[run])

    def stepped(self, worker: int, fraction: float, now: float) -> None:
        """A worker has done this fraction of its run at a time in seconds."""
        self._since = now if self._since is None else self._since
        if (training := self._training.get(worker)) is not None:
            training.first = fraction if training.first is None else training.first
            training.done = fraction

    def ended(self, worker: int) -> None:
        """A worker does not train its run any more."""
        if (training := self._training.pop(worker, None)) is not None:
            self._done += training.work * (training.done - (training.first or 0.0))

    def seconds_left(self, now: float) -> float | None:
        """At the speed since the first report; None before there is one."""
        trained = [(of, of.work * (of.done - (of.first or 0.0))) for of in self._training.values()]
        done = self._done + sum(work for _, work in trained)
        if self._since is None or now <= self._since or done <= 0:
            return None
        left = sum(self._left.values()) - sum(
            of.work * of.done for of, _ in trained if of.run in self._left
        )
        return max(0.0, left) * (now - self._since) / done

    def text(self, now: float) -> str:
        """'3 of 8 runs done, 02:10 left'; '' before anything is known."""
        if not self._runs:
            return ''
        seconds, done = self.seconds_left(now), self._runs - len(self._left)
        left = '' if seconds is None or not self._left else f', {_duration(seconds)} left'
        return f'{done} of {self._runs} runs done{left}'

    def changed(self) -> bool:
        """Whether another number of runs is done than at the last call."""
        before, self._said = self._said, self._runs - len(self._left)
        return self._said != before

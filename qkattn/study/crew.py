"""The workers of a study on one machine: how many, where each runs, and what becomes of them.

The parent trains nothing. It starts each worker (qkattn/study/member.py) on cores or a GPU of its
own, shows what they do, starts one that crashed again, and ends when the study has its results.
"""

import contextlib
import dataclasses
import math
import multiprocessing.connection
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkattn.config import Config, Study
from qkattn.errors import ConfigError, ProcessError, Stopped
from qkattn.run import cores
from qkattn.run.children import Child
from qkattn.run.crew_display import CrewDisplay
from qkattn.run.files import check_directory, make_directory
from qkattn.run.signals import EXIT_CONFIG, EXIT_REQUEUE, StopRequest
from qkattn.study import declaration, room, ways, worker
from qkattn.study.arms import Arm
from qkattn.study.plan import PlannedRun
from qkattn.study.tally import Tally
from qkattn.train.placement import least_memory

COMMAND = [sys.executable, '-m', 'qkattn.study.member']
RETRIES = 3
"""How often each worker that crashed is started again."""
GRACE = 300.0
"""Seconds from a stop request to a kill."""
_TICK = 0.2
# A way is timed for so many seconds, in turn with the others, so many times unless it is clear.
_TIMED, _ROUNDS = 0.3, 3
# Memory of a worker: bytes of a process, and of training as a multiple of its least.
_PROCESS, _TRAINING = 2**30, 4


def run(
    study: Study,
    match: Callable[[], list[Arm]],
    workdir: str | Path,
    wanted: int | None,
    meanwhile: Callable[[], object] = lambda: None,
    **options: Any,
) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    Args:
      match: makes the arms; called while the workers start.
      wanted: workers; None chooses by a measurement, which is recorded in the study's directory.
      meanwhile: called in a thread once a worker finds nothing more to do, and its cores are free.
      options: of `worker.run`.

    Raises:
      ConfigError, Stopped: as `worker.run`.
      ProcessError: runs are left, because workers crashed.
    """
    path, (largest, _) = check_directory(workdir), room.of_machine(study)
    declaration.require_no_run(path)
    found = ways.recorded(path) if wanted is None else None
    wanted = wanted if found is None else found['processes']
    if largest == 1 or wanted == 1:
        return worker.run(study, path, arms=match(), **options)
    with (
        StopRequest() as stop,
        contextlib.closing(_Crew(study, path, options, stop, meanwhile)) as crew,
    ):
        stop.hold()
        measured = wanted is None and not room.gpus()
        crew.start(
            ways.candidates(largest, largest) if measured else [min(wanted or largest, largest)]
        )
        options['arms'] = arms = match()
        left = worker.left_of(study, arms, path)
        most, note = room.limit(study, arms, wanted, left)
        if found is not None:
            crew.say(f'{ways.count(most, "worker")}, as measured before: {path / ways.NAME}')
        elif note is not None:
            crew.say(note)
        if most > 1:
            crew.train(crew.measure(left, most) if measured else most)
    if most == 1:
        return worker.run(study, path, **options)
    if rest := worker.left_of(study, arms, path):
        runs = '1 run has' if len(rest) == 1 else f'{len(rest)} runs have'
        raise ProcessError(f'{runs} no result: {crew.failure}; the same command resumes')
    return path


@dataclasses.dataclass
class _Member:
    """A worker as its parent sees it."""

    number: int
    share: int  # of its way
    child: Child
    place: tuple[list[int], dict[str, str]]
    answer: float | None = None
    retries: int = 0
    stopping: bool = False


class _Crew:
    """The workers, and what the parent knows of them."""

    def __init__(
        self,
        study: Study,
        path: Path,
        options: dict[str, Any],
        stop: StopRequest,
        meanwhile: Callable[[], object],
    ):
        self._study, self._path, self._options, self._stop = study, path, options, stop
        self._meanwhile = threading.Thread(target=meanwhile, name='meanwhile', daemon=True)
        self._members: list[_Member] = []
        self._ways: dict[int, list[_Member]] = {}
        self._display = CrewDisplay()
        self._tally = Tally()
        self._free = cores.free_memory()
        self._peak = 0
        self._asked: float | None = None  # when the workers were asked to stop
        self._drawn = 0.0
        self.failure = 'no worker is left'
        self._sentences: list[str] = []

    def say(self, text: str) -> None:
        self._display.print(f'{self._study.name}: {text}')

    def start(self, numbers: list[int]) -> None:
        """Starts each number of workers, which share the cores, and the GPUs, and wait for orders.

        Only the workers of one number are to compute at a time.
        """
        gpus = room.gpus() or []
        for number in numbers:
            self._ways[number] = []
            for place, own in enumerate(cores.shares(cores.usable(), number)):
                variables = {}
                if gpus:
                    shares = cores.shares(gpus, number)
                    variables['CUDA_VISIBLE_DEVICES'] = ','.join(shares[place])
                child = Child(COMMAND, own, variables, self._display.columns)
                self._members.append(_Member(len(self._members), place, child, (own, variables)))
                self._ways[number].append(self._members[-1])

    def measure(self, left: list[PlannedRun], most: int) -> int:
        """Times the ways to use the cores, and returns the number of workers of the best."""
        start, number = time.monotonic(), len(cores.usable())
        self._display.status(f'{self._study.name}: measuring how {number} cores are used best')
        wanted = ways.candidates(number, most)
        self._keep([p for p in self._ways if p in wanted])
        self.start([p for p in wanted if p not in self._ways])
        self._prepare([run.config for run in left])
        seconds = dict.fromkeys(self._ways, math.inf)
        for _ in range(_ROUNDS):
            for processes, members in self._ways.items():
                # The first of each way times the same run, and the others work beside it.
                first, *_ = self._ask(members, lambda of: ('time', _TIMED))
                seconds[processes] = min(seconds[processes], first)
            if ways.is_clear(seconds, len(left)):
                break
        best = ways.chosen(seconds, len(left))
        took = time.monotonic() - start
        make_directory(self._path)
        ways.record(self._path, seconds, best, self._peak, took)
        self.say(f'{ways.text(seconds, number, len(left))} ({took:.0f} s)')
        return best

    def _prepare(self, configs: list[Config]) -> None:
        """Has workers compile the runs that they would train first, whose programs are kept."""

        def prepare(members: list[_Member]) -> None:
            self._ask(members, lambda of: ('prepare', configs[of.share % len(configs)]))

        first = [members[0] for members in self._ways.values()]
        others = [of for members in self._ways.values() for of in members[1:]]
        each = _PROCESS + _TRAINING * least_memory(configs[0])
        if (len(first) + len(others)) * each < self._free:
            prepare(first + others)
            return
        # One of each way tells what it takes.
        prepare(first)
        self._ask(first, lambda of: ('time', 0.0))
        while sum(self._ways) > (fit := self._fit()) and len(self._ways) > 1:
            # Goes: the largest that has no room, else one between, else the largest.
            goes = [p for p in self._ways if p > fit] or sorted(self._ways)[1:-1]
            self._keep([p for p in self._ways if p != max(goes or self._ways)])
        prepare([of for of in others if of in self._members])

    def train(self, number: int) -> None:
        """Has this many workers train until the study has its results or none of them is left."""
        self._keep([number] if number in self._ways else list(self._ways))
        self._end(self._members[number:])
        for place, of in enumerate(self._members):
            self._display.remove(of.number)
            of.number = place
            self._train(of)
        while self._members:
            self._turn()
        if self._asked is not None:
            raise Stopped('stopped, and the workers have saved')
        if self._sentences:
            raise ConfigError('; '.join(dict.fromkeys(self._sentences)))

    def close(self) -> None:
        """Kills what is left of the workers."""
        self._end(self._members)
        self._display.close()

    def _train(self, of: _Member) -> None:
        of.child.tell('train', self._study, self._path, self._options)

    def _keep(self, numbers: list[int]) -> None:
        """Ends the workers of the other numbers."""
        for number in set(self._ways) - set(numbers):
            self._end(self._ways.pop(number))

    def _ask(self, members: list[_Member], order: Callable[[_Member], tuple]) -> list[float]:
        """Gives workers their orders at once; their answers."""
        for of in members:
            of.answer = None
            of.child.tell(*order(of))
        while any(of.answer is None for of in members):
            self._turn()
            if self._asked is not None and not self._members:
                raise Stopped('stopped with nothing to save')
            if self._sentences:
                raise ConfigError(self._sentences[0])
            if not set(map(id, members)) <= set(map(id, self._members)):
                raise ProcessError(f'{self.failure} while it was measured')
        return [of.answer for of in members if of.answer is not None]

    def _end(self, members: list[_Member]) -> None:
        for of in list(members):
            of.child.close()
            self._members.remove(of)
            self._display.remove(of.number)

    def _turn(self) -> None:
        """Waits for news for a moment, and acts on it."""
        sources = [source for of in self._members for source in of.child.sources()]
        multiprocessing.connection.wait(sources, _TICK)
        for of in list(self._members):
            ended = of.child.ended()  # before what it has printed last is read
            for news in of.child.news():
                self._hear(of, *news)
            self._display.feed(of.number, of.child.read())
            if ended is not None:
                self._ended(of, ended)
        self._stop_all()
        if time.monotonic() - self._drawn > _TICK:
            self._drawn = time.monotonic()
            self._display.draw()

    def _hear(self, of: _Member, kind: str, *values: Any) -> None:
        if kind == 'error':
            self._sentences.append(values[0])
        elif kind == 'ready':
            peak, of.answer = values
            self._peak = max(self._peak, peak)
        elif kind == 'lease':
            self._tally.leased(of.number, *values)
            if values[0] is None and self._meanwhile.ident is None:
                self._meanwhile.start()
        elif kind == 'step':
            step, total, peak = values
            self._tally.stepped(of.number, step / total, time.monotonic())
            self._require_memory(peak)
        if text := self._tally.text(time.monotonic()):
            self._display.status(f'{self._study.name}: {text}', self._tally.changed())

    def _require_memory(self, peak: int) -> None:
        """Stops the workers for which there is no memory."""
        self._peak = max(self._peak, peak)
        working, fit = [of for of in self._members if not of.stopping], self._fit()
        if len(working) > fit:
            each, free = self._peak / 2**30, self._free / 2**30
            self.say(
                f'{len(working)} workers of {each:.1f} GiB each need more than the {free:.1f} GiB '
                f'that are free, so {fit} will do'
            )
            for of in working[fit:]:
                of.stopping = True
                of.child.stop()

    def _fit(self) -> int:
        """The number of workers that there is memory for."""
        return max(1, int(min(self._free // self._peak, 2**20)))

    def _ended(self, of: _Member, code: int) -> None:
        """Takes a worker that has ended out of the crew, or starts it again."""
        self._end([of])
        self._tally.ended(of.number)
        if code in (0, EXIT_CONFIG) or of.stopping or self._asked is not None:
            return
        how = f'was ended by signal {-code}' if code < 0 else f'ended with exit code {code}'
        self.failure = f'worker {of.number} {how}'
        if code != EXIT_REQUEUE:  # not a crash
            of.retries += 1
        if of.retries > RETRIES:
            self.say(f'{self.failure}; no retry is left of {RETRIES}')
            return
        self.say(f'{self.failure}; it is started again, retry {of.retries} of {RETRIES}')
        of.child = Child(COMMAND, *of.place, self._display.columns)
        self._members.append(of)
        self._train(of)

    def _stop_all(self) -> None:
        """Passes a stop request on; kills who has not ended long after it."""
        if not self._stop.requested:
            return
        if self._asked is None:
            self._asked = time.monotonic()
            for of in self._members:
                of.child.stop()
        elif time.monotonic() - self._asked > GRACE:
            late = ways.count(len(self._members), 'worker')
            self.say(f'{late} did not end within {GRACE:.0f} s')
            self._end(self._members)

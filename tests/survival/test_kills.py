"""kill -9 and SIGTERM at random moments: what is finished is bitwise the undisturbed one.

The quick test kills a run of one process once while it trains. The slow ones kill runs of one and
of two processes, a run in a bucket and a study, KILLS times in any phase.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkattn.config import Config, TuningConfig
from qkattn.errors import Stopped
from qkattn.jobs import bootstrap, signals
from qkattn.jobs.display import Progress
from qkattn.jobs.signals import EXIT_REQUEUE
from qkattn.storage.buckets import is_url
from qkattn.storage.files import as_path
from qkattn.storage.metrics_log import read_metrics
from qkattn.study import worker
from qkattn.train.checkpoint import UNFINISHED
from qkattn.train.loop import train
from tests.compiled_programs import FLAGS
from tests.lanes import slow_except
from tests.processes import environments
from tests.runs import SMALL, assert_same_run, without_times
from tests.study.test_plan import STUDY

# Processes are forked from one that imported all, but for buckets: threads of TensorStore, which
# writes to them, are not made for forks.
FORKS, SPAWNS = (multiprocessing.get_context(name) for name in ('forkserver', 'spawn'))
FORKS.set_forkserver_preload([__name__])

# What a run reports, and its weight among the moments of disturbances.
PHASES = {
    **{'starting': 0, 'preparing data': 0, 'compiling': 1, 'initializing': 1, 'training': 6},
    **{'saving': 6, 'evaluating': 4, 'measuring': 1, 'anywhere': 4},
}
NAMES = list(PHASES)
# Seconds that a run is left alone in a phase, at most.
LINGER = {'training': 0.3, 'saving': 0.05, 'anywhere': 8.0}
LIMIT = 600.0


def to_end(settings, workdir: str, log: str, phase, environment: dict[str, str]) -> None:
    """Trains a run or works on a study to its end, as the command does; exits with its code."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ |= {'XLA_FLAGS': FLAGS.replace('device_count=8', 'device_count=1'), **environment}
    real_phase = Progress.phase
    real_begin = Progress.begin

    @contextlib.contextmanager
    def reported(self: Progress, name: str) -> Iterator[None]:
        before = phase.value
        if name in NAMES:  # and not 'opening devices', which is before all
            phase.value = NAMES.index(name)
        with real_phase(self, name):
            yield
        phase.value = before

    def begin(self: Progress) -> None:
        phase.value = NAMES.index('training')
        real_begin(self)

    Progress.phase = reported
    Progress.begin = begin

    @signals.exit_on_signal()
    def main() -> None:
        bootstrap.start()
        (train if isinstance(settings, Config) else worker.run)(settings, workdir)

    code = 0
    try:
        main()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        code = EXIT_REQUEUE
    finally:
        sys.stdout.flush()
    os._exit(code)


class Job:
    """A start of a run or a study, by as many processes as its mesh has rows for."""

    def __init__(self, settings, workdir: str, logs: Path):
        self.workdir = as_path(workdir)
        self.logs = logs
        context = SPAWNS if is_url(workdir) else FORKS
        self._phase = context.Value('i', 0)
        logs.mkdir(exist_ok=True)
        count = getattr(settings, 'base', settings).mesh.data
        self.processes = []
        for rank, environment in enumerate(environments(count) if count > 1 else [{}]):
            args = settings, workdir, f'{logs}/{rank}.log', self._phase, environment
            self.processes.append(context.Process(target=to_end, args=args))
            self.processes[-1].start()

    def phase(self) -> str:
        # Until a run begins to train, an unfinished checkpoint is one that a killed start has left.
        reported = NAMES[self._phase.value]
        if reported in ('training', 'evaluating', 'measuring') and not is_url(self.workdir):
            where = ('checkpoints', 'runs/*/checkpoints')
            if any(any(self.workdir.glob(f'{path}/{UNFINISHED}')) for path in where):
                return 'saving'
        return reported

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def linger(self, phase: str, rng) -> bool:
        """Waits for a random moment in a phase; returns whether all processes are alive then."""
        deadline = time.monotonic() + LIMIT
        while self.alive() and phase not in ('anywhere', self.phase()):
            assert time.monotonic() < deadline, f'never {phase}'
            time.sleep(0.001)
        until = time.monotonic() + rng.uniform(0, LINGER.get(phase, 0.1))
        while self.alive() and time.monotonic() < until:
            time.sleep(0.001)
        return self.alive()

    def disturb(self, number: int, rng) -> None:
        """Sends a signal to the processes, in any order; a stop gives code 75, state saved."""
        phase = self.phase()
        for process in rng.sample(self.processes, len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            time.sleep(rng.uniform(0, 0.02) * (len(self.processes) > 1))
        codes = self.codes()
        if number == signal.SIGTERM and phase != 'starting':  # its main function may not be reached
            assert codes in ({0}, {EXIT_REQUEUE}), codes
            log = self.workdir / 'metrics.jsonl'
            if phase in ('training', 'evaluating') and EXIT_REQUEUE in codes and log.exists():
                step = read_metrics(log)[-1]['step']
                assert (self.workdir / 'checkpoints' / str(step)).exists()

    def codes(self) -> set[int]:
        for process in self.processes:
            process.join(LIMIT)
        return {process.exitcode for process in self.processes}

    def end(self) -> Path:
        logs = self.logs.glob('*.log')
        assert self.codes() == {0}, [path.read_text()[-3000:] for path in logs]
        return self.workdir


def assert_same(one: Path, other: Path) -> None:
    """Two finished runs, or two finished studies, have equal content."""
    if not (one / 'study.json').exists():
        return assert_same_run(one, other)
    plan, results = (
        [list(map(json.loads, (path / name).read_text().splitlines())) for path in (one, other)]
        for name in ('plan.jsonl', 'results.jsonl')
    )
    assert plan[0] == plan[1] and without_times(results[0]) == without_times(results[1])
    for run in plan[0]:
        assert_same_run(one / run['directory'], other / run['directory'])


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """undisturbed(settings): the directory of a run or study that was never disturbed."""

    @functools.cache
    def undisturbed_path(settings) -> Path:
        path = tmp_path_factory.mktemp('undisturbed')
        return Job(settings, f'{path}/straight', path / 'logs').end()

    return undisturbed_path


WAYS = ('run', 'two processes', 'study', 'bucket')
OFTEN = [(way, True, number) for number in (signal.SIGKILL, signal.SIGTERM) for way in WAYS]
ONCE = [('run', False, signal.SIGKILL)]


@pytest.mark.parametrize(('name', 'often', 'number'), slow_except(ONCE, OFTEN + ONCE))
def test_a_run_or_study_that_is_disturbed_by_signals_ends_as_if_undisturbed(
    tiny, undisturbed, request, tmp_path, name, often, number
):
    """Each start is disturbed once, at a random moment, and the same directory is started again.

    A start that comes to its end first is compared with the undisturbed one, and another directory
    is begun. The last start is left alone.
    """
    settings = tiny(
        model=SMALL | {'dropout': 0.1},
        optimizer={'name': 'muon'},
        train={'num_steps': 60 if often else 12, 'eval_every': 6, 'checkpoint_every': 4},
        mesh={'data': 2 if name == 'two processes' else 1},
    )
    root = tmp_path
    if name == 'study':
        settings = dataclasses.replace(STUDY, base=settings, tolerance=0.1, tuning=TuningConfig())
    elif name == 'bucket':
        request.getfixturevalue('bucket')  # which processes find through their environment
        root = 'gs://runs'
    rng = random.Random(seed := os.environ.get('SEED') or str(time.time_ns()))
    print(f'SEED={seed}')
    moments = ['training']
    if often:
        # No directory of a bucket shows that a checkpoint is being saved.
        left_out = 'saving' if name == 'bucket' else None
        weights = {phase: weight for phase, weight in PHASES.items() if phase != left_out}
        kills = int(os.environ.get('KILLS', 20))
        moments = rng.choices([*weights], [*weights.values()], k=kills)
    undisturbed_path = undisturbed(settings)
    seen = Counter()
    finished = 0
    while moments:
        job = Job(settings, f'{root}/run-{finished}', tmp_path / 'logs')
        if job.linger(moments[0], rng):
            seen[job.phase()] += 1
            job.disturb(number, rng)
            moments.pop(0)
        else:
            assert_same(job.end(), undisturbed_path)
            finished += 1
    assert_same(Job(settings, f'{root}/run-{finished}', tmp_path / 'logs').end(), undisturbed_path)
    print(dict(seen), 'runs:', finished + 1)

"""kill -9 and SIGTERM at random moments: what is finished is bitwise the undisturbed one.

A run of one process, of two, in a bucket, and a study: the quick tests kill each once while it
trains, and the slow ones again and again in every phase.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from qkattn.config import Config, ControlsConfig, Study
from qkattn.errors import Stopped
from qkattn.jobs import bootstrap, signals
from qkattn.jobs.display import Progress
from qkattn.jobs.signals import EXIT_REQUEUE
from qkattn.metrics import TIMES
from qkattn.storage.buckets import is_url
from qkattn.storage.files import as_path
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.study import worker
from qkattn.train.checkpoint import UNFINISHED
from qkattn.train.exported import load_stack
from qkattn.train.loop import train
from tests.compiled_programs import FLAGS
from tests.jobs.jobs import free_port
from tests.train.conftest import pairs_files, task  # noqa: F401 (fixtures)

# Processes are forked from one that imported all, but for buckets: threads of TensorStore, which
# writes to them, are not made for forks.
FORKS, SPAWNS = (multiprocessing.get_context(name) for name in ('forkserver', 'spawn'))
FORKS.set_forkserver_preload([__name__])

# What a run reports, and its weight among the moments of kills and of stops.
PHASES = {
    **{'starting': (0, 0), 'preparing data': (0, 0), 'compiling': (1, 1), 'initializing': (1, 0)},
    **{'training': (6, 3), 'saving': (6, 3), 'evaluating': (4, 4), 'measuring': (1, 2)},
    'anywhere': (4, 2),
}
NAMES = list(PHASES)
# Seconds that a run is left alone in a phase, at most.
LINGER = {'training': 0.3, 'saving': 0.05, 'anywhere': 8.0}
LIMIT = 600.0


@dataclasses.dataclass
class Kind:
    """What is disturbed: a run or a study, by `count` processes, below a directory or a bucket."""

    settings: Config | Study
    root: str
    count: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@pytest.fixture
def make(tiny, tmp_path, request):
    """make(name, steps): a kind of run of two trials with dropout, of one layer."""

    def make(name: str, num_steps: int = 60) -> Kind:
        config = tiny(
            model={'dropout': 0.1, 'num_layers': 1, 'd_model': 16},
            optimizer={'name': 'muon'},
            train={'num_steps': num_steps, 'eval_every': 6, 'checkpoint_every': 4},
        )
        if name == 'two processes':
            mesh = dataclasses.replace(config.mesh, data=2)
            return Kind(dataclasses.replace(config, mesh=mesh), str(tmp_path), 2)
        if name == 'bucket':
            server = request.getfixturevalue('bucket')
            return Kind(config, 'gs://runs', environment=server.environment())
        if name == 'decoding':
            return Kind(request.getfixturevalue('task')('translation'), str(tmp_path))
        if name == 'study':
            study = Study(
                name='small',
                base=config,
                variants=('qk/vo', 'shared_qk/vo'),
                sizes=('d_model=16',),
                tolerance=0.1,
                controls=ControlsConfig(equal_shape=False, longer=None),
            )
            return Kind(study, str(tmp_path))
        return Kind(config, str(tmp_path))

    return make


def to_end(kind: Kind, workdir: str, log: str, phase, rank: int, address: str) -> None:
    """What one process of a job runs, with the exit codes of the command."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ['XLA_FLAGS'] = FLAGS.replace('device_count=8', 'device_count=1')
    os.environ |= kind.environment
    if kind.count > 1:
        os.environ['JAX_COORDINATOR_ADDRESS'] = address
        os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_PROCESS_ID'] = str(kind.count), str(rank)
    real_phase, real_begin = Progress.phase, Progress.begin

    @contextlib.contextmanager
    def reported(self: Progress, name: str) -> Iterator[None]:
        before = phase.value
        if name in NAMES:  # and not 'opening devices', which is before all
            phase.value = NAMES.index(name)
        with real_phase(self, name):
            yield
        phase.value = before

    def begin(self: Progress, step: int, **follow: int) -> None:
        phase.value = NAMES.index('training')
        real_begin(self, step, **follow)

    Progress.phase, Progress.begin = reported, begin

    @signals.exit_on_signal()
    def main() -> None:
        bootstrap.start()
        (train if isinstance(kind.settings, Config) else worker.run)(kind.settings, workdir)

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
    """A start of a run or a study, by one or several processes."""

    def __init__(self, kind: Kind, name: str, logs: Path):
        workdir = f'{kind.root}/{name}'
        self.workdir, self.logs = as_path(workdir), logs
        context = SPAWNS if is_url(workdir) else FORKS
        self._phase, address = context.Value('i', 0), f'127.0.0.1:{free_port()}'
        arguments = [
            (kind, workdir, f'{logs}/{rank}.log', self._phase, rank, address)
            for rank in range(kind.count)
        ]
        self.processes = [context.Process(target=to_end, args=args) for args in arguments]
        for process in self.processes:
            process.start()

    def phase(self) -> str:
        # Until a run begins to train, an unfinished checkpoint is one that a killed start has left.
        reported = NAMES[self._phase.value]
        if reported in ('training', 'evaluating', 'measuring') and not is_url(self.workdir):
            for checkpoints in ('checkpoints', 'runs/*/checkpoints'):
                if any(self.workdir.glob(f'{checkpoints}/{UNFINISHED}')):
                    return 'saving'
        return reported

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def linger(self, phase: str, rng) -> bool:
        """Waits for a random moment in a phase; whether all processes are alive then."""
        deadline = time.monotonic() + LIMIT
        while self.alive() and phase not in ('anywhere', self.phase()):
            assert time.monotonic() < deadline, f'never {phase}'
            time.sleep(0.001)
        until = time.monotonic() + rng.uniform(0, LINGER.get(phase, 0.1))
        while self.alive() and time.monotonic() < until:
            time.sleep(0.001)
        return self.alive()

    def signal(self, number: int, rng) -> None:
        """Sends a signal to the processes, in any order."""
        for process in rng.sample(self.processes, len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            time.sleep(rng.uniform(0, 0.02) * (len(self.processes) > 1))

    def codes(self) -> set[int]:
        for process in self.processes:
            process.join(LIMIT)
        return {process.exitcode for process in self.processes}

    def end(self) -> Path:
        codes = self.codes()
        assert codes == {0}, [path.read_text()[-3000:] for path in self.logs.glob('*.log')]
        return self.workdir


def require_equal(one: Path, other: Path) -> None:
    """Two finished runs, or studies, are one: parameters, optimizer state, metrics, results."""
    if (one / 'study.json').exists():
        plan, same = ((path / 'plan.jsonl').read_bytes() for path in (one, other))
        assert plan == same
        require_same_results(*(read_lines(path / 'results.jsonl') for path in (one, other)))
        for run in map(json.loads, plan.splitlines()):
            require_equal(one / run['directory'], other / run['directory'])
        return
    for name in ('metrics.jsonl', 'documents.json'):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    require_same_results(*(read_json(path / 'result.json', [{}]) for path in (one, other)))
    (config, step, state), (_, other_step, other_state) = map(load_stack, (one, other))
    assert step == other_step == config.train.num_steps
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    steps = [r['step'] for r in read_metrics(one / 'metrics.jsonl') if r['kind'] == 'train']
    assert steps == list(range(1, step + 1))
    left = [path.name for folder in (one, one / 'checkpoints') for path in folder.iterdir()]
    assert not [name for name in left if name.endswith(('tmp', '.damaged', 'trash'))]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def require_same_results(*records) -> None:
    one, other = ([{k: v for k, v in r.items() if k not in TIMES} for r in rs] for rs in records)
    assert one == other


def disturb(kind: Kind, tmp_path: Path, moments: list[str], rng, disturbance) -> None:
    """Starts a run or study again and again, disturbed once each, until it is finished and equal.

    When it is finished before a moment, another one is begun.
    """
    logs, seen, number = tmp_path / 'logs', Counter(), 0
    logs.mkdir()
    straight = Job(dataclasses.replace(kind, root=str(tmp_path)), 'straight', logs).end()
    while moments:
        job = Job(kind, f'run-{number}', logs)
        if job.linger(moments[0], rng):
            seen[job.phase()] += 1
            disturbance(job, rng)
            moments.pop(0)
        else:
            require_equal(job.end(), straight)
            number += 1
    require_equal(Job(kind, f'run-{number}', logs).end(), straight)
    print(dict(seen), 'runs:', number + 1)


def drawn(count: int, which: int, rng, without: tuple[str, ...] = ()) -> list[str]:
    """Phases, each at least once, the others by weight."""
    weights = {name: PHASES[name][which] for name in PHASES if name not in without}
    once = [name for name, weight in weights.items() if weight]
    more = rng.choices([*weights], [*weights.values()], k=max(0, count - len(once)))
    return rng.sample([*once, *more], len(once) + len(more))


def killed(job: Job, rng) -> None:
    job.signal(signal.SIGKILL, rng)
    job.codes()


@pytest.mark.parametrize('name', ['run', 'two processes', 'study', 'bucket'])
@pytest.mark.parametrize('often', [pytest.param(True, marks=pytest.mark.slow), False])
def test_what_is_killed_ends_as_if_undisturbed(name, often, make, tmp_path, rng, request):
    moments = ['training']
    if often:
        kills = request.config.getoption('--kills', 100) // (
            4 if name in ('study', 'bucket') else 1
        )
        # No directory of a bucket shows that a checkpoint is being saved.
        moments = drawn(kills, 0, rng, ('saving',) if name == 'bucket' else ())
    disturb(make(name, 60 if often else 24), tmp_path, moments, rng, killed)


def stopped(job: Job, rng) -> None:
    """Sends SIGTERM, and half of the times another one right after it: code 75, state saved."""
    trained = job.phase() in ('training', 'evaluating')
    # Before a process has reached its main function, a signal ends it as any other program.
    early = {-signal.SIGTERM} if job.phase() == 'starting' else set()
    job.signal(signal.SIGTERM, rng)
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.1))
        job.signal(signal.SIGTERM, rng)
    codes = job.codes()
    assert codes == {0} or codes <= {EXIT_REQUEUE} | early, codes
    if trained and EXIT_REQUEUE in codes:
        last = read_metrics(job.workdir / 'metrics.jsonl')[-1]['step']
        assert str(last) in [path.name for path in (job.workdir / 'checkpoints').iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['run', 'two processes', 'decoding'])
def test_what_is_stopped_loses_nothing(name, make, tmp_path, rng, request):
    kills = request.config.getoption('--kills', 100)
    moments = drawn(kills // 4, 1, rng)
    if name == 'decoding':  # whose measurements take long
        moments = rng.choices(['evaluating', 'measuring'], [1, 3], k=max(2, kills // 10))
    disturb(make(name), tmp_path, moments, rng, stopped)

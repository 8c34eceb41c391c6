"""Runs that are killed and stopped: processes forked from one that has imported everything."""

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from qkattn.config import Config
from qkattn.errors import Stopped
from qkattn.jobs import bootstrap, signals
from qkattn.jobs.display import Progress
from qkattn.metrics import TIMES
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.train import train
from qkattn.train.checkpoint import UNFINISHED
from qkattn.train.exported import load_stack
from tests.compiled_programs import FLAGS
from tests.jobs.jobs import free_port

FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['tests.survival.runs'])

# The places of a run that it tells of; a checkpoint is being saved where its directory lies.
PREPARING, COMPILING, INITIALIZING = 'preparing data', 'compiling', 'initializing'
TRAINING, EVALUATING, MEASURING = 'training', 'evaluating', 'measuring'
SAVING, ANYWHERE = 'saving', 'anywhere'
TOLD = ('starting', PREPARING, COMPILING, INITIALIZING, TRAINING, EVALUATING, MEASURING, SAVING)
# Seconds that a run is left alone in a place, at most.
LINGER = {TRAINING: 0.3, SAVING: 0.05, ANYWHERE: 8.0}
LIMIT = 600.0


def to_end(config: Config, workdir: Path, place, rank: int, count: int, address: str) -> None:
    """What one process of a job runs, with the exit codes of the command."""
    log = os.open(f'{workdir}.{rank}.log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ['XLA_FLAGS'] = FLAGS.replace('device_count=8', 'device_count=1')
    if count > 1:
        os.environ['JAX_COORDINATOR_ADDRESS'] = address
        os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_PROCESS_ID'] = str(count), str(rank)
    real_phase, real_begin = Progress.phase, Progress.begin

    @contextlib.contextmanager
    def phase(self: Progress, name: str) -> Iterator[None]:
        before = place.value
        if name in TOLD:  # and not 'opening devices', which is before all
            place.value = TOLD.index(name)
        with real_phase(self, name):
            yield
        place.value = before

    def begin(self: Progress, step: int, **follow: int) -> None:
        place.value = TOLD.index(TRAINING)
        real_begin(self, step, **follow)

    Progress.phase, Progress.begin = phase, begin

    @signals.exit_on_signal()
    def main() -> None:
        bootstrap.start()
        train(config, workdir)

    try:
        main()
        code = 0
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        code = signals.EXIT_REQUEUE
    finally:
        sys.stdout.flush()
    os._exit(code)


@dataclasses.dataclass
class Job:
    """A start of a run, by one or several processes."""

    workdir: Path
    place: object
    processes: list

    @classmethod
    def start(cls, config: Config, workdir: Path, count: int) -> 'Job':
        place, address = FORKS.Value('i', 0), f'127.0.0.1:{free_port()}'
        processes = [
            FORKS.Process(target=to_end, args=(config, workdir, place, rank, count, address))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        return cls(workdir, place, processes)

    def at(self) -> str:
        # Until a run begins to train, an unfinished checkpoint is one that a killed start has left.
        saving = any((self.workdir / 'checkpoints').glob(UNFINISHED))
        told = TOLD[self.place.value]
        return SAVING if saving and told in (TRAINING, EVALUATING, MEASURING) else told

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def linger(self, where: str, rng: random.Random) -> bool:
        """Waits for a random moment in a place; whether all processes are alive then."""
        deadline = time.monotonic() + LIMIT
        while self.alive() and where != ANYWHERE and self.at() != where:
            assert time.monotonic() < deadline, f'never {where}'
            time.sleep(0.001)
        until = time.monotonic() + rng.uniform(0, LINGER.get(where, 0.1))
        while self.alive() and time.monotonic() < until:
            time.sleep(0.001)
        return self.alive()

    def signal(self, number: int, rng: random.Random) -> None:
        """Sends a signal to the processes, in any order."""
        for process in rng.sample(self.processes, len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            time.sleep(rng.uniform(0, 0.02) * (len(self.processes) > 1))

    def codes(self) -> list[int]:
        for process in self.processes:
            process.join(LIMIT)
        return [process.exitcode for process in self.processes]

    def log(self) -> str:
        logs = self.workdir.parent.glob(f'{self.workdir.name}.*.log')
        return '\n'.join(path.read_text()[-3000:] for path in logs)


def finish(config: Config, workdir: Path, count: int) -> None:
    job = Job.start(config, workdir, count)
    assert job.codes() == [0] * count, job.log()


def require_equal(workdir: Path, straight: Path) -> None:
    """The finished run is the undisturbed one: parameters, optimizer state, metrics, results."""
    for name in ('metrics.jsonl', 'documents.json'):
        assert (workdir / name).read_bytes() == (straight / name).read_bytes(), name
    found, want = (
        [{k: v for k, v in result.items() if k not in TIMES} for result in results]
        for results in (read_json(path / 'result.json', [{}]) for path in (workdir, straight))
    )
    assert found == want
    (config, step, state), (_, want_step, want_state) = map(load_stack, (workdir, straight))
    assert step == want_step == config.train.num_steps
    jax.tree.map(np.testing.assert_array_equal, state, want_state)
    steps = [r['step'] for r in read_metrics(workdir / 'metrics.jsonl') if r['kind'] == 'train']
    assert steps == list(range(1, step + 1))
    left = [p for p in workdir.rglob('*') if p.name.endswith(('tmp', '.damaged'))]
    assert not left and not (workdir / 'checkpoints/trash').exists()


def disturb(
    config: Config,
    straight: Path,
    count: int,
    moments: list[str],
    rng: random.Random,
    disturbance: Callable[[Job], None],
) -> Counter:
    """Starts a run again and again, disturbed once each, until it is finished and equal.

    Args:
      straight: the directory of the undisturbed run.
      count: processes.
      moments: where it is disturbed; when the run is finished before, another one is begun.

    Returns:
      How often it was disturbed in each place, and under 'runs' how many runs finished.
    """
    seen, run, data = Counter(), 0, config.data.data_dir
    moments = [*moments]
    while moments:
        workdir = straight.parent / f'run{count}-{run}'
        if moments[0] == PREPARING:  # there is something to prepare in an empty directory only
            data = str(straight.parent / f'data{count}-{len(moments)}')
        here = dataclasses.replace(config, data=dataclasses.replace(config.data, data_dir=data))
        job = Job.start(here, workdir, count)
        if job.linger(moments[0], rng):
            seen[job.at()] += 1
            disturbance(job)
            moments.pop(0)
        else:
            assert job.codes() == [0] * count, job.log()
            require_equal(workdir, straight)
            run += 1
        data = here.data.data_dir
    finish(here, workdir, count)
    require_equal(workdir, straight)
    seen['runs'] = run + 1
    return seen


def drawn(count: int, weights: dict[str, int], rng: random.Random) -> list[str]:
    """Places, each at least once, the others by weight."""
    places = list(weights)
    more = rng.choices(places, list(weights.values()), k=max(0, count - len(places)))
    return rng.sample(places + more, len(places + more))


def killed(job: Job, rng: random.Random) -> None:
    job.signal(signal.SIGKILL, rng)
    job.codes()

"""Runs and studies that are killed and stopped: processes forked from one that imported all."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from qkattn.config import Config, Study
from qkattn.errors import Stopped
from qkattn.jobs import bootstrap, signals
from qkattn.jobs.display import Progress
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

FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['tests.survival.runs'])
# Threads of TensorStore, which writes to buckets, are not made for forks.
SPAWNS = multiprocessing.get_context('spawn')

# The phases that a run reports; a checkpoint is being saved while its unfinished directory exists.
STARTING, PREPARING, COMPILING = 'starting', 'preparing data', 'compiling'
TRAINING, EVALUATING, MEASURING = 'training', 'evaluating', 'measuring'
SAVING, ANYWHERE = 'saving', 'anywhere'
INITIALIZING = 'initializing'
PHASES = (STARTING, PREPARING, COMPILING, INITIALIZING, TRAINING, EVALUATING, MEASURING, SAVING)
# Seconds that a run is left alone in a phase, at most.
LINGER = {TRAINING: 0.3, SAVING: 0.05, ANYWHERE: 8.0}
LIMIT = 600.0


@dataclasses.dataclass
class Kind:
    """What is disturbed: a run or a study, by `count` processes, below a directory or a bucket."""

    settings: Config | Study
    root: str
    count: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def at(self, name: str) -> str:
        return f'{self.root}/{name}'

    def with_data(self, data_dir: str) -> 'Kind':
        """A run whose data is prepared in another directory."""
        data = dataclasses.replace(self.settings.data, data_dir=data_dir)
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, data=data))


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
        if name in PHASES:  # and not 'opening devices', which is before all
            phase.value = PHASES.index(name)
        with real_phase(self, name):
            yield
        phase.value = before

    def begin(self: Progress, step: int, **follow: int) -> None:
        phase.value = PHASES.index(TRAINING)
        real_begin(self, step, **follow)

    Progress.phase, Progress.begin = reported, begin

    @signals.exit_on_signal()
    def main() -> None:
        bootstrap.start()
        (train if isinstance(kind.settings, Config) else worker.run)(kind.settings, workdir)

    try:
        main()
        code = 0
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        code = signals.EXIT_REQUEUE
    finally:
        sys.stdout.flush()
    os._exit(code)


class Job:
    """A start of a run or a study, by one or several processes."""

    def __init__(self, kind: Kind, name: str, logs: Path):
        self.workdir, self.logs = as_path(kind.at(name)), logs
        context = SPAWNS if is_url(self.workdir) else FORKS
        self._phase, address = context.Value('i', 0), f'127.0.0.1:{free_port()}'
        self.processes = [
            context.Process(
                target=to_end,
                args=(kind, kind.at(name), f'{logs}/{rank}.log', self._phase, rank, address),
            )
            for rank in range(kind.count)
        ]
        for process in self.processes:
            process.start()

    def phase(self) -> str:
        # Until a run begins to train, an unfinished checkpoint is one that a killed start has left.
        reported = PHASES[self._phase.value]
        if reported in (TRAINING, EVALUATING, MEASURING) and not is_url(self.workdir):
            for checkpoints in ('checkpoints', 'runs/*/checkpoints'):
                if any(self.workdir.glob(f'{checkpoints}/{UNFINISHED}')):
                    return SAVING
        return reported

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def linger(self, phase: str, rng: random.Random) -> bool:
        """Waits for a random moment in a phase; whether all processes are alive then."""
        deadline = time.monotonic() + LIMIT
        while self.alive() and phase != ANYWHERE and self.phase() != phase:
            assert time.monotonic() < deadline, f'never {phase}'
            time.sleep(0.001)
        until = time.monotonic() + rng.uniform(0, LINGER.get(phase, 0.1))
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

    def end(self) -> None:
        assert set(self.codes()) == {0}, '\n'.join(
            path.read_text()[-3000:] for path in self.logs.glob('*.log')
        )


def require_equal(one: Path, other: Path) -> None:
    """Two finished runs, or studies, are one: parameters, optimizer state, metrics, results."""
    if (one / 'study.json').exists():
        plans = [(path / 'plan.jsonl').read_bytes() for path in (one, other)]
        assert plans[0] == plans[1]
        lines = [(path / 'results.jsonl').read_text().splitlines() for path in (one, other)]
        require_same_results(*(map(json.loads, results) for results in lines))
        for run in map(json.loads, plans[0].splitlines()):
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
    assert not [name for name in left if name.endswith(('tmp', '.damaged'))] and 'trash' not in left


def require_same_results(*records) -> None:
    one, other = (
        [{k: v for k, v in r.items() if k not in TIMES} for r in rows] for rows in records
    )
    assert one == other


def disturb(
    kind: Kind,
    tmp_path: Path,
    moments: list[str],
    rng: random.Random,
    disturbance: Callable[[Job], None],
) -> Counter:
    """Starts a run or study again and again, disturbed once each, until it is finished and equal.

    Args:
      moments: phases in which it is disturbed; when it is finished before, another one is begun.

    Returns:
      How often it was disturbed in each phase, and under 'runs' how many were finished.
    """
    logs, straight, seen, number = tmp_path / 'logs', tmp_path / 'straight', Counter(), 0
    logs.mkdir()
    undisturbed = dataclasses.replace(kind, root=str(tmp_path))
    Job(undisturbed, 'straight', logs).end()
    moments = [*moments]
    while moments:
        if moments[0] == PREPARING:  # there is something to prepare in an empty directory only
            kind = kind.with_data(f'{tmp_path}/data{len(moments)}')
        job = Job(kind, f'run-{number}', logs)
        if job.linger(moments[0], rng):
            seen[job.phase()] += 1
            disturbance(job)
            moments.pop(0)
        else:
            job.end()
            require_equal(job.workdir, straight)
            number += 1
    job = Job(kind, f'run-{number}', logs)
    job.end()
    require_equal(job.workdir, straight)
    seen['runs'] = number + 1
    return seen


def drawn(count: int, weights: Mapping[str, int], rng: random.Random) -> list[str]:
    """Phases, each at least once, the others by weight."""
    more = rng.choices([*weights], [*weights.values()], k=max(0, count - len(weights)))
    return rng.sample([*weights, *more], max(count, len(weights)))

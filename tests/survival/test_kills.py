"""kill -9 and SIGTERM at random moments: what is finished is bitwise the undisturbed one.

A run of one process, of two, in a bucket, and a study: the quick tests kill each once while it
trains, and the slow ones KILLS times, in any phase.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
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


@dataclasses.dataclass
class Kind:
    """What is disturbed: a run or a study, by `count` processes, below a directory or a bucket."""

    settings: Config | Study
    root: str
    count: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@pytest.fixture
def kind(tiny, tmp_path, request, name, often):
    """A run of two trials with dropout, of one layer, or a study of two of them."""
    config = tiny(
        model={'dropout': 0.1, 'num_layers': 1, 'd_model': 16},
        optimizer={'name': 'muon'},
        train={'num_steps': 60 if often else 24, 'eval_every': 6, 'checkpoint_every': 4},
    )
    if name == 'two processes':
        mesh = dataclasses.replace(config.mesh, data=2)
        return Kind(dataclasses.replace(config, mesh=mesh), str(tmp_path), 2)
    if name == 'bucket':
        server = request.getfixturevalue('bucket')
        return Kind(config, 'gs://runs', environment=server.environment())
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


def require_equal(one: Path, other: Path) -> None:
    """Two finished runs, or studies, are one: parameters, optimizer state, metrics, results."""
    if (one / 'study.json').exists():
        plan, same = ((path / 'plan.jsonl').read_bytes() for path in (one, other))
        assert plan == same
        lines = [(path / 'results.jsonl').read_text().splitlines() for path in (one, other)]
        require_same_results(*(map(json.loads, results) for results in lines))
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


def require_same_results(*results) -> None:
    one, other = ([{k: v for k, v in r.items() if k not in TIMES} for r in rs] for rs in results)
    assert one == other


@pytest.mark.parametrize('name', ['run', 'two processes', 'study', 'bucket'])
@pytest.mark.parametrize(
    ('often', 'number'),
    [
        pytest.param(True, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.slow),
        (False, signal.SIGKILL),
    ],
)
def test_what_is_disturbed_ends_as_if_undisturbed(kind, name, often, number, tmp_path):
    """Started again and again, disturbed once each; when it is finished, another one is begun."""
    rng = random.Random(seed := os.environ.get('SEED') or str(time.time_ns()))
    print(f'SEED={seed}')
    moments = ['training']
    if often:
        # No directory of a bucket shows that a checkpoint is being saved.
        left_out = 'saving' if name == 'bucket' else None
        weights = {phase: weight for phase, weight in PHASES.items() if phase != left_out}
        kills = int(os.environ.get('KILLS', 20))
        moments = rng.choices([*weights], [*weights.values()], k=kills)
    logs, seen, finished = tmp_path / 'logs', Counter(), 0
    logs.mkdir()
    straight = Job(dataclasses.replace(kind, root=str(tmp_path)), 'straight', logs).end()
    while moments:
        job = Job(kind, f'run-{finished}', logs)
        if job.linger(moments[0], rng):
            seen[job.phase()] += 1
            job.disturb(number, rng)
            moments.pop(0)
        else:
            require_equal(job.end(), straight)
            finished += 1
    require_equal(Job(kind, f'run-{finished}', logs).end(), straight)
    print(dict(seen), 'runs:', finished + 1)

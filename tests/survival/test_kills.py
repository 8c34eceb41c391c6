"""Runs and studies that get kill -9 or SIGTERM at random moments end bitwise as undisturbed ones.

The quick test kills a run of one process once, while it trains. The slow tests send KILLS signals
to each of: a run of one process, a run of two processes, a run in a bucket, and a study.
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

# Processes are forked from a server that has imported all modules. For runs in buckets they are
# spawned instead, because the threads of TensorStore do not survive a fork.
FORKS = multiprocessing.get_context('forkserver')
SPAWNS = multiprocessing.get_context('spawn')
FORKS.set_forkserver_preload([__name__])

# The phases of a run, with weights for drawing the phase in which a signal is sent.
PHASES = {
    'starting': 0,
    'preparing data': 0,
    'compiling': 1,
    'initializing': 1,
    'training': 6,
    'saving': 6,
    'evaluating': 4,
    'measuring': 1,
    'anywhere': 4,
}
NAMES = list(PHASES)
# The longest time from the beginning of a phase to a signal, in seconds.
LINGER = {'training': 0.3, 'saving': 0.05, 'anywhere': 8.0}
LIMIT = 600.0


def run_to_end(settings, workdir: str, log: str, phase_index, environment: dict[str, str]) -> None:
    """Trains a run or works on a study, and exits as the command does.

    Args:
        settings: The config of a run, or a study.
        workdir: The directory of results.
        log: The file for standard output and standard error.
        phase_index: A number in shared memory, set to the index of the current phase in NAMES.
        environment: Environment variables of this process.
    """
    log_descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)
    os.environ |= {'XLA_FLAGS': FLAGS.replace('device_count=8', 'device_count=1'), **environment}
    real_phase = Progress.phase
    real_begin = Progress.begin

    @contextlib.contextmanager
    def reported_phase(self: Progress, name: str) -> Iterator[None]:
        index_before = phase_index.value
        if name in NAMES:  # the phase 'opening devices' is not in NAMES
            phase_index.value = NAMES.index(name)
        with real_phase(self, name):
            yield
        phase_index.value = index_before

    def reported_begin(self: Progress) -> None:
        phase_index.value = NAMES.index('training')
        real_begin(self)

    Progress.phase = reported_phase
    Progress.begin = reported_begin

    @signals.exit_on_signal()
    def main() -> None:
        bootstrap.start()
        if isinstance(settings, Config):
            train(settings, workdir)
        else:
            worker.run(settings, workdir)

    exit_code = 0
    try:
        main()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        exit_code = EXIT_REQUEUE
    finally:
        sys.stdout.flush()
    os._exit(exit_code)


class Job:
    """The processes of one start of a run or a study. Their number is `mesh.data`."""

    def __init__(self, settings, workdir: str, logs: Path):
        """Starts the processes of a job, which train a run or work on a study.

        Args:
            settings: The config of a run, or a study.
            workdir: The directory of results, which may be in a bucket.
            logs: A directory for the printed output, with a file for each process.
        """
        self.workdir = as_path(workdir)
        self.logs = logs
        logs.mkdir(exist_ok=True)
        context = SPAWNS if is_url(workdir) else FORKS
        # The index of the current phase in NAMES. All processes share this number.
        self._phase_index = context.Value('i', 0)

        config = settings if isinstance(settings, Config) else settings.base
        num_processes = config.mesh.data
        # Environment variables by which the processes of a job find each other.
        environment_of_rank = environments(num_processes) if num_processes > 1 else [{}]
        self.processes = []
        for rank, environment in enumerate(environment_of_rank):
            process = context.Process(
                target=run_to_end,
                args=(settings, workdir, f'{logs}/{rank}.log', self._phase_index, environment),
            )
            process.start()
            self.processes.append(process)

    def phase(self) -> str:
        """The last reported phase, or 'saving' while the job writes a checkpoint."""
        reported = NAMES[self._phase_index.value]
        # In other phases, an unfinished checkpoint was left by an earlier start that was killed.
        saves_checkpoints = reported in ('training', 'evaluating', 'measuring')
        if saves_checkpoints and not is_url(self.workdir):
            for checkpoints in ('checkpoints', 'runs/*/checkpoints'):
                if any(self.workdir.glob(f'{checkpoints}/{UNFINISHED}')):
                    return 'saving'
        return reported

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def wait_for_moment_in(self, phase: str, rng) -> bool:
        """Waits for a random moment in a phase. Returns whether all processes are alive then.

        The moment is at most LINGER[phase] seconds after the beginning of the phase. The phase
        'anywhere' begins at once. If a process ends before that moment, returns False at once.
        """
        deadline = time.monotonic() + LIMIT
        while self.is_alive() and phase not in ('anywhere', self.phase()):
            assert time.monotonic() < deadline, f'never {phase}'
            time.sleep(0.001)

        longest_wait = LINGER.get(phase, 0.1)  # seconds
        moment = time.monotonic() + rng.uniform(0, longest_wait)
        while self.is_alive() and time.monotonic() < moment:
            time.sleep(0.001)
        return self.is_alive()

    def disturb(self, sent_signal: int, rng) -> None:
        """Sends a signal to the processes in random order, and waits until they have ended.

        After SIGTERM, checks that the job has saved a checkpoint and exited with EXIT_REQUEUE. A
        job that has just finished may exit with 0 instead.
        """
        phase = self.phase()
        longest_pause = 0.02 if len(self.processes) > 1 else 0
        for process in rng.sample(self.processes, len(self.processes)):
            with contextlib.suppress(ProcessLookupError):  # the process has ended
                os.kill(process.pid, sent_signal)
            time.sleep(rng.uniform(0, longest_pause))

        exit_codes = self.exit_codes()
        # A process that is starting does not handle signals yet.
        if sent_signal == signal.SIGTERM and phase != 'starting':
            # All processes of a job exit with the same code.
            assert exit_codes in ({0}, {EXIT_REQUEUE}), exit_codes

            # The last logged step has a checkpoint.
            log = self.workdir / 'metrics.jsonl'
            is_in_steps = phase in ('training', 'evaluating')
            if is_in_steps and EXIT_REQUEUE in exit_codes and log.exists():
                records = read_metrics(log)
                last_step = records[-1]['step']
                assert (self.workdir / 'checkpoints' / str(last_step)).exists()

    def exit_codes(self) -> set[int]:
        for process in self.processes:
            process.join(LIMIT)
        return {process.exitcode for process in self.processes}

    def wait_for_success(self) -> Path:
        """Waits until all processes exit with 0. Returns the directory of results."""
        assert self.exit_codes() == {0}, self.ends_of_logs()
        return self.workdir

    def ends_of_logs(self) -> list[str]:
        return [path.read_text()[-3000:] for path in self.logs.glob('*.log')]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same(one: Path, other: Path) -> None:
    """Asserts that two finished runs or studies have the same results, except for times."""
    is_study = (one / 'study.json').exists()
    if not is_study:
        assert_same_run(one, other)
        return

    plan = read_lines(one / 'plan.jsonl')
    assert plan == read_lines(other / 'plan.jsonl')
    results = read_lines(one / 'results.jsonl')
    other_results = read_lines(other / 'results.jsonl')
    assert without_times(results) == without_times(other_results)
    for run in plan:
        assert_same_run(one / run['directory'], other / run['directory'])


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """undisturbed(settings): the directory of a run or study that was never disturbed."""

    @functools.cache
    def undisturbed_path(settings) -> Path:
        path = tmp_path_factory.mktemp('undisturbed')
        return Job(settings, f'{path}/straight', path / 'logs').wait_for_success()

    return undisturbed_path


def random_phases(kind: str, rng) -> list[str]:
    """Draws the phases in which signals are sent, KILLS in number (an environment variable)."""
    weight_of_phase = dict(PHASES)
    if kind == 'bucket':
        # In a bucket, `Job.phase` does not see that a checkpoint is being saved.
        del weight_of_phase['saving']
    num_kills = int(os.environ.get('KILLS', 20))
    return rng.choices(list(weight_of_phase), list(weight_of_phase.values()), k=num_kills)


KINDS = ('run', 'two processes', 'study', 'bucket')
OFTEN = [(kind, True, sent) for sent in (signal.SIGKILL, signal.SIGTERM) for kind in KINDS]
ONCE = [('run', False, signal.SIGKILL)]


@pytest.mark.parametrize(('kind', 'often', 'sent_signal'), slow_except(ONCE, OFTEN + ONCE))
def test_a_run_or_study_disturbed_by_signals_ends_as_if_undisturbed(
    tiny, undisturbed, request, tmp_path, kind, often, sent_signal
):
    """A run that is killed and started again ends bitwise as one that was never disturbed.

    1. Each start gets one signal, at a random moment of a random phase, such as 'saving'.
    2. The next start continues in the same directory.
    3. If a start ends before its signal, its results are compared. The next start gets a new
       directory.
    4. After the last signal, one more start runs to the end, and its results are compared.
    """
    # `tiny` makes the config of a run that trains within seconds.
    settings = tiny(
        model=SMALL | {'dropout': 0.1},
        optimizer={'name': 'muon'},
        train={'num_steps': 60 if often else 12, 'eval_every': 6, 'checkpoint_every': 4},
        mesh={'data': 2 if kind == 'two processes' else 1},
    )
    root = tmp_path
    if kind == 'study':
        settings = dataclasses.replace(STUDY, base=settings, tolerance=0.1, tuning=TuningConfig())
    elif kind == 'bucket':
        request.getfixturevalue('bucket')  # sets environment variables for the processes
        root = 'gs://runs'

    # To repeat the random moments of a failure, set SEED to the printed number.
    seed = os.environ.get('SEED') or str(time.time_ns())
    print(f'SEED={seed}')
    rng = random.Random(seed)
    phases = random_phases(kind, rng) if often else ['training']
    undisturbed_path = undisturbed(settings)

    num_disturbances = Counter()
    num_finished = 0
    while phases:
        job = Job(settings, f'{root}/run-{num_finished}', tmp_path / 'logs')
        if job.wait_for_moment_in(phases[0], rng):
            num_disturbances[job.phase()] += 1
            job.disturb(sent_signal, rng)
            phases.pop(0)
        else:
            # The job has ended before the moment came.
            assert_same(job.wait_for_success(), undisturbed_path)
            num_finished += 1

    last_job = Job(settings, f'{root}/run-{num_finished}', tmp_path / 'logs')
    assert_same(last_job.wait_for_success(), undisturbed_path)
    print(dict(num_disturbances), 'runs:', num_finished + 1)

"""kill -9 and SIGTERM at random moments: what is finished is bitwise the undisturbed one.

A run of one process, of two, in a bucket, and a study: the quick tests kill each once while it
trains, and the slow ones again and again in every phase.
"""

import dataclasses
import functools
import random
import signal
import time
from collections import Counter

import pytest

from qkattn.config import ControlsConfig, Study
from qkattn.jobs.signals import EXIT_REQUEUE
from qkattn.storage.metrics_log import read_metrics
from tests.survival import runs
from tests.train.conftest import PAIRS

PHASES = {
    **{runs.PREPARING: 2, runs.COMPILING: 1, runs.INITIALIZING: 1, runs.TRAINING: 6},
    **{runs.SAVING: 6, runs.EVALUATING: 4, runs.MEASURING: 1, runs.ANYWHERE: 4},
}
# Where nothing is prepared, and no directory shows that a checkpoint is being saved.
SHARED = {name: PHASES[name] for name in PHASES if name != runs.PREPARING}
FAR = {name: PHASES[name] for name in SHARED if name != runs.SAVING}
STOPPED = {
    **{runs.COMPILING: 1, runs.TRAINING: 3, runs.SAVING: 3},
    **{runs.EVALUATING: 4, runs.MEASURING: 2, runs.ANYWHERE: 2},
}
# By kind: the phases in which it is killed, and one in so many of --kills.
KINDS = {'run': (PHASES, 1), 'two processes': (PHASES, 1), 'study': (SHARED, 4), 'bucket': (FAR, 4)}


@pytest.fixture
def make(tiny, tmp_path, request):
    """make(name, steps): a kind of run of two trials with dropout, of one layer."""

    def make(name: str, num_steps: int = 60) -> runs.Kind:
        config = tiny(
            model={'dropout': 0.1, 'num_layers': 1, 'd_model': 16},
            optimizer={'name': 'muon'},
            train={'num_steps': num_steps, 'eval_every': 6, 'checkpoint_every': 4},
        )
        if name == 'two processes':
            mesh = dataclasses.replace(config.mesh, data=2)
            return runs.Kind(dataclasses.replace(config, mesh=mesh), str(tmp_path), 2)
        if name == 'bucket':
            server = request.getfixturevalue('bucket')
            return runs.Kind(config, 'gs://runs', environment=server.environment())
        if name == 'study':
            study = Study(
                name='small',
                base=config,
                variants=('qk/vo', 'shared_qk/vo'),
                sizes=('d_model=16',),
                tolerance=0.1,
                controls=ControlsConfig(equal_shape=False, longer=None),
            )
            return runs.Kind(study, str(tmp_path))
        return runs.Kind(config, str(tmp_path))

    return make


def killed(job: runs.Job, rng: random.Random) -> None:
    job.signal(signal.SIGKILL, rng)
    job.codes()


@pytest.mark.parametrize('name', KINDS)
@pytest.mark.parametrize(
    'often',
    [pytest.param(True, marks=pytest.mark.slow, id='often'), pytest.param(False, id='once')],
)
def test_what_is_killed_ends_as_if_undisturbed(name, often, make, tmp_path, rng, record, kills):
    phases, part = KINDS[name]
    moments = runs.drawn(kills // part, phases, rng) if often else [runs.TRAINING]
    kill = functools.partial(killed, rng=rng)
    kind = make(name, 60 if often else 24)
    record(dict(runs.disturb(kind, tmp_path, moments, rng, kill)))


def stopped(job: runs.Job, rng: random.Random, times: Counter) -> None:
    """Sends SIGTERM, and half of the times another one right after it: code 75, state saved."""
    start = time.monotonic()
    trained = job.phase() in (runs.TRAINING, runs.EVALUATING)
    # Before a process has reached its main function, a signal ends it as any other program.
    early = {-signal.SIGTERM} if job.phase() == runs.STARTING else set()
    job.signal(signal.SIGTERM, rng)
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.1))
        job.signal(signal.SIGTERM, rng)
        times['stopped twice'] += 1
    codes = job.codes()
    assert set(codes) == {0} or set(codes) <= {EXIT_REQUEUE} | early, codes
    times['longest stop, ms'] = max(
        times['longest stop, ms'], int(1000 * (time.monotonic() - start))
    )
    if trained and codes[0] == EXIT_REQUEUE:
        last = read_metrics(job.workdir / 'metrics.jsonl')[-1]['step']
        assert str(last) in [path.name for path in (job.workdir / 'checkpoints').iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['run', 'two processes', 'decoding'])
def test_what_is_stopped_loses_nothing(name, make, tiny, tmp_path, rng, record, kills):
    phases, part = STOPPED, 4
    if name == 'decoding':
        phases, part = {runs.EVALUATING: 1, runs.MEASURING: 3}, 10
        for split, pairs in (('train', PAIRS[:24]), ('validation', PAIRS[24:])):
            for side, language in enumerate(('en', 'de')):
                text = ''.join(f'{pair[side]}\n' for pair in pairs)
                (tmp_path / f'{split}.{language}').write_text(text)
        data = {'name': 'parallel', 'path': str(tmp_path), 'languages': 'en-de'}
        size = {'num_layers': 1, 'd_model': 16, 'scan_unroll': 1, 'context': 32}
        kind = runs.Kind(
            tiny(
                model=size | {'kind': 'encoder_decoder', 'source_context': 24},
                data=data | {'data_dir': str(tmp_path / 'data')},
                train={'num_steps': 8},
                decode={'beam': 2},
            ),
            str(tmp_path),
        )
    else:
        kind = make(name)
    times: Counter = Counter()
    stop = functools.partial(stopped, rng=rng, times=times)
    moments = runs.drawn(kills // part, phases, rng)
    record(dict(runs.disturb(kind, tmp_path, moments, rng, stop) + times))

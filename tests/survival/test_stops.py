"""SIGTERM at random moments: the state is saved, code 75, and the same command goes on."""

import functools
import random
import signal
import time
from collections import Counter

import pytest

from qkattn.jobs.signals import EXIT_REQUEUE
from qkattn.storage.metrics_log import read_metrics
from tests.survival import runs
from tests.train.test_tasks import PAIRS

WEIGHTS = {
    runs.COMPILING: 1,
    runs.TRAINING: 3,
    runs.SAVING: 3,
    runs.EVALUATING: 4,
    runs.MEASURING: 2,
    runs.ANYWHERE: 2,
}


def stopped(job: runs.Job, rng: random.Random, times: Counter) -> None:
    """Sends SIGTERM, and half of the times another one right after it."""
    start = time.monotonic()
    trained = job.at() in (runs.TRAINING, runs.EVALUATING)
    # Before a process has reached its main function, a signal ends it as any other program.
    early = {-signal.SIGTERM} if job.at() == runs.TOLD[0] else set()
    job.signal(signal.SIGTERM, rng)
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.1))
        job.signal(signal.SIGTERM, rng)
        times['stopped twice'] += 1
    codes = job.codes()
    assert set(codes) == {0} or set(codes) <= {EXIT_REQUEUE} | early, (codes, job.log())
    times['longest stop, ms'] = max(
        times['longest stop, ms'], int(1000 * (time.monotonic() - start))
    )
    if trained and codes[0] == EXIT_REQUEUE:
        last = read_metrics(job.workdir / 'metrics.jsonl')[-1]['step']
        assert str(last) in [path.name for path in (job.workdir / 'checkpoints').iterdir()]


def disturbed(config, count, weights, tmp_path, rng, number) -> Counter:
    straight, times = tmp_path / 'straight', Counter()
    runs.finish(config, straight, count)
    stop = functools.partial(stopped, rng=rng, times=times)
    moments = runs.drawn(number, weights, rng)
    return runs.disturb(config, straight, count, moments, rng, stop) + times


@pytest.mark.slow
@pytest.mark.parametrize('count', [1, 2])
def test_a_run_that_is_stopped_again_and_again_loses_nothing(
    count, small, tmp_path, rng, counts, kills
):
    counts(disturbed(small(count), count, WEIGHTS, tmp_path, rng, kills // 4))


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_decodes_ends_as_if_undisturbed(
    tiny, tmp_path, rng, counts, kills
):
    for split, pairs in (('train', PAIRS[:24]), ('validation', PAIRS[24:])):
        for side, language in enumerate(('en', 'de')):
            text = ''.join(f'{pair[side]}\n' for pair in pairs)
            (tmp_path / f'{split}.{language}').write_text(text)
    model = {'num_layers': 1, 'd_model': 16, 'scan_unroll': 1}
    config = tiny(
        model=model | {'kind': 'encoder_decoder', 'context': 32, 'source_context': 24},
        data={
            **{'name': 'parallel', 'path': str(tmp_path), 'languages': 'en-de'},
            'data_dir': str(tmp_path / 'data'),
        },
        train={'num_steps': 8},
        decode={'beam': 2},
    )
    weights = {runs.EVALUATING: 1, runs.MEASURING: 3}
    counts(disturbed(config, 1, weights, tmp_path, rng, kills // 10))

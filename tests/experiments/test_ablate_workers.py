"""Workers that one command starts: a measurement, a worker killed, and a parent asked to stop."""

import os
import signal
import time

import pytest

from qkattn.jobs import machine
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from tests.experiments.test_ablate import lines

FLAGS = (
    '--config=study.py',
    '--config.base.train.num_steps=200',
    '--config.base.train.log_every=20',
    '--config.base.train.eval_every=20',
    '--config.base.train.checkpoint_every=20',
)


def wait_for(look, process):
    """What `look` returns once that is something."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if (value := look()) is not None:
            return value
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError('nothing came')


def saved_at(out, step):
    """The process that trains a run which has saved a checkpoint at `step` or later."""
    for saved in out.glob('runs/*/checkpoints/[0-9]*'):
        run = saved.parents[1]
        if (
            saved.name.isdecimal()
            and int(saved.name) >= step
            and not (run / 'result.json').exists()
        ):
            return int((run / 'lock').read_text().split()[1])
    return None


@pytest.mark.slow
@pytest.mark.skipif(len(machine.usable_cores()) < 2, reason='needs two cores')
def test_killed_and_stopped_workers_reach_what_they_reach_undisturbed(
    start, script, tmp_path, monkeypatch
):
    # XLA splits loops by the number of cores, on which the last bits depend.
    monkeypatch.setenv('NPROC', '1')
    out = tmp_path / 'disturbed'
    flags = (*FLAGS, '--workdir=disturbed', '--workers=2')
    parent = start('ablate', *flags)
    os.kill(wait_for(lambda: saved_at(out, 20), parent), signal.SIGKILL)
    wait_for(lambda: saved_at(out, 60), parent)
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=100)
    assert parent.returncode == 75, errors
    assert errors.count('was ended by signal 9; it is started again, retry 1 of 3') == 1
    assert 'the same command resumes' in errors
    again = script('ablate', *flags)
    assert again.returncode == 0, again.stderr

    whole = script('ablate', *FLAGS, '--workdir=whole', '--workers=auto')
    assert whole.returncode == 0, whole.stderr
    assert '[1] ' in whole.stderr  # a worker on each of at least two cores

    results, expected = (lines(tmp_path / of / 'results.jsonl') for of in ('disturbed', 'whole'))
    assert len(results) == 6 and [r['val_loss'] for r in results] == [
        r['val_loss'] for r in expected
    ]
    starts = 0
    for run in out.glob('runs/*'):
        steps = [r['step'] for r in read_metrics(run / 'metrics.jsonl') if r['kind'] == 'train']
        assert steps == list(range(20, 220, 20))
        starts += len(read_json(run / 'provenance.json', {})['starts'])
    assert starts > 2

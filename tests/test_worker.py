"""Workers share a study: every cell once, whatever the others do."""

import dataclasses
import json
import os
import time

import pytest

from qkattn import claims, plan, runlog, study, worker
from qkattn.config import Config, ModelConfig, Study, TrialsConfig, TuningConfig
from qkattn.train.loop import Lost, Stopped

STUDY = Study(
    name='small',
    base=Config(
        model=ModelConfig(num_layers=1, context=16),
        trials=TrialsConfig(seeds=(0, 1), learning_rates=(1e-3, 2e-3, 4e-3)),
    ),
    variants=('qk/vo', 'shared_qk/vo'),
    sizes=('d_model=32',),
    tolerance=1e-2,
    tuning=TuningConfig(seeds=(10,)),
)


@pytest.fixture
def trained(monkeypatch):
    """The directories trained in, in order; a stand-in for training that is best at 4e-3."""
    done = []

    def train(config, workdir, *, lost, **_):
        assert not (workdir / 'result.json').exists() and not lost()
        workdir.mkdir(parents=True)
        results = [
            {
                'trial': trial,
                'status': 'finished',
                'val_loss': abs(trial['learning_rate'] - 4e-3) + trial['seed'],
            }
            for trial in config.trials.trials()
        ]
        runlog.write_json(workdir / 'result.json', results)
        done.append(workdir.name)
        return results

    monkeypatch.setattr(worker, 'train', train)
    return done


def test_a_worker_follows_every_chain_to_its_verdict(trained, tmp_path):
    path = worker.run(STUDY, tmp_path / 'out', command=['x'])
    lines = [json.loads(line) for line in (path / 'plan.jsonl').read_text().splitlines()]
    assert [(line['variant'], line['stage']) for line in lines] == [
        (variant, stage)
        for variant in STUDY.variants
        for stage in ('screening', 'screening', 'verdict')
    ]
    assert sorted(trained) == sorted(os.path.basename(line['directory']) for line in lines)
    results = [json.loads(line) for line in (path / 'results.jsonl').read_text().splitlines()]
    assert [r['cell'] for r in results] == [
        line['cell'] for line in lines for _ in range(line['trials'])
    ]
    assert runlog.read_json(path / 'study.json')['name'] == 'small'
    assert not claims.holders(path / 'claims')

    worker.run(STUDY, path)
    assert len(trained) == len(lines)


def test_a_held_cell_is_left_alone_and_taken_when_it_is_given_up(trained, tmp_path):
    path = tmp_path / 'out'
    first = plan.cells(STUDY, study.arms(STUDY), lambda cell: None)[0]
    held = claims.claim(path / 'claims', first.id, expiry=2.0)
    os.utime(next((path / 'claims').iterdir()), None)
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, '_wait', lambda *_: held.release())
        worker.run(STUDY, path, expiry=2.0)
    assert time.monotonic() - started < 2
    # The other arm came first, to its end.
    assert [name.startswith('shared_qk') for name in trained] == [True] * 3 + [False] * 3


@pytest.mark.parametrize('error', [runlog.InUseError('in use'), Lost('taken over')], ids=str)
def test_a_cell_that_is_in_use_or_lost_is_tried_again_later(trained, tmp_path, monkeypatch, error):
    train, refused = worker.train, []

    def once(config, workdir, **keywords):
        if not refused:
            refused.append(workdir.name)
            raise error
        return train(config, workdir, **keywords)

    monkeypatch.setattr(worker, 'train', once)
    worker.run(STUDY, tmp_path / 'out')
    assert len(trained) == 6 and trained.count(refused[0]) == 1 and trained[0] != refused[0]


def test_waiting_ends_on_request(trained, tmp_path, monkeypatch):
    path = tmp_path / 'out'
    single = dataclasses.replace(STUDY, tuning=TuningConfig(), variants=('qk/vo',))
    (cell,) = plan.cells(single, study.arms(single), lambda cell: None)
    stop = runlog.StopRequest()
    stop.requested = True
    monkeypatch.setattr(worker.runlog, 'StopRequest', lambda: stop)
    with claims.claim(path / 'claims', cell.id, expiry=60.0), pytest.raises(Stopped):
        worker.run(single, path, expiry=60.0)
    assert not trained

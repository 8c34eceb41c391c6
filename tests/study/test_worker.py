"""Workers share a study: every run once, whatever the others do."""

import dataclasses
import json
import os
import signal
import time

import pytest

from qkattn.config import Config, TuningConfig, from_json
from qkattn.errors import CheckpointError, ConfigError, InUseError, Lost, RunDirectoryError, Stopped
from qkattn.run import leases
from qkattn.run.records import read_json, write_json
from qkattn.study import plan, worker
from qkattn.study.arms import build_arms
from tests.study.test_plan import STUDY


@pytest.fixture
def trained(monkeypatch):
    """The directories trained in, in order; a stand-in for training that is best at 4e-3."""
    done = []

    def train(config, workdir, *, lost, **_):
        assert not lost()
        if (workdir / 'result.json').exists():
            return
        trials = [(trial, abs(trial['learning_rate'] - 4e-3)) for trial in config.trials.trials()]
        results = [
            {'trial': trial, 'status': 'finished', 'val_loss': away + trial['seed']}
            for trial, away in trials
        ]
        workdir.mkdir(parents=True)
        write_json(workdir / 'result.json', results)
        done.append(workdir.name)

    monkeypatch.setattr(worker, 'train', train)
    monkeypatch.setattr(worker, 'rows_of', lambda config: None)
    return done


@pytest.fixture
def train_first(monkeypatch, trained):
    """Sets what happens before a run is trained, given its config and directory."""
    train = worker.train

    def replace(first):
        def both(config, workdir, **keywords):
            first(config, workdir)
            train(config, workdir, **keywords)

        monkeypatch.setattr(worker, 'train', both)

    return replace


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_worker_follows_every_chain_to_its_verdict(trained, tmp_path):
    path = worker.run(STUDY, tmp_path / 'out', command=['x'])
    planned = lines(path / 'plan.jsonl')
    stages = ('screening', 'screening', 'verdict')
    assert [(line['variant'], line['stage']) for line in planned] == [
        (variant, stage) for variant in STUDY.variants for stage in stages
    ]
    assert sorted(trained) == sorted(os.path.basename(line['directory']) for line in planned)
    assert [result['run'] for result in lines(path / 'results.jsonl')] == [
        line['run'] for line in planned for _ in range(line['trials'])
    ]
    assert read_json(path / 'study.json')['name'] == 'small'
    assert not leases.holders(path / 'leases')
    # The same study again has nothing to train, and a study may grow.
    worker.run(STUDY, path)
    assert len(trained) == len(planned)
    worker.run(dataclasses.replace(STUDY, variants=(*STUDY.variants, 'qk/no_v')), path)
    assert len(trained) == 9


def test_a_held_run_is_left_alone_and_taken_when_it_is_given_up(trained, tmp_path):
    path = tmp_path / 'out'
    first = plan.runs(STUDY, build_arms(STUDY), lambda run: None)[0]
    held = leases.acquire(path / 'leases', first.id, expiry=2.0)
    os.utime(next((path / 'leases').iterdir()), None)
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, '_wait', lambda *_: held.release())
        worker.run(STUDY, path, expiry=2.0)
    assert time.monotonic() - started < 2
    # The other arm came first, to its end.
    assert [name.startswith('shared_qk') for name in trained] == [True] * 3 + [False] * 3


@pytest.mark.parametrize('error', [InUseError('in use'), Lost('taken over')], ids=str)
def test_a_run_that_is_in_use_or_lost_is_tried_again_later(trained, train_first, tmp_path, error):
    refused = []

    def once(config, workdir):
        if not refused:
            refused.append(workdir.name)
            raise error

    train_first(once)
    worker.run(STUDY, tmp_path / 'out')
    assert len(trained) == 6 and trained.count(refused[0]) == 1 and trained[0] != refused[0]


def test_waiting_ends_on_request(trained, tmp_path, monkeypatch):
    path = tmp_path / 'out'
    single = dataclasses.replace(STUDY, tuning=TuningConfig(), variants=('qk/vo',))
    (run,) = plan.runs(single, build_arms(single), lambda run: None)
    monkeypatch.setattr(worker.time, 'sleep', lambda _: signal.raise_signal(signal.SIGTERM))
    with leases.acquire(path / 'leases', run.id, expiry=60.0), pytest.raises(Stopped):
        worker.run(single, path, expiry=60.0)
    assert not trained


def test_a_request_between_runs_is_heard(trained, train_first, tmp_path):
    train_first(lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match='between two runs'):
        worker.run(STUDY, tmp_path / 'out')
    assert len(trained) == 1 and not leases.holders(tmp_path / 'out/leases')


def test_a_run_that_cannot_be_trained_does_not_stop_the_others(trained, train_first, tmp_path):
    def broken(config, workdir):
        if config.model.score == 'qk':
            raise CheckpointError('every checkpoint is damaged')

    train_first(broken)
    with pytest.raises(ConfigError, match='1 run could not be trained: .*damaged'):
        worker.run(STUDY, tmp_path / 'out')
    assert len(trained) == 3


def test_what_is_planned_and_what_is_left_are_of_one_moment(trained, tmp_path, monkeypatch):
    """Another worker ends the last open run just after the plan was made without it."""
    one = dataclasses.replace(STUDY, variants=('qk/vo',))
    write_atomic = worker.write_atomic

    def others_are_quick(path, text):
        write_atomic(path, text)
        for planned in lines(path) if path.name == 'plan.jsonl' else ():
            directory = path.parent / planned['directory']
            if planned['stage'] == 'screening' and not directory.exists():
                config = from_json(Config, planned['config'])
                worker.train(config, directory, lost=lambda: False)

    monkeypatch.setattr(worker, 'write_atomic', others_are_quick)
    path = worker.run(one, tmp_path / 'out')
    stages = [line['stage'] for line in lines(path / 'plan.jsonl')]
    assert stages == ['screening', 'screening', 'verdict']


FOUR_SEEDS = dataclasses.replace(
    STUDY.base, trials=dataclasses.replace(STUDY.base.trials, seeds=(0, 1, 2, 3))
)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'margin': 0.01}, 'another margin, 0.005 instead of 0.01'),
        ({'tuning': TuningConfig(seeds=(10, 11))}, 'another tuning'),
        ({'base': FOUR_SEEDS}, r'another seeds, \[0, 1, 2\] instead of \[0, 1, 2, 3\]'),
        ({'variants': ('qk/vo', 'qk/no_v')}, "whose variants have 'shared_qk/vo'"),
    ],
    ids=['margin', 'tuning', 'seeds', 'variants'],
)
def test_a_directory_keeps_the_study_that_it_began_with(trained, tmp_path, fields, message):
    path = worker.run(STUDY, tmp_path / 'out')
    before = {p: p.read_bytes() for p in path.glob('*.json*')}
    with pytest.raises(ConfigError, match=message):
        worker.run(dataclasses.replace(STUDY, **fields), path)
    assert {p: p.read_bytes() for p in path.glob('*.json*')} == before


def test_a_directory_that_takes_no_files_is_refused(trained):
    with pytest.raises(RunDirectoryError, match='workdir=/proc cannot be used'):
        worker.run(STUDY, '/proc')


def test_what_no_run_can_do_without_is_said_once(trained, tmp_path, monkeypatch):
    def absent(config):
        raise ConfigError(f'no data {config.data.name}')

    monkeypatch.setattr(worker, 'rows_of', absent)
    with pytest.raises(ConfigError, match='^no data stdlib$'):
        worker.run(STUDY, tmp_path / 'out')
    assert not trained and not (tmp_path / 'out').exists()

"""A run that is stopped, killed or damaged ends exactly like one that was never touched."""

import dataclasses
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from qkattn import data
from qkattn.config import MeshConfig, TrainConfig
from qkattn.errors import CheckpointError, ConfigError, Lost, Stopped
from qkattn.jobs.display import Progress
from qkattn.jobs.signals import EXIT_REQUEUE
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json, with_checksum
from qkattn.train import loop, measurements, program, train
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.start import Divergences, pauses
from tests.storage.test_sinks import events

pytestmark = pytest.mark.usefixtures('programs_kept')

# Each start is a process of its own, forked from one that has imported everything.
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['qkattn.train'])


def to_end(config, workdir) -> None:
    try:
        train(config, workdir)
    except Stopped:
        sys.exit(EXIT_REQUEUE)


def outcome(workdir: Path) -> dict:
    """Everything of a finished run that must not depend on interruptions."""
    records = read_metrics(workdir / 'metrics.jsonl')
    results = read_json(workdir / 'result.json', [{}])
    kept = ('trial', 'status', 'val_loss', 'test_loss', 'num_tokens')
    return {
        'metrics': records,
        'documents': (workdir / 'documents.json').read_text(),
        'results': [{k: r[k] for k in kept} for r in results],
    }


def final_state(config, workdir: Path) -> list[np.ndarray]:
    built = program.build(config, 'map')
    checkpoints = Checkpoints(workdir / 'checkpoints')
    state, _ = checkpoints.restore(built.abstract_state)
    checkpoints.close()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope='module')
def trained(data_dir, tmp_path_factory):
    """A finished run, by its config: (its directory, its results)."""
    return functools.cache(
        lambda config: (path := tmp_path_factory.mktemp('trained') / 'run', train(config, path))
    )


@pytest.fixture
def small(tiny):
    """A run of two trials, quick to compile."""
    return functools.partial(tiny, model={'num_layers': 1, 'd_model': 16})


def test_a_run_stopped_and_killed_at_random_ends_bitwise_equal(tiny, trained, tmp_path):
    """A SIGTERM, which saves and asks to be started again, and a SIGKILL; more: tests/survival."""
    config = tiny(
        model={'dropout': 0.1, 'num_layers': 1, 'd_model': 16},
        optimizer={'name': 'muon'},
        train={'num_steps': 24},
    )
    straight, interrupted = trained(config)[0], tmp_path / 'run'
    metrics = interrupted / 'metrics.jsonl'
    seed = int.from_bytes(os.urandom(4))
    print(f'kill times drawn with seed {seed}')
    rng = random.Random(seed)
    for stop in (signal.SIGTERM, signal.SIGKILL):
        target = 1 if stop == signal.SIGTERM else rng.randrange(1, 20)
        process = FORKS.Process(target=to_end, args=(config, interrupted))
        process.start()
        while process.is_alive():
            lines = metrics.read_bytes().splitlines() if metrics.exists() else []
            steps = [json.loads(line)['step'] for line in lines[:-1]]
            if steps and steps[-1] >= target:
                os.kill(process.pid, stop)
                break
            time.sleep(0.002)
        process.join(300)
        if stop == signal.SIGTERM:
            assert process.exitcode == EXIT_REQUEUE
            saved = max(int(p.name) for p in (interrupted / 'checkpoints').iterdir())
            assert read_metrics(metrics)[-1]['step'] == saved < 24
    train(config, interrupted)
    assert outcome(interrupted) == outcome(straight)
    jax.tree.map(
        np.testing.assert_array_equal, *(final_state(config, d) for d in (interrupted, straight))
    )
    steps = [r['step'] for r in outcome(straight)['metrics'] if r['kind'] == 'train']
    assert steps == list(range(1, 25))


def test_the_display_gets_the_logged_losses_and_the_count_of_what_follows(
    small, tmp_path, monkeypatch
):
    losses, follows, phases, phase = {}, [], Counter(), Progress.phase
    monkeypatch.setattr(Progress, 'update', lambda _, step, loss: losses.update({step: loss}))
    monkeypatch.setattr(Progress, 'begin', lambda _, step, **counts: follows.append(counts))
    monkeypatch.setattr(
        Progress, 'phase', lambda self, name: phases.update([name]) or phase(self, name)
    )
    train(small(), tmp_path)
    records = read_metrics(tmp_path / 'metrics.jsonl')
    logged = {record['step']: record['loss'] for record in records if record['kind'] == 'train'}
    assert {step: loss.tolist() for step, loss in losses.items()} == logged
    assert all(isinstance(loss, np.ndarray) for loss in losses.values())
    assert follows == [{'evaluating': 4, 'saving': 3}]
    assert phases & Counter(follows[0]) == follows[0] and phases['evaluating'] == 4


def test_evaluations_and_checkpoints_to_come_include_those_after_the_last_step():
    uneven = TrainConfig(num_steps=10, eval_every=4, checkpoint_every=4)
    splits = 'train', 'validation', 'test'
    assert pauses(uneven, 0, splits) == {'evaluating': 4, 'saving': 3}
    assert pauses(uneven, 4, splits[:2]) == {'evaluating': 2, 'saving': 2}


@pytest.fixture
def unfinished(small, trained, tmp_path):
    """Its config, a copy of the run in `tmp_path` whose results were lost, and those results."""
    path, results = trained(small())
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'result.json').unlink()
    return small(), tmp_path, results


def test_a_finished_run_returns_its_results_and_is_not_touched(small, trained):
    path, results = trained(small())
    before = {p: p.stat().st_mtime_ns for p in (path / 'checkpoints').rglob('*')}
    assert train(small(), path) == results
    assert before == {p: p.stat().st_mtime_ns for p in (path / 'checkpoints').rglob('*')}
    with pytest.raises(ConfigError, match=r'train.num_steps: 12 -> 16'):
        train(small(train={'num_steps': 16}), path)


def test_a_validation_after_the_last_step_is_not_repeated(small, tmp_path, monkeypatch):
    splits, config = [], small()

    def evaluate(*args, **options):
        splits.append(args[4])
        return measurements.evaluate(*args, **options)

    monkeypatch.setattr(loop, 'evaluate', evaluate)
    results = train(config, tmp_path)
    assert splits == [*['validation'] * (config.train.num_steps // config.train.eval_every), 'test']
    (tmp_path / 'result.json').unlink()
    splits.clear()
    again = train(config, tmp_path)
    assert splits == ['validation', 'test']
    fields = ('val_loss', 'test_loss')
    assert [[r[f] for f in fields] for r in again] == [[r[f] for f in fields] for r in results]


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(unfinished, trained, caplog):
    config, path, want = unfinished
    damage(path / 'checkpoints' / '12')
    got = train(config, path)
    assert [r['val_loss'] for r in got] == [r['val_loss'] for r in want]
    assert 'checkpoint 12 is damaged' in caplog.text
    straight = trained(config)[0]
    assert read_metrics(path / 'metrics.jsonl') == read_metrics(straight / 'metrics.jsonl')


@pytest.mark.parametrize('end', [0, -1])
def test_a_finished_run_that_has_lost_records_is_named(small, trained, tmp_path, caplog, end):
    path, results = trained(small())
    shutil.copytree(path, tmp_path / 'run')
    metrics = tmp_path / 'run/metrics.jsonl'
    metrics.write_bytes(metrics.read_bytes()[:end])
    assert train(small(), tmp_path / 'run') == results
    assert 'metrics.jsonl lacks the last records of a finished run' in caplog.text


@pytest.mark.parametrize('removed', [False, True])
def test_metrics_that_were_changed_or_removed_before_a_resume_are_named(unfinished, removed):
    config, path, _ = unfinished
    metrics = path / 'metrics.jsonl'
    if removed:
        metrics.unlink()
    else:
        metrics.write_bytes(metrics.read_bytes().replace(b'1', b'2', 1))
    with pytest.raises(ConfigError, match=r'metrics\.jsonl.*restore the file from a copy or use'):
        train(config, path)
    assert sorted(p.name for p in (path / 'checkpoints').iterdir()) == ['12', '8']


def test_metrics_that_are_changed_while_a_run_trains_are_named_at_its_end(small, tmp_path):
    asked = []

    def lost():
        asked.append(None)
        if len(asked) == 7:
            with (tmp_path / 'metrics.jsonl').open('r+b') as file:
                file.seek(20)
                file.write(b'9')
        return False

    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 1 .*; restore the file from'):
        train(small(), tmp_path, lost=lost)
    assert not (tmp_path / 'result.json').exists() and (tmp_path / 'checkpoints/12').exists()


def test_a_run_of_an_earlier_version_resumes_without_what_its_checkpoint_lacks(unfinished, trained):
    config, path, _ = unfinished
    shutil.rmtree(path / 'checkpoints/12')
    file = path / 'checkpoints/8/record/metadata'
    record = json.loads(file.read_text())
    assert record.pop('crc32') and record.pop('metrics')['lines'] == 10
    file.write_text(json.dumps(with_checksum(record)))
    train(config, path)
    assert outcome(path) == outcome(trained(config)[0])


def test_a_run_killed_before_its_results_were_written_repeats_no_record(unfinished, trained):
    config, path, want = unfinished
    assert read_metrics(path / 'metrics.jsonl')[-1]['kind'] == 'final'
    (path / 'documents.json').unlink()
    train(config, path)
    assert outcome(path) == outcome(trained(config)[0])
    assert [r['kind'] for r in read_metrics(path / 'metrics.jsonl')].count('final') == 1


def test_nothing_but_damaged_checkpoints_is_an_error(unfinished):
    config, path, _ = unfinished
    for step in (path / 'checkpoints').iterdir():
        damage(step)
    with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
        train(config, path)


def test_other_data_is_refused(unfinished, monkeypatch):
    config, path, _ = unfinished
    real = data.tokens.TokenDataset.identity
    monkeypatch.setattr(
        data.tokens.TokenDataset, 'identity', lambda self: {**real(self), 'version': 'other'}
    )
    only = r'was trained on other data than the present dataset \(version: "\S+" -> "other"\); use'
    with pytest.raises(CheckpointError, match=only):
        train(config, path)


def test_a_run_restores_onto_another_mesh(unfinished):
    """The config hash leaves the mesh out; losses go on as they would have, to rounding."""
    config, path, want = unfinished
    shutil.rmtree(path / 'checkpoints' / '12')
    got = train(dataclasses.replace(config, mesh=MeshConfig(data=2, tensor=2)), path)
    for g, w in zip(got, want, strict=True):
        assert abs(g['val_loss'] - w['val_loss']) < 1e-4


@pytest.mark.slow
def test_layers_of_several_variants_resume_bitwise_and_on_another_mesh(small, trained, tmp_path):
    pattern = {'num_layers': 3, 'd_model': 16, 'pattern': 'qk/vo,qk/no_v'}
    config = small(model=pattern, trials={'seeds': (0,)}, train={'num_steps': 8})
    straight, want = trained(config)
    dispatches = iter(range(8))
    with pytest.raises(Lost, match='step 7'):
        train(config, tmp_path, lost=lambda: next(dispatches) == 6)
    train(config, tmp_path)
    assert outcome(tmp_path) == outcome(straight)
    shutil.rmtree(tmp_path / 'checkpoints' / '8')
    (tmp_path / 'result.json').unlink()
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    got = train(dataclasses.replace(config, mesh=mesh), tmp_path)
    for g, w in zip(got, want, strict=True):
        assert abs(g['val_loss'] - w['val_loss']) < 1e-4


def test_a_lost_run_saves_nothing_more_and_can_be_gone_on_with(small, trained, outside):
    """A run that another process has taken over is let go; its sinks get every record once."""
    asked, tmp_path = [], outside
    sinks = ('tensorboard', 'csv_sink:CsvSink(digits=17)')

    def lost():
        asked.append(None)
        return len(asked) == 7  # dispatches of one step; checkpoints are every four

    with pytest.raises(Lost, match='taken over at step 7'):
        train(small(train={'sinks': sinks}), tmp_path / 'run', lost=lost)
    assert not (tmp_path / 'run/result.json').exists()
    assert sorted(p.name for p in (tmp_path / 'run/checkpoints').iterdir()) == ['4']

    again = train(small(train={'sinks': sinks}), tmp_path / 'run')
    assert [r['val_loss'] for r in again] == [r['val_loss'] for r in trained(small())[1]]
    steps = [r['step'] for r in read_metrics(tmp_path / 'run/metrics.jsonl')]
    assert steps == sorted(steps) and steps.count(5) == 1
    logged = {
        f'{record["step"]},{record["kind"]}/{name},{trial}': value
        for record in read_metrics(tmp_path / 'run/metrics.jsonl')
        for name, values in record.items()
        if isinstance(values, list) and name != 'trials'
        for trial, value in enumerate(values)
    }
    lines = (tmp_path / 'run/log.csv').read_text().splitlines()
    assert len(lines) == len(logged)
    assert {key: float(value) for key, _, value in (x.rpartition(',') for x in lines)} == logged
    for trial in (0, 1):
        for name, values in events(tmp_path / f'run/tensorboard/seed={trial}').items():
            want = {step: logged[f'{step},{name},{trial}'] for step in values}
            assert values == pytest.approx(want, rel=1e-6)
            steps = {'train': range(1, 13), 'eval': (4, 8, 12), 'final': (12,)}
            assert list(values) == list(steps[name.partition('/')[0]])


def test_a_diverged_trial_says_at_which_step_also_when_it_was_resumed(small, tmp_path, caplog):
    config = small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)}, train={'num_steps': 8})
    dispatches = iter(range(8))
    with pytest.raises(Lost):
        train(config, tmp_path, lost=lambda: next(dispatches) == 5)
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['4']
    fine, diverged = train(config, tmp_path)
    losses = {r['step']: r['loss'] for r in read_metrics(tmp_path / 'metrics.jsonl') if 'loss' in r}
    first = min(step for step, (_, loss) in losses.items() if loss is None)
    assert 1 < first < 4 and losses[first][0] is not None
    assert (fine['status'], fine['diverged_at']) == ('finished', None)
    assert (diverged['status'], diverged['diverged_at']) == ('diverged', first)
    (warning,) = [of.message for of in caplog.records if 'diverged' in of.message]
    named = f'seed 0 at learning rate 1e+30 at step {first}'
    assert warning == f'{tmp_path}: 1 of 2 trials diverged: {named}'


def test_the_step_of_a_divergence_is_counted_within_a_dispatch():
    nan = np.nan
    known = Divergences(np.array([True, True, False, False]), [None, None, 2, None])
    known.add(6, np.array([[1.0, 1.0, nan, nan], [1.0, nan, nan, nan], [1.0, nan, nan, nan]]))
    known.add(9, np.array([[1.0, nan, nan, nan]] * 3))
    assert known.record() == [None, 5, 2, None]  # the last one diverged before steps were kept
    assert Divergences(np.array([False])).record() == [None]


def damage(step: Path) -> None:
    """Flips one bit in the middle of the largest array file."""
    files = [p for p in (step / 'state').rglob('*') if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    state = {'step': jax.numpy.int32(0), 'trials': {'w': jax.numpy.zeros((1, 3))}}
    checkpoints = Checkpoints(tmp_path / 'c')
    for step, loss in ((1, 3.0), (2, 1.0), (3, float('nan')), (4, 2.0), (5, 2.5)):
        checkpoints.save(step, state, {'data': {}, 'train_seconds': 0.0}, loss)
    checkpoints.close()
    assert Checkpoints(tmp_path / 'c').steps() == [2, 4, 5]

"""A run from its directory to its results: stopped, lost or damaged, it ends as if undisturbed."""

import dataclasses
import math
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import Config, fingerprint, to_json
from qkattn.data import pipeline
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokens import TokenDataset
from qkattn.errors import CheckpointError, ConfigError, Lost, Stopped
from qkattn.jobs.display import Progress
from qkattn.metrics import TIMES
from qkattn.storage import run_directory
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import metrics_of, read_json, write_json
from qkattn.train import loop, program, results
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.loop import train, with_divergences
from qkattn.train.timing import PARTS
from qkattn.train.trials import Stack
from tests.lanes import slow_except
from tests.refusals import refused
from tests.runs import assert_same_run, results_of, without_times
from tests.train.conftest import PAIRS

pytestmark = pytest.mark.usefixtures('programs_kept')


def at_call(number: int, call):
    """A function `lost` for `train` that calls `call` the `number`-th time that it is called.

    The run is lost if `call` returns a true value. `train` calls `lost` once after each dispatch,
    and once before each save.
    """
    asked = iter(range(1, 1000))
    return lambda: bool(call()) if next(asked) == number else False


# For copies of a finished run that resume at its last step.
no_result = shutil.ignore_patterns('result.json')


def saved_steps(path: Path) -> list[int]:
    return sorted(int(step.name) for step in (path / 'checkpoints').iterdir())


# A run that ends


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of a task that was trained twice."""

    task: str
    config: Config
    path: Path
    other_path: Path

    @property
    def results(self) -> list[dict]:
        return results_of(self.path)


TASKS = ['masked', 'separate documents', 'translation', 'causal probe', 'labelling probe']


@pytest.fixture(scope='module', params=slow_except(['masked'], TASKS))
def finished(request, task, built_once, tmp_path_factory):
    """A run of each task, trained twice in different directories."""
    config = task(request.param)
    directory = tmp_path_factory.mktemp('finished')
    run = Finished(request.param, config, directory / 'a', directory / 'b')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        for path in (run.path, run.other_path):
            train(config, path)
    return run


def test_a_run_is_the_same_when_it_is_trained_again(finished):
    assert_same_run(finished.path, finished.other_path)


def test_trials_of_different_seeds_have_different_losses(finished):
    first, second = finished.results
    assert first['val_loss'] != second['val_loss']


def test_the_time_of_training_includes_that_of_its_parts(finished):
    result = finished.results[0]
    assert TIMES.keys() <= result.keys()
    assert sum(result[part] for part in PARTS) < result['train_seconds']


def test_results_are_plausible_on_every_split(finished):
    result = finished.results[0]
    rows = rows_of(finished.config)
    for split in rows.splits[1:]:
        prefix = {'validation': 'val', 'test': 'test'}[split]
        assert 0.3 < result[f'{prefix}_loss'] < 1.3 * math.log(finished.config.model.vocab_size)
        for metric in ('accuracy', 'solved'):
            assert 0 <= result[f'{prefix}_{metric}'] <= 1
        assert (result[f'{prefix}_bits_per_byte'] is None) == ('probe' in finished.task)


def test_translators_alone_are_scored_by_their_translations(finished):
    result = finished.results[0]
    assert ('val_bleu' in result) == (finished.task == 'translation')
    if finished.task == 'translation':
        assert result['val_num_sentences'] == 6
        assert 0 <= result['val_bleu'] <= 100
        assert result['test_loss'] is None
        assert result['test_accuracy'] is None
        assert result['eval_tokens'] == sum(len(de) + 1 for _, de in PAIRS[24:])


def test_the_last_evaluation_that_is_logged_is_that_of_the_results(finished):
    records = read_metrics(finished.path / 'metrics.jsonl')
    evaluations = [record for record in records if record['kind'] == 'eval']
    assert [record['step'] for record in evaluations] == [4, 8]
    assert evaluations[-1]['val_solved'] == [r['val_solved'] for r in finished.results]


def test_a_run_logs_evaluates_and_saves_at_its_steps(small, tmp_path, monkeypatch):
    losses = {}
    phases = Counter()
    splits = []
    saved = []
    phase = Progress.phase
    evaluate = Stack.evaluate
    save = Checkpoints.save
    monkeypatch.setattr(Progress, 'update', lambda _, step, loss: losses.update({step: loss}))
    monkeypatch.setattr(Progress, 'phase', lambda *a: phases.update(a[1:]) or phase(*a))
    monkeypatch.setattr(Stack, 'evaluate', lambda *a: splits.append(a[1]) or evaluate(*a))
    monkeypatch.setattr(Checkpoints, 'save', lambda *a: saved.append(a[1]) or save(*a))
    train(small(train={'checkpoint_every': 2, 'eval_every': 5}), tmp_path)
    records = read_metrics(tmp_path / 'metrics.jsonl')
    assert [r['step'] for r in records if r['kind'] == 'eval'] == [5, 10, 12]
    logged = {record['step']: record['loss'] for record in records if record['kind'] == 'train'}
    assert {step: loss.tolist() for step, loss in losses.items()} == logged
    assert list(logged) == list(range(1, 13))
    assert (phases['evaluating'], phases['saving']) == (4, 6)
    assert saved == [2, 4, 6, 8, 10, 12]
    assert splits == ['validation'] * 3 + ['test']  # the last validation is not repeated


def test_training_records_hold_speeds_of_the_whole_run(small_run):
    records = read_metrics(small_run.path / 'metrics.jsonl')
    training = [record for record in records if record['kind'] == 'train']
    assert len(training) == 12
    for record in training:
        assert record['tokens_per_second'] > 0
        assert 0 <= record['input_wait_fraction'] <= 1
        assert 'mfu' not in record  # the peak rate of a CPU is not known


def test_mfu_is_the_flops_of_the_model_over_those_of_its_devices(small, tmp_path, monkeypatch):
    peak = 1e12
    monkeypatch.setattr(loop, 'peak_flops', lambda device_kind: {'cpu': peak}[device_kind])
    config = small(train={'num_steps': 4, 'eval_every': 4, 'checkpoint_every': 4})
    train(config, tmp_path)
    record = read_metrics(tmp_path / 'metrics.jsonl')[0]
    # Of two trials, each with a forward pass and a backward pass of twice its cost.
    flops_per_token = 3 * results_of(tmp_path)[0]['flops_per_token']
    flops_per_second = record['tokens_per_second'] * flops_per_token
    assert record['mfu'] == pytest.approx(flops_per_second / peak)


def test_a_finished_run_is_not_touched(small_run, tmp_path):
    config, source = small_run
    path = shutil.copytree(source, tmp_path / 'run')
    before = {p: p.stat().st_mtime_ns for p in (path / 'checkpoints').rglob('*')}
    assert train(config, path) == results_of(source)
    assert before == {p: p.stat().st_mtime_ns for p in (path / 'checkpoints').rglob('*')}


def test_further_metrics_change_nothing_else_of_a_run(small, small_run, tmp_path, outside):
    results = train(small(train={'metrics': ('confidence:top(k=50)',)}), tmp_path)
    records_without = read_metrics(small_run.path / 'metrics.jsonl')
    records = read_metrics(tmp_path / 'metrics.jsonl')
    *_, last_evaluation, final = records
    further = last_evaluation.keys() | final.keys()
    further -= records_without[-2].keys() | records_without[-1].keys()
    records_with = [{n: v for n, v in record.items() if n not in further} for record in records]
    assert without_times(records_with) == without_times(records_without)
    # Results describe a metric from outside, for those who read them without its module.
    stored = read_json(tmp_path / 'result.json', [{}])
    assert stored == results
    assert 0 < results[0]['val_accuracy'] < results[0]['val_top_50'] < 1
    assert metrics_of(stored[0])['top_50'].text(0.5) == 'top 50 50.00 %'
    for name in ('val_top_50', 'test_top_50'):
        assert final[name] == [result[name] for result in results]
    assert last_evaluation['val_top_50'] == final['val_top_50']


# A run that is stopped or lost


def test_a_run_that_a_signal_stops_after_a_step_resumes_there(small_run, tmp_path):
    config, straight = small_run
    # A question follows each step, and one precedes the save at step 4: from step 3 on, the fourth
    # question follows step 6.
    for step, question in ((3, 3), (6, 4)):
        stop = at_call(question, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped, match=f'stopped at step {step} of 12, state saved'):
            train(config, tmp_path, lost=stop)
        assert step in saved_steps(tmp_path)
        assert read_metrics(tmp_path / 'metrics.jsonl')[-1]['step'] == step
    train(config, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_lost_run_saves_nothing_more(small_run, tmp_path):
    config, straight = small_run
    with pytest.raises(Lost, match='taken over at step 7'):  # checkpoints are every four
        train(config, tmp_path, lost=at_call(8, lambda: True))
    assert not (tmp_path / 'result.json').exists() and saved_steps(tmp_path) == [4]
    train(config, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_stopped_evaluation_comes_first_in_the_next_start(small_run, tmp_path, monkeypatch):
    """Four starts: three are stopped in the evaluation of step 8, one is lost right after it."""
    config, straight = small_run
    evaluate = pipeline.eval_batches
    record = results.eval_record
    splits = []
    lost = []
    stop_in = None

    def stopped(rows, split, **options):
        splits.append(split)
        if len(splits) == stop_in:
            signal.raise_signal(signal.SIGTERM)
        yield from evaluate(rows, split, **options)
        assert len(splits) != stop_in, 'the evaluation goes on'

    monkeypatch.setattr(pipeline, 'eval_batches', stopped)
    for stop_in in (2, 1, 1):  # noqa: B007 (read by the batches)
        splits.clear()
        with pytest.raises(Stopped, match='stopped at step 8 of 12, state saved'):
            train(config, tmp_path)
        last = read_metrics(tmp_path / 'metrics.jsonl')[-1]
        assert (last['kind'], last['step']) == ('train', 8) and saved_steps(tmp_path)[-1] == 8
    stop_in = None
    monkeypatch.setattr(results, 'eval_record', lambda *a: lost.append(1) or record(*a))
    with pytest.raises(Lost):
        train(config, tmp_path, lost=lambda: bool(lost))
    assert read_metrics(tmp_path / 'metrics.jsonl')[-1]['kind'] == 'eval'
    train(config, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_run_that_is_lost_in_an_evaluation_saves_nothing(small_run, tmp_path, monkeypatch):
    lost = []
    record = results.eval_record
    monkeypatch.setattr(results, 'eval_record', lambda *a: lost.append(1) or record(*a))
    with pytest.raises(Lost, match='taken over at step 4'):
        train(small_run.config, tmp_path, lost=lambda: bool(lost))
    assert not saved_steps(tmp_path)


# A run that is resumed


def test_results_name_the_code_of_every_start_that_they_come_from(small_run, tmp_path, monkeypatch):
    config, _ = small_run
    # The code at two starts that are stopped and save, at one that is lost, and at the last.
    first = {'commit': 'a', 'dirty': True}
    lost = {'commit': 'c', 'dirty': False}
    last = {'commit': 'b', 'dirty': False}
    monkeypatch.setattr(run_directory, 'git_state', lambda: first)
    for question in (3, 4):
        stop = at_call(question, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped):
            train(config, tmp_path, lost=stop)
    monkeypatch.setattr(run_directory, 'git_state', lambda: lost)
    with pytest.raises(Lost):  # which saves nothing
        train(config, tmp_path, lost=at_call(1, lambda: True))
    monkeypatch.setattr(run_directory, 'git_state', lambda: last)

    # Results name the code of the last start, and once that of the two stopped ones.
    for result in train(config, tmp_path):
        assert result['provenance']['git'] == last
        assert result['provenance']['earlier'] == [{'git': first, 'imported': {}}]


def test_metrics_that_are_changed_while_a_run_trains_are_named_at_its_end(small, tmp_path):
    # Writes over a byte of the first line.
    def change():
        with (tmp_path / 'metrics.jsonl').open('r+b') as file:
            file.seek(20)
            file.write(b'9')

    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 1 .*; restore the file from'):
        train(small(), tmp_path, lost=at_call(7, change))
    assert not (tmp_path / 'result.json').exists() and (tmp_path / 'checkpoints/12').exists()


def test_resuming_on_other_data_is_refused(small_run, tmp_path, monkeypatch):
    config, source = small_run
    real = TokenDataset.identity
    path = shutil.copytree(source, tmp_path / 'run', ignore=no_result)
    monkeypatch.setattr(TokenDataset, 'identity', lambda self: {**real(self), 'version': 'other'})
    changed = r'data other than the current dataset \(version: "\S+" -> "other"\); use'
    with pytest.raises(CheckpointError, match=changed):
        train(config, path)


def test_the_checkpoints_of_another_run_are_refused(small, small_run, tmp_path):
    """They have equal shapes and data, but the config of the directory has other seeds."""
    path = shutil.copytree(small_run.path, tmp_path / 'run', ignore=no_result)
    config = small(trials={'seeds': (5, 7)})
    write_json(path / 'config.json', {'hash': fingerprint(config), 'config': to_json(config)})
    metrics = (path / 'metrics.jsonl').read_bytes()
    with refused('12 is of a run with another configuration', CheckpointError):
        train(config, path)
    assert saved_steps(path) == [8, 12] and (path / 'metrics.jsonl').read_bytes() == metrics


@pytest.fixture(scope='module')
def diverged_run(small, built_once, tmp_path_factory):
    """The directory of a run whose second trial diverged, and which was resumed after that."""
    config = small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)})
    path = tmp_path_factory.mktemp('diverged') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        with pytest.raises(Lost):
            train(config, path, lost=at_call(6, lambda: True))
        assert saved_steps(path) == [4]
        train(config, path)
    return path


def test_a_diverged_trial_is_recorded_with_its_step(diverged_run):
    fine, diverged = results_of(diverged_run)
    records = read_metrics(diverged_run / 'metrics.jsonl')
    losses = {r['step']: r['loss'] for r in records if 'loss' in r}
    first = min(step for step, (_, loss) in losses.items() if loss is None)
    assert 1 < first < 4
    assert losses[first][0] is not None
    assert (fine['status'], fine['diverged_at']) == ('finished', None)
    assert (diverged['status'], diverged['diverged_at']) == ('diverged', first)


def test_a_diverged_trial_has_no_metrics(diverged_run):
    fine, diverged = results_of(diverged_run)
    final = read_metrics(diverged_run / 'metrics.jsonl')[-1]
    for name in ('val_induction_gain', 'val_induction_accuracy', 'val_loss', 'test_loss_se'):
        assert math.isfinite(fine[name])
        assert diverged[name] is None
        assert final[name] == [fine[name], diverged[name]]


def test_the_losses_of_documents_are_those_of_the_trials_that_did_not_diverge(diverged_run):
    fine, _ = results_of(diverged_run)
    for split, documents in read_json(diverged_run / 'documents.json', {}).items():
        tokens = documents['tokens']
        nats, nats_of_diverged = documents['nats']
        # 8 rows of 16 tokens, each of one document.
        assert nats_of_diverged is None
        assert sum(tokens) == 8 * 16
        assert all(count % 16 == 0 for count in tokens)
        assert len(set(documents['documents'])) == len(tokens) == len(nats) > 4
        loss = fine[{'validation': 'val', 'test': 'test'}[split] + '_loss']
        assert math.isclose(sum(nats) / sum(tokens), loss, rel_tol=1e-12)


def test_trials_that_diverged_are_counted_in_a_warning(diverged_run, small, tmp_path, caplog):
    config = small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)})
    path = shutil.copytree(diverged_run, tmp_path / 'run', ignore=no_result)
    train(config, path)
    assert f'{path}: 1 of 2 trials diverged' in caplog.text


def test_the_step_of_a_divergence_is_counted_within_a_dispatch():
    nan = np.nan
    losses_CX = np.array([[1.0, 1.0, nan], [1.0, nan, nan], [1.0, nan, nan]])
    assert with_divergences({}, losses_CX, last_step=6) == {1: 5, 2: 4}


def test_a_trial_keeps_the_step_at_which_it_diverged():
    known = {1: 2, 2: None}  # the last one diverged before steps were kept
    losses_CX = np.array([[1.0, np.nan, np.nan]] * 3)
    assert with_divergences(known, losses_CX, last_step=9) == known

"""A run from its directory to its results: stopped, lost or damaged, it ends as if undisturbed."""

import math
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qkattn.config import TrainConfig
from qkattn.data import pipeline
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokens import TokenDataset
from qkattn.errors import CheckpointError, ConfigError, Lost, Stopped
from qkattn.jobs.display import Progress
from qkattn.metrics import TIMES
from qkattn.storage import run_directory
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import metrics_of, read_json
from qkattn.train import loop, results, timing
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.loop import train
from qkattn.train.timing import PARTS
from qkattn.train.trials import Stack
from tests.lanes import only
from tests.runs import assert_same_run
from tests.train.conftest import PAIRS

pytestmark = pytest.mark.usefixtures('programs_kept')


def at_question(number: int, call):
    """A function `lost` that calls `call` when asked for that time; what it returns is lost.

    It is asked once after each dispatch, and once before each save.
    """
    asked = iter(range(1, 1000))
    return lambda: bool(call()) if next(asked) == number else False


def saved_steps(path: Path) -> list[int]:
    return sorted(int(step.name) for step in (path / 'checkpoints').iterdir())


# A run that ends


@pytest.mark.parametrize(
    'name', only(['masked'], ['masked', 'translation', 'causal probe', 'labelling probe'])
)
def test_a_run_leaves_plausible_results_and_the_same_ones_again(task, name, tmp_path):
    config = task(name)
    (result, other), _ = (train(config, tmp_path / which) for which in 'ab')
    assert_same_run(tmp_path / 'a', tmp_path / 'b')
    assert TIMES.keys() <= result.keys() and result['val_loss'] != other['val_loss']
    assert sum(result[part] for part in PARTS) < result['train_seconds']
    rows = rows_of(config)
    for split in rows.splits[1:]:
        prefix = {'validation': 'val', 'test': 'test'}[split]
        assert 0.3 < result[f'{prefix}_loss'] < 1.3 * math.log(config.model.vocab_size)
        assert all(0 <= result[f'{prefix}_{name}'] <= 1 for name in ('accuracy', 'solved'))
        assert (result[f'{prefix}_bits_per_byte'] is None) == ('probe' in name)
    assert ('val_bleu' in result) == (name == 'translation')
    if name == 'translation':
        assert result['val_num_sentences'] == 6 and 0 <= result['val_bleu'] <= 100
        assert result['test_loss'] is result['test_accuracy'] is None
        assert result['eval_tokens'] == sum(len(de) + 1 for _, de in PAIRS[24:])
    evaluated = [r for r in read_metrics(tmp_path / 'a/metrics.jsonl') if r['kind'] == 'eval']
    assert [r['step'] for r in evaluated] == [4, 8]
    assert evaluated[-1]['val_solved'] == [result['val_solved'], other['val_solved']]


def test_a_run_follows_its_plan_and_a_finished_one_is_not_touched(small, tmp_path, monkeypatch):
    losses, phases, splits, saved = {}, Counter(), [], []
    phase, evaluate, save = Progress.phase, Stack.evaluate, Checkpoints.save
    monkeypatch.setattr(Progress, 'update', lambda _, step, loss: losses.update({step: loss}))
    monkeypatch.setattr(Progress, 'phase', lambda *a: phases.update(a[1:]) or phase(*a))
    monkeypatch.setattr(Stack, 'evaluate', lambda *a: splits.append(a[1]) or evaluate(*a))
    monkeypatch.setattr(Checkpoints, 'save', lambda *a: saved.append(a[1]) or save(*a))
    config = small(train={'checkpoint_every': 2, 'eval_every': 5})
    trial_results = train(config, tmp_path)
    records = read_metrics(tmp_path / 'metrics.jsonl')
    assert [r['step'] for r in records if r['kind'] == 'eval'] == [5, 10, 12]
    logged = {record['step']: record['loss'] for record in records if record['kind'] == 'train'}
    assert {step: loss.tolist() for step, loss in losses.items()} == logged
    assert list(logged) == list(range(1, 13))
    assert (phases['evaluating'], phases['saving']) == (4, 6)
    assert saved == [2, 4, 6, 8, 10, 12]
    assert splits == ['validation'] * 3 + ['test']  # the last validation is not repeated
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / 'checkpoints').rglob('*')}
    assert train(config, tmp_path) == trial_results
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / 'checkpoints').rglob('*')}


def test_further_metrics_are_logged_and_nothing_else_changes(small, small_run, tmp_path, outside):
    results = train(small(train={'metrics': ('confidence:top(k=50)',)}), tmp_path)
    off, on = (read_metrics(path / 'metrics.jsonl') for path in (small_run[1], tmp_path))
    extra = (on[-2].keys() | on[-1].keys()) - off[-2].keys() - off[-1].keys()
    assert [{n: v for n, v in r.items() if n not in extra} for r in on] == off
    # Results describe a metric from outside, for those who read them without its module.
    stored = read_json(tmp_path / 'result.json', [{}])
    assert stored == results and 0 < results[0]['val_accuracy'] < results[0]['val_top_50'] < 1
    assert metrics_of(stored[0])['top_50'].text(0.5) == 'top 50 50.00 %'
    for name in ('val_top_50', 'test_top_50'):
        assert on[-1][name] == [result[name] for result in results]
    assert on[-2]['val_top_50'] == on[-1]['val_top_50']


# A run that is stopped or lost


def test_a_signal_saves_after_the_step_and_the_run_resumes(small_run, tmp_path):
    config, straight = small_run
    for step, question in ((3, 3), (6, 4)):
        stop = at_question(question, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped, match=f'stopped at step {step} of 12, state saved'):
            train(config, tmp_path, lost=stop)
        assert step in saved_steps(tmp_path)
        assert read_metrics(tmp_path / 'metrics.jsonl')[-1]['step'] == step
    train(config, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_lost_run_saves_nothing_more_and_can_be_gone_on_with(small_run, tmp_path):
    config, straight = small_run
    with pytest.raises(Lost, match='taken over at step 7'):  # checkpoints are every four
        train(config, tmp_path, lost=at_question(8, lambda: True))
    assert not (tmp_path / 'result.json').exists() and saved_steps(tmp_path) == [4]
    train(config, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_stopped_evaluation_comes_first_in_the_next_start(small_run, tmp_path, monkeypatch):
    """Also where the next start is stopped or killed in that evaluation, or right after it."""
    (config, straight), evaluate, record = small_run, pipeline.eval_batches, results.eval_record
    splits, lost, stop_in = [], [], None

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
    lost, record = [], results.eval_record
    monkeypatch.setattr(results, 'eval_record', lambda *a: lost.append(1) or record(*a))
    with pytest.raises(Lost, match='taken over at step 4'):
        train(small_run[0], tmp_path, lost=lambda: bool(lost))
    assert not saved_steps(tmp_path)


# A run that is resumed


def test_results_name_the_code_of_every_start_that_they_come_from(small_run, tmp_path, monkeypatch):
    git = [{'commit': name, 'dirty': dirty} for name, dirty in (('a', True), ('b', False))]
    # The third start saves nothing.
    for state, question in ((git[0], 3), (git[0], 4), ({'commit': 'c', 'dirty': False}, 1)):
        monkeypatch.setattr(run_directory, 'git_state', lambda state=state: state)
        lost = question == 1
        stop = at_question(question, lambda lost=lost: lost or signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Lost if lost else Stopped):
            train(small_run[0], tmp_path, lost=stop)
    monkeypatch.setattr(run_directory, 'git_state', lambda: git[1])
    for result in train(small_run[0], tmp_path):
        assert result['provenance']['git'] == git[1]
        assert result['provenance']['earlier'] == [{'git': git[0], 'imported': {}}]


def test_metrics_that_are_changed_while_a_run_trains_are_named_at_its_end(small, tmp_path):
    def change():
        with (tmp_path / 'metrics.jsonl').open('r+b') as file:
            file.seek(20)
            file.write(b'9')

    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 1 .*; restore the file from'):
        train(small(), tmp_path, lost=at_question(7, change))
    assert not (tmp_path / 'result.json').exists() and (tmp_path / 'checkpoints/12').exists()


def test_other_data_is_refused(small_run, tmp_path, monkeypatch):
    (config, source), real = small_run, TokenDataset.identity
    no_result = shutil.ignore_patterns('result.json')
    path = shutil.copytree(source, tmp_path / 'run', ignore=no_result)
    monkeypatch.setattr(TokenDataset, 'identity', lambda self: {**real(self), 'version': 'other'})
    changed = r'data other than the current dataset \(version: "\S+" -> "other"\); use'
    with pytest.raises(CheckpointError, match=changed):
        train(config, path)


def test_a_diverged_trial_is_recorded_with_its_step_and_leaves_no_losses(small, tmp_path, caplog):
    """Also when the run was resumed after it."""
    config = small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)})
    with pytest.raises(Lost):
        train(config, tmp_path, lost=at_question(6, lambda: True))
    assert saved_steps(tmp_path) == [4]
    fine, diverged = train(config, tmp_path)
    *records, final = read_metrics(tmp_path / 'metrics.jsonl')
    losses = {r['step']: r['loss'] for r in records if 'loss' in r}
    first = min(step for step, (_, loss) in losses.items() if loss is None)
    assert 1 < first < 4 and losses[first][0] is not None
    assert (fine['status'], fine['diverged_at']) == ('finished', None)
    assert (diverged['status'], diverged['diverged_at']) == ('diverged', first)
    assert f'{tmp_path}: 1 of 2 trials diverged' in caplog.text
    for name in ('val_induction_gain', 'val_induction_accuracy', 'val_loss', 'test_loss_se'):
        assert math.isfinite(fine[name]) and diverged[name] is None
        assert final[name] == [fine[name], diverged[name]]
    for split, documents in read_json(tmp_path / 'documents.json', {}).items():
        tokens, (nats, none) = documents['tokens'], documents['nats']
        assert sum(tokens) == 8 * 16 and all(t % 16 == 0 for t in tokens)
        assert len(set(documents['documents'])) == len(tokens) == len(nats) > 4 and none is None
        loss = fine[{'validation': 'val', 'test': 'test'}[split] + '_loss']
        assert math.isclose(sum(nats) / sum(tokens), loss, rel_tol=1e-12)


def test_the_step_of_a_divergence_is_counted_within_a_dispatch():
    stack = SimpleNamespace(config=SimpleNamespace(train=TrainConfig(log_every=100)))
    progress = SimpleNamespace(update=lambda *_: None)
    known = {2: 2, 3: None}  # the last one diverged before steps were kept
    run = loop._Run(*[None] * 9, diverged_at=known)
    run.stack, run.progress = stack, progress
    clock, nan = timing.Clock(dict.fromkeys(('train_seconds', *PARTS), 0.0)), np.nan
    losses_CX = [[1.0, 1.0, nan, nan], [1.0, nan, nan, nan], [1.0, nan, nan, nan]]
    run._write((6, {'loss': np.array(losses_CX)}), clock)
    run._write((9, {'loss': np.array([[1.0, nan, nan, nan]] * 3)}), clock)
    assert run.diverged_at == {1: 5, 2: 2, 3: None}

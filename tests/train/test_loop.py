"""The training loop: finished, stopped, lost, resumed and diverged runs."""

import dataclasses
import itertools
import math
import re
import shutil
import signal
from collections.abc import Callable
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


def do_at_call(number: int, action: Callable[[], object]) -> Callable[[], bool]:
    """A function to pass as train(lost=...), which does an action at one of its calls.

    `train` calls `lost` after each dispatch, and before each save. The run goes on, because the
    function always returns False.

    Args:
      number: the call that does the action. The first call is 1.
      action: is called without arguments, such as `send_sigterm`.
    """
    call_numbers = itertools.count(1)

    def lost() -> bool:
        call_number = next(call_numbers)
        if call_number == number:
            action()
        return False

    return lost


def lost_at_call(number: int) -> Callable[[], bool]:
    """A function to pass as train(lost=...), whose call `number` says that the run is lost.

    The first call is call 1. `train` calls `lost` after each dispatch, and before each save.
    """
    calls = itertools.count(1)
    return lambda: next(calls) == number


def lost_after_evaluation(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A function to pass as train(lost=...). The run is lost as soon as it has evaluated."""
    eval_record = results.eval_record
    evaluated_steps = []

    def recording_eval_record(step, *arguments):
        evaluated_steps.append(step)
        return eval_record(step, *arguments)

    monkeypatch.setattr(results, 'eval_record', recording_eval_record)
    return lambda: len(evaluated_steps) > 0


def send_sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


# For copies of a finished run that resume at its last step.
no_result = shutil.ignore_patterns('result.json')

PREFIX_OF_SPLIT = {'validation': 'val', 'test': 'test'}


def saved_steps(run: Path) -> list[int]:
    return sorted(int(step.name) for step in (run / 'checkpoints').iterdir())


def without_fields(records: list[dict], fields: set[str]) -> list[dict]:
    """Copies of records without some fields."""
    copies = []
    for record in records:
        copies.append({name: value for name, value in record.items() if name not in fields})
    return copies


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
    name = request.param
    config = task(name)
    directory = tmp_path_factory.mktemp('finished')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        train(config, directory / 'a')
        train(config, directory / 'b')
    return Finished(name, config, path=directory / 'a', other_path=directory / 'b')


def test_a_run_is_the_same_when_it_is_trained_again(finished):
    assert_same_run(finished.path, finished.other_path)


def test_trials_of_different_seeds_have_different_losses(finished):
    first, second = finished.results
    assert first['val_loss'] != second['val_loss']


def test_the_time_of_training_includes_that_of_its_parts(finished):
    result = finished.results[0]
    assert TIMES.keys() <= result.keys()
    seconds_of_parts = sum(result[part] for part in PARTS)
    assert seconds_of_parts < result['train_seconds']


def test_results_are_plausible_on_every_split(finished):
    result = finished.results[0]
    loss_of_uniform_guess = math.log(finished.config.model.vocab_size)
    evaluated_splits = rows_of(finished.config).splits[1:]  # all but 'train'
    for split in evaluated_splits:
        prefix = PREFIX_OF_SPLIT[split]
        assert 0.3 < result[f'{prefix}_loss'] < 1.3 * loss_of_uniform_guess
        assert 0 <= result[f'{prefix}_accuracy'] <= 1
        assert 0 <= result[f'{prefix}_solved'] <= 1
        # The tokens of a probe do not stand for bytes.
        if 'probe' in finished.task:
            assert result[f'{prefix}_bits_per_byte'] is None
        else:
            assert result[f'{prefix}_bits_per_byte'] is not None


def test_only_translators_are_scored_by_their_translations(finished):
    result = finished.results[0]
    if finished.task != 'translation':
        assert 'val_bleu' not in result
        return

    validation_pairs = PAIRS[24:]
    assert len(validation_pairs) == 6
    assert result['val_num_sentences'] == 6
    assert 0 <= result['val_bleu'] <= 100
    # Tokens are bytes. A separator ends each translation.
    assert result['eval_tokens'] == sum(len(target) + 1 for _, target in validation_pairs)
    # There is no test split.
    assert result['test_loss'] is None
    assert result['test_accuracy'] is None


def test_the_last_logged_evaluation_is_that_of_the_results(finished):
    records = read_metrics(finished.path / 'metrics.jsonl')
    evaluations = [record for record in records if record['kind'] == 'eval']
    assert [record['step'] for record in evaluations] == [4, 8]
    solved = [result['val_solved'] for result in finished.results]
    assert evaluations[-1]['val_solved'] == solved


def first_arguments(monkeypatch, owner, name) -> list:
    """A list that gets the first argument of each later call of the method `name` of a class."""
    method = getattr(owner, name)
    arguments = []

    def recording_method(self, first, *others):
        arguments.append(first)
        return method(self, first, *others)

    monkeypatch.setattr(owner, name, recording_method)
    return arguments


def test_a_run_logs_evaluates_and_saves_at_its_steps(small, tmp_path, monkeypatch):
    phases = first_arguments(monkeypatch, Progress, 'phase')
    evaluated_splits = first_arguments(monkeypatch, Stack, 'evaluate')
    saved = first_arguments(monkeypatch, Checkpoints, 'save')
    shown_losses = {}

    def show(self, step, loss_X):
        shown_losses[step] = loss_X.tolist()

    monkeypatch.setattr(Progress, 'update', show)
    train(small(train={'checkpoint_every': 2, 'eval_every': 5}), tmp_path)

    records = read_metrics(tmp_path / 'metrics.jsonl')
    logged_losses = {r['step']: r['loss'] for r in records if r['kind'] == 'train'}
    assert list(logged_losses) == list(range(1, 12 + 1))
    assert shown_losses == logged_losses

    assert [r['step'] for r in records if r['kind'] == 'eval'] == [5, 10, 12]
    # The validation of step 12 is not repeated for the results.
    assert evaluated_splits == ['validation', 'validation', 'validation', 'test']
    assert phases.count('evaluating') == 3 + 1

    assert saved == [2, 4, 6, 8, 10, 12]
    assert phases.count('saving') == 6


def test_training_records_hold_speeds(small_run):
    records = read_metrics(small_run.path / 'metrics.jsonl')
    training = [record for record in records if record['kind'] == 'train']
    assert len(training) == 12
    for record in training:
        assert record['tokens_per_second'] > 0
        assert 0 <= record['input_wait_fraction'] <= 1
        assert 'mfu' not in record  # the peak rate of a CPU is unknown


def test_mfu_is_the_fraction_of_the_peak_flops(small, tmp_path, monkeypatch):
    peak_by_device = {'cpu': 1e12}
    monkeypatch.setattr(loop, 'peak_flops', lambda device_kind: peak_by_device[device_kind])
    config = small(train={'num_steps': 4, 'eval_every': 4, 'checkpoint_every': 4})

    results = train(config, tmp_path)

    record = read_metrics(tmp_path / 'metrics.jsonl')[0]
    # A backward pass costs twice as much as a forward pass.
    flops_per_token = (1 + 2) * results[0]['flops_per_token']
    flops_per_second = record['tokens_per_second'] * flops_per_token
    assert record['mfu'] == pytest.approx(flops_per_second / 1e12)


def test_a_finished_run_is_not_touched(small_run, tmp_path):
    path = shutil.copytree(small_run.path, tmp_path / 'run')

    def times_of_checkpoints():
        files = (path / 'checkpoints').rglob('*')
        return {file: file.stat().st_mtime_ns for file in files}

    before = times_of_checkpoints()
    results = train(small_run.config, path)

    assert results == results_of(small_run.path)
    assert times_of_checkpoints() == before


def test_a_further_metric_changes_nothing_else_of_a_run(small, small_run, tmp_path, outside):
    results = train(small(train={'metrics': ('confidence:top(k=50)',)}), tmp_path)

    records = read_metrics(tmp_path / 'metrics.jsonl')
    expected_records = read_metrics(small_run.path / 'metrics.jsonl')
    # The last two records, of an evaluation and of the results, have all fields.
    fields = records[-2].keys() | records[-1].keys()
    expected_fields = expected_records[-2].keys() | expected_records[-1].keys()
    common_records = without_fields(records, fields - expected_fields)
    assert without_times(common_records) == without_times(expected_records)

    last_evaluation = records[-2]
    final = records[-1]
    for name in ('val_top_50', 'test_top_50'):
        assert final[name] == [result[name] for result in results]
    assert last_evaluation['val_top_50'] == final['val_top_50']

    # Stored results describe the metric, so they can be read without its module.
    stored_results = results_of(tmp_path)
    assert stored_results == results
    assert 0 < results[0]['val_accuracy'] < results[0]['val_top_50'] < 1
    assert metrics_of(stored_results[0])['top_50'].text(0.5) == 'top 50 50.00 %'


# A run that is stopped or lost


def test_a_run_stopped_by_a_signal_resumes_at_the_same_step(small_run, tmp_path):
    # The first start calls `lost` once per step. The second start calls it after step 4, before
    # the checkpoint of step 4, and after the steps 5 and 6.
    for call, step in ((3, 3), (4, 6)):
        with pytest.raises(Stopped, match=f'stopped at step {step} of 12, state saved'):
            train(small_run.config, tmp_path, lost=do_at_call(call, send_sigterm))
        assert step in saved_steps(tmp_path)
        last_record = read_metrics(tmp_path / 'metrics.jsonl')[-1]
        assert last_record['step'] == step

    train(small_run.config, tmp_path)
    assert_same_run(tmp_path, small_run.path)


def test_a_lost_run_saves_nothing_more(small_run, tmp_path):
    # Call 5 of `lost` comes before the checkpoint of step 4, and call 8 after step 7.
    with pytest.raises(Lost, match='taken over at step 7'):
        train(small_run.config, tmp_path, lost=lost_at_call(8))
    assert not (tmp_path / 'result.json').exists()
    assert saved_steps(tmp_path) == [4]

    train(small_run.config, tmp_path)
    assert_same_run(tmp_path, small_run.path)


def train_with_signal(config, path, signal_at: int) -> None:
    """Trains a run, with SIGTERM when evaluation number `signal_at` of this start begins.

    Fails if that evaluation is completed.
    """
    eval_batches = pipeline.eval_batches
    splits = []

    def eval_batches_with_signal(rows, split, **options):
        splits.append(split)
        is_last = len(splits) == signal_at
        if is_last:
            send_sigterm()
        yield from eval_batches(rows, split, **options)
        assert not is_last, 'the evaluation goes on'

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, 'eval_batches', eval_batches_with_signal)
        train(config, path)


def test_a_stopped_evaluation_comes_first_in_the_next_start(small_run, tmp_path, monkeypatch):
    """Evaluations are due at steps 4, 8 and 12. The evaluation at step 8 is stopped three times."""
    config = small_run.config
    metrics_file = tmp_path / 'metrics.jsonl'

    # The evaluation at step 8 is the second one of the first start.
    # It is the first one of each later start.
    for number_of_evaluation in (2, 1, 1):
        with pytest.raises(Stopped, match='stopped at step 8 of 12, state saved'):
            train_with_signal(config, tmp_path, signal_at=number_of_evaluation)

        # A stopped evaluation leaves no record, so the last one is of training.
        last_record = read_metrics(metrics_file)[-1]
        assert last_record['kind'] == 'train'
        assert last_record['step'] == 8
        assert saved_steps(tmp_path)[-1] == 8

    # The fourth start completes the evaluation, but is lost before it saves a checkpoint.
    with pytest.raises(Lost):
        train(config, tmp_path, lost=lost_after_evaluation(monkeypatch))
    last_record = read_metrics(metrics_file)[-1]
    assert last_record['kind'] == 'eval'
    assert last_record['step'] == 8

    # The fifth start evaluates at step 8 again, and ends like a run without interruptions.
    train(config, tmp_path)
    assert_same_run(tmp_path, small_run.path)


def test_a_run_lost_in_an_evaluation_saves_nothing(small_run, tmp_path, monkeypatch):
    with pytest.raises(Lost, match='taken over at step 4'):
        train(small_run.config, tmp_path, lost=lost_after_evaluation(monkeypatch))
    assert not saved_steps(tmp_path)


# A run that is resumed


def test_results_name_the_code_of_every_start_that_saved(small_run, tmp_path, monkeypatch):
    config = small_run.config
    first_code = {'commit': 'a', 'dirty': True}
    lost_code = {'commit': 'c', 'dirty': False}
    last_code = {'commit': 'b', 'dirty': False}

    # Two starts with the same code are stopped and save.
    monkeypatch.setattr(run_directory, 'git_state', lambda: first_code)
    for call in (3, 4):
        with pytest.raises(Stopped):
            train(config, tmp_path, lost=do_at_call(call, send_sigterm))
    # A third start is lost at once and does not save.
    monkeypatch.setattr(run_directory, 'git_state', lambda: lost_code)
    with pytest.raises(Lost):
        train(config, tmp_path, lost=lost_at_call(1))
    monkeypatch.setattr(run_directory, 'git_state', lambda: last_code)
    results = train(config, tmp_path)

    for result in results:
        assert result['provenance']['git'] == last_code
        assert result['provenance']['earlier'] == [{'git': first_code, 'imported': {}}]


def test_a_change_of_the_metrics_file_during_training_is_named(small, tmp_path):
    def overwrite_a_byte_of_the_first_line():
        with (tmp_path / 'metrics.jsonl').open('r+b') as file:
            file.seek(20)
            file.write(b'9')

    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 1 .*; restore the file from'):
        train(small(), tmp_path, lost=do_at_call(7, overwrite_a_byte_of_the_first_line))

    # The error comes at the end of training.
    assert not (tmp_path / 'result.json').exists()
    assert (tmp_path / 'checkpoints/12').exists()


def test_resuming_on_other_data_is_refused(small_run, tmp_path, monkeypatch):
    """The version of the data differs from the one that the checkpoints record."""
    # Without result.json, a finished run is resumed at its last step.
    path = shutil.copytree(small_run.path, tmp_path / 'run', ignore=no_result)
    first_result = results_of(small_run.path)[0]
    recorded_version = first_result['data']['version']
    identity = TokenDataset.identity

    def identity_of_other_version(dataset):
        return identity(dataset) | {'version': 'other'}

    monkeypatch.setattr(TokenDataset, 'identity', identity_of_other_version)

    message = (
        f'{path} was trained on data other than the current dataset '
        f'(version: "{recorded_version}" -> "other"); use the interpreter and the data of its '
        'first start, or another workdir'
    )
    with pytest.raises(CheckpointError, match=f'^{re.escape(message)}$'):
        train(small_run.config, path)


def test_the_checkpoints_of_another_run_are_refused(small, small_run, tmp_path):
    """The other run has the same shapes and data. Only its seeds differ."""
    path = shutil.copytree(small_run.path, tmp_path / 'run', ignore=no_result)
    other_config = small(trials={'seeds': (5, 7)})
    other = {'hash': fingerprint(other_config), 'config': to_json(other_config)}
    write_json(path / 'config.json', other)
    metrics = (path / 'metrics.jsonl').read_bytes()

    with refused('12 is of a run with another configuration', CheckpointError):
        train(other_config, path)

    assert saved_steps(path) == [8, 12]
    assert (path / 'metrics.jsonl').read_bytes() == metrics


# A trial that diverges


@pytest.fixture(scope='module')
def config_that_diverges(small):
    """A config of two trials, of which the second diverges."""
    return small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)})


@pytest.fixture(scope='module')
def diverged_run(config_that_diverges, built_once, tmp_path_factory):
    """The directory of a run whose second trial diverges before step 4, where the run resumed."""
    path = tmp_path_factory.mktemp('diverged') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        # Call 5 of `lost` comes before the checkpoint of step 4, and call 6 after step 5.
        with pytest.raises(Lost):
            train(config_that_diverges, path, lost=lost_at_call(6))
        assert saved_steps(path) == [4]
        train(config_that_diverges, path)
    return path


def test_a_diverged_trial_is_recorded_with_its_step(diverged_run):
    records = read_metrics(diverged_run / 'metrics.jsonl')
    losses_by_step = {record['step']: record['loss'] for record in records if 'loss' in record}
    bad_steps = [step for step, (_, loss) in losses_by_step.items() if loss is None]
    first_bad_step = min(bad_steps)
    assert 1 < first_bad_step < 4
    loss_of_finished_trial, _ = losses_by_step[first_bad_step]
    assert loss_of_finished_trial is not None

    finished, diverged = results_of(diverged_run)
    assert finished['status'] == 'finished'
    assert finished['diverged_at'] is None
    assert diverged['status'] == 'diverged'
    assert diverged['diverged_at'] == first_bad_step


def test_a_diverged_trial_has_no_metrics(diverged_run):
    finished, diverged = results_of(diverged_run)
    final = read_metrics(diverged_run / 'metrics.jsonl')[-1]
    for name in ('val_induction_gain', 'val_induction_accuracy', 'val_loss', 'test_loss_se'):
        assert math.isfinite(finished[name])
        assert diverged[name] is None
        assert final[name] == [finished[name], None]


def test_the_losses_of_documents_add_up_to_the_loss_of_their_split(diverged_run):
    finished, _ = results_of(diverged_run)
    for split, documents in read_json(diverged_run / 'documents.json', {}).items():
        tokens = documents['tokens']
        nats_of_finished, nats_of_diverged = documents['nats']
        assert nats_of_diverged is None

        # Each of the 8 evaluated rows, of 16 tokens, belongs to one document.
        assert sum(tokens) == 8 * 16
        assert all(count % 16 == 0 for count in tokens)

        num_documents = len(set(documents['documents']))
        assert num_documents > 4  # so that rows of several documents are added up
        assert len(tokens) == num_documents
        assert len(nats_of_finished) == num_documents

        loss = sum(nats_of_finished) / sum(tokens)
        prefix = PREFIX_OF_SPLIT[split]
        assert math.isclose(loss, finished[f'{prefix}_loss'], rel_tol=1e-12)


def test_a_warning_counts_the_diverged_trials(diverged_run, config_that_diverges, tmp_path, caplog):
    path = shutil.copytree(diverged_run, tmp_path / 'run', ignore=no_result)
    train(config_that_diverges, path)
    assert f'{path}: 1 of 2 trials diverged' in caplog.text


def test_the_first_bad_step_within_a_dispatch_is_found():
    nan = np.nan
    loss_by_step_and_trial = np.array(
        [
            [1.0, 1.0, nan],  # step 4
            [1.0, nan, nan],  # step 5
            [1.0, nan, nan],  # step 6
        ]
    )
    diverged_at = with_divergences({}, loss_by_step_and_trial, last_step=6)
    assert diverged_at == {1: 5, 2: 4}


def test_a_trial_keeps_the_step_at_which_it_diverged():
    # Earlier versions did not record the step, so it is None after a resume.
    diverged_at = {1: 2, 2: None}
    loss_CX = np.array([[1.0, np.nan, np.nan]] * 3)
    assert with_divergences(diverged_at, loss_CX, last_step=9) == diverged_at

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
    """Returns a function to pass as train(lost=...), which does an action at one of its calls.

    `train` calls `lost` after each dispatch, and before each save. The function returns False,
    so the run is not lost.

    Args:
      number: The call that does the action. The first call has number 1.
      action: A function without arguments, such as `send_sigterm`.
    """
    call_numbers = itertools.count(1)

    def lost() -> bool:
        call_number = next(call_numbers)
        if call_number == number:
            action()
        return False

    return lost


def lost_at_call(number: int) -> Callable[[], bool]:
    """Returns a function to pass as train(lost=...), whose call `number` returns True.

    The first call has number 1. `train` calls `lost` after each dispatch, and before each save.
    """
    calls = itertools.count(1)
    return lambda: next(calls) == number


def lost_after_evaluation(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Returns a function to pass as train(lost=...), which returns True after an evaluation.

    `train` calls `results.eval_record` once for each evaluation.
    """
    eval_record = results.eval_record
    evaluated_steps = []

    def recording_eval_record(step, *arguments):
        """Notes the step, and calls the original function."""
        evaluated_steps.append(step)
        return eval_record(step, *arguments)

    monkeypatch.setattr(results, 'eval_record', recording_eval_record)
    return lambda: len(evaluated_steps) > 0


def send_sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


# For copies of a finished run that resume at its last step.
result_file = shutil.ignore_patterns('result.json')

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
    """A `Finished` for each task: its run was trained twice, in two directories."""
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
    """After 8 steps, a model predicts hardly better than a uniform guess."""
    result_of_first_trial = finished.results[0]
    # A model that gives each of V tokens the same probability has the loss log V.
    loss_of_uniform_guess = math.log(finished.config.model.vocab_size)
    # The first split is 'train', which results leave out.
    evaluated_splits = rows_of(finished.config).splits[1:]

    for split in evaluated_splits:
        prefix = PREFIX_OF_SPLIT[split]  # 'val' or 'test'
        loss = result_of_first_trial[f'{prefix}_loss']
        fraction_of_correct_targets = result_of_first_trial[f'{prefix}_accuracy']
        fraction_of_rows_without_error = result_of_first_trial[f'{prefix}_solved']
        bits_per_byte = result_of_first_trial[f'{prefix}_bits_per_byte']

        # The bounds are wide. After so few steps, a loss may exceed log V a little.
        assert 0.3 < loss < 1.3 * loss_of_uniform_guess
        assert 0 <= fraction_of_correct_targets <= 1
        assert 0 <= fraction_of_rows_without_error <= 1
        # The tokens of a probe, which is an artificial task, stand for no bytes of a text.
        if 'probe' in finished.task:
            assert bits_per_byte is None
        else:
            assert bits_per_byte is not None


def test_only_translators_are_scored_by_their_translations(finished):
    """BLEU compares whole translated sentences, so other tasks have no such score."""
    result = finished.results[0]
    if finished.task != 'translation':
        assert 'val_bleu' not in result
        return

    # PAIRS are 30 sentences with their translations. The first 24 are for training.
    validation_pairs = PAIRS[24:]
    assert len(validation_pairs) == 6
    assert result['val_num_sentences'] == 6
    assert 0 <= result['val_bleu'] <= 100

    # The targets of a translation are its bytes and one separator at its end.
    num_targets = 0
    for _, translation in validation_pairs:
        num_targets += len(translation) + 1
    assert result['eval_tokens'] == num_targets

    # There are no sentence pairs for testing.
    assert result['test_loss'] is None
    assert result['test_accuracy'] is None


def test_the_last_logged_evaluation_is_that_of_the_results(finished):
    records = read_metrics(finished.path / 'metrics.jsonl')
    evaluations = [record for record in records if record['kind'] == 'eval']
    assert [record['step'] for record in evaluations] == [4, 8]
    solved = [result['val_solved'] for result in finished.results]
    assert evaluations[-1]['val_solved'] == solved


def record_first_arguments(monkeypatch, owner, name) -> list:
    """Returns a list to which each later call of a method adds its first argument after `self`.

    The method `name` of the class `owner` works as before.
    """
    method = getattr(owner, name)
    arguments = []

    def recording_method(self, first, *others):
        """Notes the first argument, and calls the original method."""
        arguments.append(first)
        return method(self, first, *others)

    monkeypatch.setattr(owner, name, recording_method)
    return arguments


def test_a_run_logs_evaluates_and_saves_at_its_steps(small, tmp_path, monkeypatch):
    """Logging, saving and evaluating have intervals of 1, 2 and 5 steps in a run of 12 steps."""
    # Each list gets the first argument of every call of a method.
    shown_phases = record_first_arguments(monkeypatch, Progress, 'phase')
    evaluated_splits = record_first_arguments(monkeypatch, Stack, 'evaluate')
    saved_at = record_first_arguments(monkeypatch, Checkpoints, 'save')
    shown_losses = {}

    def show(self, step, loss_X):
        """Replaces Progress.update, and notes the losses of X trials by step."""
        shown_losses[step] = loss_X.tolist()

    monkeypatch.setattr(Progress, 'update', show)
    intervals = {'log_every': 1, 'checkpoint_every': 2, 'eval_every': 5}

    train(small(train={'num_steps': 12} | intervals), tmp_path)

    # Every step is logged. The display shows the logged losses.
    records = read_metrics(tmp_path / 'metrics.jsonl')
    logged_losses = {r['step']: r['loss'] for r in records if r['kind'] == 'train'}
    assert list(logged_losses) == list(range(1, 12 + 1))
    assert shown_losses == logged_losses

    # Steps 5 and 10 are multiples of 5, and step 12 is the last.
    assert [r['step'] for r in records if r['kind'] == 'eval'] == [5, 10, 12]
    # The results also need the test split. They reuse the validation of step 12.
    assert evaluated_splits == ['validation', 'validation', 'validation', 'test']
    # The display shows 3 validations and the evaluation of the test split.
    assert shown_phases.count('evaluating') == 3 + 1

    assert saved_at == [2, 4, 6, 8, 10, 12]
    assert shown_phases.count('saving') == len(saved_at)


def test_training_records_hold_speeds(small_run):
    records = read_metrics(small_run.path / 'metrics.jsonl')
    training = [record for record in records if record['kind'] == 'train']
    assert len(training) == 12
    for record in training:
        assert record['tokens_per_second'] > 0
        assert 0 <= record['input_wait_fraction'] <= 1
        assert 'mfu' not in record  # the peak rate of a CPU is unknown


def test_mfu_is_the_fraction_of_the_peak_flops(small, tmp_path, monkeypatch):
    """MFU is the model FLOPs per second, divided by the peak rate of the device."""
    peak_flops_per_second = 1e12
    # The peak rate of a CPU is unknown, so the test supplies one.
    peak_by_device = {'cpu': peak_flops_per_second}
    monkeypatch.setattr(loop, 'peak_flops', lambda device_kind: peak_by_device[device_kind])
    config = small(train={'num_steps': 4, 'eval_every': 4, 'checkpoint_every': 4})

    results = train(config, tmp_path)

    first_record = read_metrics(tmp_path / 'metrics.jsonl')[0]
    # The results hold the FLOPs of a forward pass. A backward pass takes twice as many.
    forward_flops_per_token = results[0]['flops_per_token']
    flops_per_token = (1 + 2) * forward_flops_per_token
    flops_per_second = first_record['tokens_per_second'] * flops_per_token
    assert first_record['mfu'] == pytest.approx(flops_per_second / peak_flops_per_second)


def test_a_finished_run_is_not_touched(small_run, tmp_path):
    """Training a finished run again returns its stored results and changes no checkpoint."""
    path = shutil.copytree(small_run.path, tmp_path / 'run')

    def write_times_of_checkpoints():
        """The time of the last change of each file of a checkpoint, by path."""
        files = (path / 'checkpoints').rglob('*')
        return {file: file.stat().st_mtime_ns for file in files}

    times_before = write_times_of_checkpoints()
    results = train(small_run.config, path)

    assert results == results_of(small_run.path)
    assert write_times_of_checkpoints() == times_before


def test_a_further_metric_changes_nothing_else_of_a_run(small, small_run, tmp_path, outside):
    """A metric from outside the package adds its own fields to records and results.

    The module `confidence` comes from the fixture `outside`. Its metric `top_50` is the fraction of
    targets among the 50 most probable tokens. `small_run` has the same config without this metric.
    """
    results = train(small(train={'metrics': ('confidence:top(k=50)',)}), tmp_path)

    records = read_metrics(tmp_path / 'metrics.jsonl')
    records_without_metric = read_metrics(small_run.path / 'metrics.jsonl')
    # The last two records, of an evaluation and of the results, have all fields.
    last_evaluation = records[-2]
    final = records[-1]
    fields = last_evaluation.keys() | final.keys()
    fields_without_metric = records_without_metric[-2].keys() | records_without_metric[-1].keys()
    # Apart from the fields of the metric, both runs have the same records.
    common_records = without_fields(records, fields - fields_without_metric)
    assert without_times(common_records) == without_times(records_without_metric)

    # A record holds the values of all trials in one list. Each result holds one of them.
    for name in ('val_top_50', 'test_top_50'):
        assert final[name] == [result[name] for result in results]
    assert last_evaluation['val_top_50'] == final['val_top_50']

    # A target that is the most probable token is also among the 50 most probable ones.
    assert 0 < results[0]['val_accuracy'] < results[0]['val_top_50'] < 1

    # Stored results describe the metric, so they can be read without its module.
    stored_results = results_of(tmp_path)
    assert stored_results == results
    described_metrics = metrics_of(stored_results[0])
    assert described_metrics['top_50'].text(0.5) == 'top 50 50.00 %'


# A run that is stopped or lost


def test_a_run_stopped_by_a_signal_resumes_at_the_same_step(small_run, tmp_path):
    """SIGTERM stops the first two starts of a run. The third start completes the run.

    The run then equals `small_run`, which was never stopped.
    """
    # `train` calls `lost` after each step, and before each checkpoint.
    starts = [
        # In the first start, calls 1, 2 and 3 come after the steps 1, 2 and 3.
        {'call_with_signal': 3, 'last_step': 3},
        # The second start resumes at step 3. Calls 1 to 4 come after step 4, before checkpoint 4,
        # after step 5 and after step 6.
        {'call_with_signal': 4, 'last_step': 6},
    ]
    for start in starts:
        last_step = start['last_step']
        send_signal = do_at_call(start['call_with_signal'], send_sigterm)
        with pytest.raises(Stopped, match=f'stopped at step {last_step} of 12, state saved'):
            train(small_run.config, tmp_path, lost=send_signal)
        assert last_step in saved_steps(tmp_path)
        last_record = read_metrics(tmp_path / 'metrics.jsonl')[-1]
        assert last_record['step'] == last_step

    train(small_run.config, tmp_path)
    assert_same_run(tmp_path, small_run.path)


def test_a_lost_run_saves_nothing_more(small_run, tmp_path):
    """A run that another process has taken over writes no more checkpoints, and no results."""
    # The first 5 calls of `lost` come after the steps 1 to 4 and before checkpoint 4. Calls 6 to 8
    # come after the steps 5 to 7.
    with pytest.raises(Lost, match='taken over at step 7'):
        train(small_run.config, tmp_path, lost=lost_at_call(8))
    assert not (tmp_path / 'result.json').exists()
    assert saved_steps(tmp_path) == [4]

    train(small_run.config, tmp_path)
    assert_same_run(tmp_path, small_run.path)


def train_with_signal(config, path, signal_at: int) -> None:
    """Trains a run, and sends SIGTERM when evaluation number `signal_at` of this start begins.

    The first evaluation has number 1. The test fails if evaluation `signal_at` is completed.
    """
    eval_batches = pipeline.eval_batches
    splits = []

    def eval_batches_with_signal(rows, split, **options):
        """Replaces pipeline.eval_batches, which an evaluation calls once for its batches."""
        splits.append(split)
        has_signal = len(splits) == signal_at
        if has_signal:
            send_sigterm()
        yield from eval_batches(rows, split, **options)
        # This line is reached only if the evaluation reads all batches.
        assert not has_signal, 'the evaluation goes on'

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, 'eval_batches', eval_batches_with_signal)
        train(config, path)


def test_a_stopped_evaluation_comes_first_in_the_next_start(small_run, tmp_path, monkeypatch):
    """If a signal stops an evaluation, the next start repeats the evaluation before it trains.

    The run evaluates at the steps 4, 8 and 12. Signals stop the evaluation at step 8 three times.
    """
    config = small_run.config
    metrics_file = tmp_path / 'metrics.jsonl'

    # The evaluation at step 8 is evaluation 2 of the first start, and evaluation 1 of later starts.
    for number_of_evaluation in (2, 1, 1):
        with pytest.raises(Stopped, match='stopped at step 8 of 12, state saved'):
            train_with_signal(config, tmp_path, signal_at=number_of_evaluation)

        # A stopped evaluation writes no record. The last record is the loss of step 8.
        last_record = read_metrics(metrics_file)[-1]
        assert last_record['kind'] == 'train'
        assert last_record['step'] == 8
        assert saved_steps(tmp_path)[-1] == 8

    # The fourth start completes the evaluation. Then `lost` returns True, as if another process had
    # taken over the run, so `train` raises Lost before it saves a checkpoint.
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
    """Results name the code of the last start, and of each earlier start that saved a checkpoint.

    Code is described by its commit, and by whether files differ from the commit (`dirty`).
    """
    config = small_run.config
    first_code = {'commit': 'a', 'dirty': True}
    lost_code = {'commit': 'c', 'dirty': False}
    last_code = {'commit': 'b', 'dirty': False}

    # Two starts have the same code. A signal stops each, and each saves a checkpoint.
    monkeypatch.setattr(run_directory, 'git_state', lambda: first_code)
    for call in (3, 4):
        with pytest.raises(Stopped):
            train(config, tmp_path, lost=do_at_call(call, send_sigterm))

    # The third start is lost after its first step, so it saves no checkpoint.
    monkeypatch.setattr(run_directory, 'git_state', lambda: lost_code)
    with pytest.raises(Lost):
        train(config, tmp_path, lost=lost_at_call(1))

    # The fourth start completes the run.
    monkeypatch.setattr(run_directory, 'git_state', lambda: last_code)
    results = train(config, tmp_path)

    # The first two starts share one entry. The run imports no modules from outside.
    earlier_code = [{'git': first_code, 'imported': {}}]
    for result in results:
        assert result['provenance']['git'] == last_code
        assert result['provenance']['earlier'] == earlier_code


def test_a_change_of_the_metrics_file_during_training_is_named(small, tmp_path):
    """If another program changes line 1 of metrics.jsonl, training ends with an error about it."""

    def overwrite_a_byte_of_the_first_line():
        with (tmp_path / 'metrics.jsonl').open('r+b') as file:
            file.seek(20)
            file.write(b'9')

    # The first 5 calls of `lost` come after the steps 1 to 4 and before checkpoint 4. So call 7
    # comes after step 6, when line 1 is already written.
    overwrite_after_step_6 = do_at_call(7, overwrite_a_byte_of_the_first_line)
    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 1 .*; restore the file from'):
        train(small(train={'num_steps': 12}), tmp_path, lost=overwrite_after_step_6)

    # The run checks the file just before it writes its results, after checkpoint 12.
    assert not (tmp_path / 'result.json').exists()
    assert (tmp_path / 'checkpoints/12').exists()


def test_resuming_on_other_data_is_refused(small_run, tmp_path, monkeypatch):
    """A run is not resumed if its checkpoint records another version of the data."""
    # A finished run is not trained again. Without result.json, its copy counts as interrupted after
    # its last checkpoint, so `train` resumes it there, and compares the data.
    path = shutil.copytree(small_run.path, tmp_path / 'run', ignore=result_file)
    first_result = results_of(small_run.path)[0]
    recorded_version = first_result['data']['version']
    original_identity = TokenDataset.identity

    def identity_of_other_version(dataset):
        """Replaces TokenDataset.identity, which describes the data of this machine."""
        return original_identity(dataset) | {'version': 'other'}

    monkeypatch.setattr(TokenDataset, 'identity', identity_of_other_version)

    message = (
        f'{path} was trained on data other than the current dataset '
        f'(version: "{recorded_version}" -> "other"); use the interpreter and the data of its '
        'first start, or another workdir'
    )
    with pytest.raises(CheckpointError, match=f'^{re.escape(message)}$'):
        train(small_run.config, path)


def test_the_checkpoints_of_another_run_are_refused(small, small_run, tmp_path):
    """A run restores only checkpoints with the hash of its own settings.

    The other run differs from `small_run` only in its seeds, so its arrays have the same shapes.
    """
    # Without its results, the copy of a finished run resumes from its last checkpoint, of step 12.
    path = shutil.copytree(small_run.path, tmp_path / 'run', ignore=result_file)
    other_config = small(trials={'seeds': (5, 7)})

    # `train` first compares its config with config.json. This check passes, because config.json
    # gets the other settings. Only the checkpoints are still of `small_run`.
    other_settings = {'hash': fingerprint(other_config), 'config': to_json(other_config)}
    write_json(path / 'config.json', other_settings)
    metrics_before = (path / 'metrics.jsonl').read_bytes()

    with refused('checkpoints/12 is of a run with another configuration', CheckpointError):
        train(other_config, path)

    # Nothing was deleted. A finished run has its two newest checkpoints, of the steps 8 and 12.
    assert saved_steps(path) == [8, 12]
    assert (path / 'metrics.jsonl').read_bytes() == metrics_before


# A trial that diverges


@pytest.fixture(scope='module')
def config_that_diverges(small):
    """A config of two trials, of which the second diverges."""
    return small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)})


@pytest.fixture(scope='module')
def diverged_run(config_that_diverges, built_once, tmp_path_factory):
    """The directory of a finished run of two trials, of which only the second one diverged.

    A trial diverges when its loss is not finite. The second trial diverges before step 4. The run
    was interrupted after step 5, and resumed from checkpoint 4.
    """
    path = tmp_path_factory.mktemp('diverged') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        # The first 5 calls of `lost` come after the steps 1 to 4 and before checkpoint 4. Call 6
        # comes after step 5.
        with pytest.raises(Lost):
            train(config_that_diverges, path, lost=lost_at_call(6))
        assert saved_steps(path) == [4]
        train(config_that_diverges, path)
    return path


def test_a_diverged_trial_is_recorded_with_its_step(diverged_run):
    """A trial diverges at the first step whose loss is not finite.

    `diverged_run` was interrupted, and resumed at step 4. Its second trial diverged before step 4.
    """
    records = read_metrics(diverged_run / 'metrics.jsonl')
    losses_by_step = {record['step']: record['loss'] for record in records if 'loss' in record}

    # A record holds the losses of both trials. A loss that is not finite is None.
    bad_steps = []
    for step, (_, loss_of_second_trial) in losses_by_step.items():
        if loss_of_second_trial is None:
            bad_steps.append(step)
    first_bad_step = min(bad_steps)
    assert 1 < first_bad_step < 4
    loss_of_first_trial, _ = losses_by_step[first_bad_step]
    assert loss_of_first_trial is not None

    finished, diverged = results_of(diverged_run)
    assert finished['status'] == 'finished'
    assert finished['diverged_at'] is None
    assert diverged['status'] == 'diverged'
    assert diverged['diverged_at'] == first_bad_step


def test_a_diverged_trial_has_no_metrics(diverged_run):
    """The second trial of `diverged_run` diverged, so its metrics are None."""
    finished, diverged = results_of(diverged_run)
    final = read_metrics(diverged_run / 'metrics.jsonl')[-1]
    for name in ('val_induction_gain', 'val_induction_accuracy', 'val_loss', 'test_loss_se'):
        assert math.isfinite(finished[name])
        assert diverged[name] is None
        assert final[name] == [finished[name], None]


def test_the_losses_of_documents_add_up_to_the_loss_of_their_split(diverged_run):
    """documents.json holds the sum of losses on each document, by split and by trial.

    The second trial of `diverged_run` diverged, so it has no losses. A split has 8 rows of 16
    tokens.
    """
    finished, _ = results_of(diverged_run)
    num_rows = 8
    tokens_per_row = 16
    for split, losses in read_json(diverged_run / 'documents.json', {}).items():
        tokens_by_document = losses['tokens']
        nats_of_finished, nats_of_diverged = losses['nats']
        assert nats_of_diverged is None

        # Each row belongs to one document, so the number of its tokens is a multiple of 16.
        assert sum(tokens_by_document) == num_rows * tokens_per_row
        assert all(tokens % tokens_per_row == 0 for tokens in tokens_by_document)

        # The 8 rows come from more than 4 documents. Each list has one entry per document.
        num_documents = len(set(losses['documents']))
        assert num_documents > 4
        assert len(tokens_by_document) == num_documents
        assert len(nats_of_finished) == num_documents

        loss_per_token = sum(nats_of_finished) / sum(tokens_by_document)
        prefix = PREFIX_OF_SPLIT[split]  # 'val' or 'test'
        assert math.isclose(loss_per_token, finished[f'{prefix}_loss'], rel_tol=1e-12)


def test_a_warning_counts_the_diverged_trials(diverged_run, config_that_diverges, tmp_path, caplog):
    path = shutil.copytree(diverged_run, tmp_path / 'run', ignore=result_file)
    train(config_that_diverges, path)
    assert f'{path}: 1 of 2 trials diverged' in caplog.text


def test_the_first_bad_step_within_a_dispatch_is_found():
    """A trial diverges at the first step whose loss is not finite.

    One dispatch computes several steps, here the steps 4 to 6 of three trials.
    """
    nan = np.nan
    loss_by_step_and_trial = np.array(
        [
            [1.0, 1.0, nan],  # step 4
            [1.0, nan, nan],  # step 5
            [1.0, nan, nan],  # step 6
        ]
    )
    diverged_before = {}

    diverged_at = with_divergences(diverged_before, loss_by_step_and_trial, last_step=6)

    # The keys are trials and the values are steps. All losses of trial 0 are finite.
    assert diverged_at == {1: 5, 2: 4}


def test_a_trial_keeps_the_step_at_which_it_diverged():
    # Earlier versions did not record the step of a divergence, so the step of trial 2 is None.
    diverged_at = {1: 2, 2: None}
    loss_CX = np.array([[1.0, np.nan, np.nan]] * 3)
    assert with_divergences(diverged_at, loss_CX, last_step=9) == diverged_at

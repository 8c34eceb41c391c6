"""Runs that are evaluated on further corpora (data.evaluate)."""

import json
import math
import shutil
import signal

import pytest

from qkattn.config import fingerprint
from qkattn.data import pipeline
from qkattn.data.tokens import TokenDataset
from qkattn.errors import CheckpointError, Stopped
from qkattn.metrics import METRICS
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import check_result, corpora_of, metric_fields
from qkattn.train import program
from qkattn.train.loop import train
from tests.refusals import refused
from tests.runs import FinishedRun, assert_same_run, results_of, without_times

pytestmark = pytest.mark.usefixtures('programs_kept')


@pytest.fixture(scope='session')
def config_with_corpora(small, tmp_path_factory):
    """A function that makes the config of `small_run` with three further corpora to evaluate on.

    '@test' and '@train' are splits of the run's own data. 'text:PATH' is a file of 4,000 lines.
    """
    path = tmp_path_factory.mktemp('corpus') / 'lines.txt'
    path.write_text(''.join(f'{number} bottles on the wall\n' for number in range(4000)))

    def make(**sections):
        # Fields of `data` in `sections` come on top of the three corpora.
        data = {'evaluate': ('@test', '@train', f'text:{path}')} | sections.pop('data', {})
        return small(data=data, **sections)

    return make


@pytest.fixture(scope='module')
def run(config_with_corpora, built_once, tmp_path_factory):
    """A finished run that was evaluated on three corpora."""
    config = config_with_corpora()
    path = tmp_path_factory.mktemp('evaluated') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        train(config, path)
    return FinishedRun(config, path)


def without_corpora(records):
    """Returns copies of records without metrics on further corpora, such as 'loss[@test]'."""
    copies = []
    for record in records:
        copies.append({name: value for name, value in record.items() if '[' not in name})
    return copies


def train_with_signal(config, path, signal_at=None):
    """Trains a run and returns the splits that this start evaluates, in order.

    Sends SIGTERM when evaluation number `signal_at` of this start begins. The first evaluation has
    number 1. With None, no signal is sent.
    """
    splits = []
    eval_batches = pipeline.eval_batches

    def eval_batches_with_signal(rows, split, **options):
        """Replaces pipeline.eval_batches, which an evaluation calls once for its batches."""
        splits.append(split)
        if len(splits) == signal_at:
            signal.raise_signal(signal.SIGTERM)
        return eval_batches(rows, split, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, 'eval_batches', eval_batches_with_signal)
        train(config, path)
    return splits


def test_each_evaluation_has_the_logged_metrics_on_each_corpus(run):
    records = read_metrics(run.path / 'metrics.jsonl')
    evaluations = [record for record in records if record['kind'] == 'eval']
    # The run has 12 steps and evaluates every 4 steps.
    assert [record['step'] for record in evaluations] == [4, 8, 12]
    for record in evaluations:
        for corpus in run.config.data.evaluate:
            for metric in ('loss', 'bits_per_byte', 'accuracy', 'solved'):
                first_trial, second_trial = record[f'{metric}[{corpus}]']
                assert 0 <= first_trial < 12
                assert 0 <= second_trial < 12


def test_losses_on_a_corpus_change_from_evaluation_to_evaluation(run):
    records = read_metrics(run.path / 'metrics.jsonl')
    text = run.config.data.evaluate[2]
    losses = [record[f'loss[{text}]'] for record in records if record['kind'] == 'eval']
    first, second, third = losses
    assert first != second
    assert second != third
    assert first != third


def test_the_results_are_those_of_the_last_evaluation(run):
    """The results hold the losses of the evaluation after the last step.

    A field such as 'loss[@test]' holds the loss on the further corpus '@test'.
    """
    records = read_metrics(run.path / 'metrics.jsonl')
    last_evaluation = records[-2]
    final = records[-1]
    results = results_of(run.path)  # one for each trial
    for corpus in run.config.data.evaluate:
        field = f'loss[{corpus}]'
        loss_by_trial = [result[field] for result in results]
        assert last_evaluation[field] == loss_by_trial
        assert final[field] == loss_by_trial

        # Perplexity is the exponential of the loss.
        perplexities = [math.exp(loss) for loss in loss_by_trial]
        assert perplexities == pytest.approx(final[f'perplexity[{corpus}]'])


def test_metrics_on_the_own_test_split_are_the_test_metrics(run):
    for result in results_of(run.path):
        for metric in ('loss', 'bits_per_byte', 'perplexity', 'loss_se', 'accuracy', 'solved'):
            assert result[f'{metric}[@test]'] == result[f'test_{metric}']


def test_results_describe_the_corpora(run):
    """A result describes each further corpus by its name, fingerprints and number of tokens.

    '@test' and '@train' are splits of the run's own data. The third corpus is a text file.
    """
    result = results_of(run.path)[0]
    assert corpora_of(result) == run.config.data.evaluate
    descriptions = result['data']['evaluate']
    assert len(descriptions) == 3

    # A fingerprint is a hash of a split.
    own_fingerprints = result['data']['fingerprints']
    assert descriptions['@test']['fingerprints'] == {'test': own_fingerprints['test']}

    text = run.config.data.evaluate[2]
    assert descriptions[text]['name'] == 'text'

    # An evaluation reads 8 rows of each corpus. Every token is a target.
    rows = 8
    tokens_per_row = 16
    for description in descriptions.values():
        assert description['eval_tokens'] == rows * tokens_per_row


def test_results_have_every_metric_on_each_corpus(run):
    result = results_of(run.path)[0]
    fields = [name for name in metric_fields(result) if '[' in name]
    assert 'loss[@test]' in fields
    num_corpora = 3
    assert len(fields) == num_corpora * len(METRICS)


def test_further_corpora_change_nothing_else_of_a_run(run, small_run):
    """`run` has the settings of `small_run`, and three further corpora to evaluate on."""
    assert fingerprint(run.config) != fingerprint(small_run.config)

    # Apart from fields such as 'loss[@test]', both runs have the same records.
    records = read_metrics(run.path / 'metrics.jsonl')
    expected_records = read_metrics(small_run.path / 'metrics.jsonl')
    assert without_times(without_corpora(records)) == without_times(expected_records)

    # documents.json has losses on the documents of the run's own data only.
    documents = (run.path / 'documents.json').read_bytes()
    assert documents == (small_run.path / 'documents.json').read_bytes()

    # The results of each trial have the same metrics. They describe the same data, apart from the
    # descriptions of the further corpora.
    results = results_of(run.path)
    expected_results = results_of(small_run.path)
    for result, expected_result in zip(results, expected_results, strict=True):
        descriptions_of_corpora = {'evaluate': result['data']['evaluate']}
        assert result['data'] == expected_result['data'] | descriptions_of_corpora
        for name, value in expected_result.items():
            if name.startswith(('val_', 'test_')):
                assert result[name] == value


def test_a_run_stopped_in_the_evaluation_of_a_corpus_resumes_bitwise(run, tmp_path):
    """If SIGTERM stops an evaluation, it is not logged, and the next start repeats it.

    An evaluation reads the validation split, and then the corpora '@test', '@train' and a text.
    """
    # The first start is stopped at step 4, on '@test'. The second start repeats the evaluation of
    # step 4, and is stopped on the text.
    number_of_test = 2
    number_of_text = 4
    for number in (number_of_test, number_of_text):
        with pytest.raises(Stopped, match='stopped at step 4 of 12'):
            train_with_signal(run.config, tmp_path, signal_at=number)
        last_record = read_metrics(tmp_path / 'metrics.jsonl')[-1]
        assert last_record['kind'] == 'train'

    # The third start completes the run, which then equals a run without signals.
    splits = train_with_signal(run.config, tmp_path)

    # These are the validation split, '@test', '@train', and the validation split of the text.
    assert splits[:4] == ['validation', 'test', 'train', 'validation']
    assert_same_run(tmp_path, run.path)


def test_the_last_evaluation_is_made_again_after_a_resume(run, tmp_path):
    """A finished run without its results resumes at its last step."""
    result_file = shutil.ignore_patterns('result.json')
    path = shutil.copytree(run.path, tmp_path / 'run', ignore=result_file)

    results = train(run.config, path)

    # The resumed run writes the same results as the run that was not interrupted.
    assert results == results_of(path)
    assert_same_run(path, run.path)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [{'data': 2, 'trial': 2}, {'fsdp': 2, 'tensor': 2}], ids=str)
def test_corpora_have_the_same_losses_on_a_mesh(run, config_with_corpora, tmp_path, mesh):
    """Four devices have the same losses as one device, up to rounding. `run` used one device."""
    config = config_with_corpora(mesh=mesh, train={'accumulation': 1})

    train(config, tmp_path / 'mesh')

    results = results_of(tmp_path / 'mesh')  # one for each trial
    expected_results = results_of(run.path)
    for result, expected_result in zip(results, expected_results, strict=True):
        for corpus in run.config.data.evaluate:
            field = f'loss[{corpus}]'
            assert result[field] == pytest.approx(expected_result[field], abs=1e-4)


def test_a_diverged_trial_has_no_metrics_on_corpora(config_with_corpora, tmp_path):
    # The second trial diverges, because its learning rate is 1e30.
    config = config_with_corpora(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)})

    finished, diverged = train(config, tmp_path)

    for corpus in config.data.evaluate:
        assert finished[f'loss[{corpus}]'] > 0
        assert diverged[f'loss[{corpus}]'] is None
    final = read_metrics(tmp_path / 'metrics.jsonl')[-1]
    assert final['loss[@train]'] == [finished['loss[@train]'], None]


def test_a_corpus_that_has_changed_is_refused(run, tmp_path, monkeypatch):
    """A run is not resumed if a corpus differs from its description in the checkpoint."""
    # Without its results, the copy of a finished run resumes from its last checkpoint.
    result_file = shutil.ignore_patterns('result.json')
    path = shutil.copytree(run.path, tmp_path / 'run', ignore=result_file)
    identity = TokenDataset.identity

    def changed_identity(dataset):
        """Replaces TokenDataset.identity. Gives the text file another version."""
        if dataset.name == 'text':
            return identity(dataset) | {'version': 'other'}
        return identity(dataset)

    monkeypatch.setattr(TokenDataset, 'identity', changed_identity)

    # The third corpus of the run is the text file.
    text = run.config.data.evaluate[2]
    with refused(rf'\(evaluate.{text}.version: "\S+" -> "other"\)', CheckpointError):
        train(run.config, path)


def test_a_corpus_that_does_not_exist_is_refused_before_anything_is_written(
    config_with_corpora, tmp_path
):
    config = config_with_corpora(data={'evaluate': ('text:/absent',)})
    with refused("data.evaluate='text:/absent': data.path: '/absent' does not exist"):
        train(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('damaged_fields', 'message'),
    [
        pytest.param(
            {'loss[@test]': 'low'},
            r"field 'loss\[@test\]' is 'low', expected",
            id='a metric is a string',
        ),
        pytest.param(
            {'data': {'evaluate': []}},
            r"field 'evaluate' is \[\], expected dict",
            id='the corpora are a list',
        ),
    ],
)
def test_a_damaged_result_on_corpora_is_refused(run, damaged_fields, message):
    result = results_of(run.path)[0]
    check_result(json.loads(json.dumps(result)))
    with refused(message, ValueError):
        check_result(result | damaged_fields)

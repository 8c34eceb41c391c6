"""Runs that are evaluated on further corpora: what they record, and what stays as it is."""

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
from qkattn.storage.records import check_result, corpora_of, metric_fields, read_json
from qkattn.train import program
from qkattn.train.loop import train
from tests.refusals import refused
from tests.runs import assert_same_run, results_of, without_times

pytestmark = pytest.mark.usefixtures('programs_kept')

CORPORA = ('@test', '@train', 'text:LINES')


@pytest.fixture(scope='session')
def config_with_corpora(small, tmp_path_factory):
    """A run like `small_run` that is also evaluated on CORPORA; 'LINES' are 4,000 lines of text."""
    path = tmp_path_factory.mktemp('corpus') / 'lines.txt'
    path.write_text(''.join(f'{number} bottles on the wall\n' for number in range(4000)))
    entries = tuple(entry.replace('LINES', str(path)) for entry in CORPORA)

    def make(**sections):
        data = {'evaluate': entries} | sections.pop('data', {})
        return small(data=data, **sections)

    return make


@pytest.fixture(scope='module')
def run(config_with_corpora, built_once, tmp_path_factory):
    """A finished run of `evaluated`: its config and its directory."""
    config = config_with_corpora()
    path = tmp_path_factory.mktemp('evaluated') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        train(config, path)
    return config, path


def test_an_evaluation_has_the_logged_metrics_on_each_corpus(run):
    config, path = run
    records = read_metrics(path / 'metrics.jsonl')
    evaluations = [record for record in records if record['kind'] == 'eval']
    assert [record['step'] for record in evaluations] == [4, 8, 12]
    for record in evaluations:
        for corpus in config.data.evaluate:
            for metric in ('loss', 'bits_per_byte', 'accuracy', 'solved'):
                first, second = record[f'{metric}[{corpus}]']
                assert 0 <= first < 12 and 0 <= second < 12
    assert len({tuple(record[f'loss[{config.data.evaluate[2]}]']) for record in evaluations}) == 3


def test_the_results_are_those_of_the_last_evaluation(run):
    config, path = run
    *_, evaluation, final = read_metrics(path / 'metrics.jsonl')
    results = results_of(path)
    for corpus in config.data.evaluate:
        field = f'loss[{corpus}]'
        losses = [result[field] for result in results]
        assert evaluation[field] == final[field] == losses
        assert [math.exp(loss) for loss in losses] == pytest.approx(final[f'perplexity[{corpus}]'])
    # The test split is evaluated again when training ends.
    for metric in ('loss', 'bits_per_byte', 'perplexity', 'loss_se', 'accuracy', 'solved'):
        for result in results:
            assert result[f'{metric}[@test]'] == result[f'test_{metric}']


def test_results_name_the_corpora_and_their_targets(run):
    config, path = run
    result = results_of(path)[0]
    assert corpora_of(result) == config.data.evaluate
    # Its own test split, and the text of a file; 8 rows of 16 targets of each.
    described = result['data']['evaluate']
    assert described['@test']['fingerprints'] == {
        'test': result['data']['fingerprints']['test'],
    }
    assert described[config.data.evaluate[2]]['name'] == 'text'
    assert [corpus['eval_tokens'] for corpus in described.values()] == [8 * 16] * 3
    names = [name for name in metric_fields(result) if '[' in name]
    assert len(names) == 3 * len(METRICS) and 'loss[@test]' in names


def test_further_corpora_change_nothing_else_of_a_run(run, small_run):
    config, path = run
    other_config, other_path = small_run
    assert fingerprint(config) != fingerprint(other_config)

    def without_corpora(records):
        return [{n: v for n, v in record.items() if '[' not in n} for record in records]

    records = [read_metrics(directory / 'metrics.jsonl') for directory in (path, other_path)]
    assert without_times(without_corpora(records[0])) == without_times(records[1])
    assert (path / 'documents.json').read_bytes() == (other_path / 'documents.json').read_bytes()
    for result, other in zip(results_of(path), results_of(other_path), strict=True):
        result['data'].pop('evaluate')
        for name, value in other.items():
            if name.startswith(('val_', 'test_', 'data')):
                assert result[name] == value


def test_a_run_that_is_stopped_while_it_evaluates_a_corpus_resumes_bitwise(
    run, tmp_path, monkeypatch
):
    # `straight` was trained without a stop.
    config, straight = run
    read = pipeline.eval_batches
    splits = []
    stop_in = None

    # Asks to stop when the `stop_in`-th split is evaluated.
    def stopped(rows, split, **options):
        splits.append(split)
        if len(splits) == stop_in:
            signal.raise_signal(signal.SIGTERM)
        return read(rows, split, **options)

    monkeypatch.setattr(pipeline, 'eval_batches', stopped)
    for stop_in in (2, 4):  # noqa: B007 (read by the batches)
        splits.clear()
        with pytest.raises(Stopped, match='stopped at step 4 of 12'):
            train(config, tmp_path)
        assert read_metrics(tmp_path / 'metrics.jsonl')[-1]['kind'] == 'train'
    stop_in = None
    splits.clear()
    train(config, tmp_path)
    assert splits[:4] == ['validation', 'test', 'train', 'validation']
    assert_same_run(tmp_path, straight)


def test_a_last_evaluation_is_not_repeated_but_made_again_after_a_resume(
    run, tmp_path, monkeypatch
):
    config, straight = run
    path = shutil.copytree(straight, tmp_path / 'run', ignore=shutil.ignore_patterns('result.json'))
    assert train(config, path) == results_of(path)
    assert_same_run(path, straight)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [{'data': 2, 'trial': 2}, {'fsdp': 2, 'tensor': 2}], ids=str)
def test_on_a_mesh_corpora_have_the_same_losses(run, config_with_corpora, tmp_path, mesh):
    config, straight = run
    train(config_with_corpora(mesh=mesh, train={'accumulation': 1}), tmp_path / 'mesh')
    for result, expected in zip(results_of(tmp_path / 'mesh'), results_of(straight), strict=True):
        for corpus in config.data.evaluate:
            field = f'loss[{corpus}]'
            assert result[field] == pytest.approx(expected[field], abs=1e-4)


def test_a_diverged_trial_has_no_metrics_on_corpora(config_with_corpora, tmp_path):
    config = config_with_corpora(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)})
    fine, diverged = train(config, tmp_path)
    for corpus in config.data.evaluate:
        assert fine[f'loss[{corpus}]'] > 0 and diverged[f'loss[{corpus}]'] is None
    final = read_metrics(tmp_path / 'metrics.jsonl')[-1]
    assert final['loss[@train]'] == [fine['loss[@train]'], None]


def test_a_corpus_that_has_changed_is_refused(run, tmp_path, monkeypatch):
    config, straight = run
    path = shutil.copytree(straight, tmp_path / 'run', ignore=shutil.ignore_patterns('result.json'))
    identity = TokenDataset.identity

    def changed(dataset):
        other = {'version': 'other'} if dataset.name == 'text' else {}
        return identity(dataset) | other

    monkeypatch.setattr(TokenDataset, 'identity', changed)
    corpus = config.data.evaluate[2]
    with refused(rf'\(evaluate.{corpus}.version: "\S+" -> "other"\)', CheckpointError):
        train(config, path)


def test_a_corpus_that_cannot_be_read_is_refused_before_anything_is_written(
    config_with_corpora, tmp_path
):
    config = config_with_corpora(data={'evaluate': ('text:/absent',)})
    with refused("data.evaluate='text:/absent': data.path: '/absent' does not exist"):
        train(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('changes', 'says'),
    [
        ({'loss[@test]': 'low'}, r"field 'loss\[@test\]' is 'low', expected"),
        ({'data': {'evaluate': []}}, r"field 'evaluate' is \[\], expected dict"),
    ],
)
def test_a_damaged_result_on_corpora_is_refused(run, changes, says):
    result = read_json(run[1] / 'result.json', [{}])[0]
    check_result(json.loads(json.dumps(result)))
    with refused(says, ValueError):
        check_result(result | changes)

"""The page of a single run, from its files."""

import json

import numpy as np
import pytest

from qkattn.config import Config, TrainConfig, TrialsConfig, fingerprint, to_json
from qkattn.errors import ReportError
from qkattn.report import show_run_report
from qkattn.report.run_page import load_run, loss_curves, trial_table
from qkattn.storage.records import write_json
from qkattn.verdict import load_study
from tests.studies import result_record

CONFIG = Config(train=TrainConfig(num_steps=400), trials=TrialsConfig(seeds=(3, 4)))


def written(path, steps=400, finished=True):
    """A run of two trials, the second of which diverges after step 200."""
    path.mkdir()
    write_json(path / 'config.json', {'hash': fingerprint(CONFIG), 'config': to_json(CONFIG)})
    start = {'command': ['qkattn', 'train'], 'git': {'commit': 'abc<d>'}, 'python': '3.11'}
    write_json(path / 'provenance.json', {'starts': [start | {'versions': {}, 'devices': {}}]})
    records = []
    for step in range(100, steps + 1, 100):
        second = 6 - step / 100 if step <= 200 else None
        records.append({'kind': 'train', 'step': step, 'loss': [5 - step / 100, second]})
        if step % 200 == 0:
            records.append({'kind': 'eval', 'step': step, 'val_loss': [5.5 - step / 100, second]})
    (path / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
    if finished:
        trials = CONFIG.trials.trials()
        ended = result_record(trial=trials[0], val_loss=1.5, test_loss=1.625)
        diverged = result_record(trial=trials[1], val_loss=None, test_loss=None)
        result = [ended, diverged | {'status': 'diverged', 'diverged_at': 201}]
        data = {'name': 'own', 'version': '1-carved-test', 'carved': {'test': 0.1}}
        common = {'train_seconds': 61.0, 'checkpoint_seconds': 1.25, 'data': data}
        write_json(path / 'result.json', [r | common for r in result])
    return path


def test_a_finished_run_has_curves_numbers_settings_and_provenance(tmp_path, monkeypatch):
    monkeypatch.setenv('COLUMNS', '100')
    text = show_run_report(written(tmp_path / 'run'))
    lines = text.splitlines()
    assert max(map(len, lines[:-1])) <= 100
    assert lines[3].split()[:5] == ['seed', '3', 'finished', '1.5000', '1.6250']
    assert lines[4].split()[:7] == ['seed', '4', 'diverged', 'at', 'step', '201', '-']
    page = (tmp_path / 'run/report.html').read_text()
    assert page.count('<svg') == 1
    assert 'http' not in page.split('<svg')[0]
    for shown in (
        '1.6250',
        'diverged at step 201',
        'waiting for checkpoints',
        '1.2 s',
        'train.num_steps',
        'git.commit',
        'own 1-carved-test (10 % of train carved as test split)',
        'abc&lt;d&gt;',
    ):
        assert shown in page


def test_the_curves_are_those_of_the_log(tmp_path):
    (axes,) = loss_curves(load_run(written(tmp_path / 'run'))).axes
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_array_equal(
        lines['seed 4, training'].get_xydata(),
        [[100, 5], [200, 4], [300, np.nan], [400, np.nan]],
    )
    np.testing.assert_array_equal(
        lines['seed 3, validation'].get_xydata(), [[200, 3.5], [400, 1.5]]
    )
    assert axes.get_ylabel() == 'loss, nats/token'
    # Ticks are where evaluations are.
    assert list(axes.get_xticks())[::-1] == [200, 400]


def test_an_unfinished_run_shows_its_last_losses(tmp_path):
    run = load_run(written(tmp_path / 'run', steps=300, finished=False))
    titles, rows = trial_table(run)
    assert [title.partition(',')[0] for title, _ in titles[2:]] == [
        'training loss',
        'validation loss',
    ]
    assert rows == [
        ['seed 3', 'unfinished', '2.0000', '3.5000'],
        ['seed 4', 'unfinished', '-', '4.0000'],
    ]
    assert (
        '300 of 400'
        in (show_run_report(run.directory), (run.directory / 'report.html').read_text())[1]
    )


@pytest.mark.parametrize(
    ('steps', 'sentence'), [(None, 'not a run directory'), (0, 'no logged step yet')]
)
def test_what_is_no_run_with_a_log_is_refused(steps, sentence, tmp_path):
    path = tmp_path / 'run'
    if steps is not None:
        written(path, steps, finished=False)
    with pytest.raises(ReportError, match=sentence):
        show_run_report(path)


def test_a_run_that_is_given_as_a_study_is_named(tmp_path):
    path = written(tmp_path / 'run')
    with pytest.raises(ReportError, match='is the directory of a run; give it as --run'):
        load_study(path)

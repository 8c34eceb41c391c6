"""This version of the code finishes a run and a study that an earlier version began.

Each archive in fixtures/ is the directory of a run or study. `kill -9` ended it at step 6 of 12,
with a checkpoint of step 4. expected.json has the losses of the earlier version without the kill.
Another processor may round differently, so losses after step 4 agree only to rounding.
"""

import dataclasses
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import Config, TuningConfig, from_json
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.study import worker
from qkattn.train.loop import train
from tests.study.test_plan import STUDY

FIXTURES = Path(__file__).with_name('fixtures')
EXPECTED = json.loads((FIXTURES / 'expected.json').read_text())
ATOL = 1e-4


def extract(name: str, directory: Path) -> Path:
    """Unpacks a directory that an earlier version wrote."""
    with tarfile.open(FIXTURES / f'{name}.tar.xz') as archive:
        # Python 3.11.4 and later can do the same with the argument `filter`.
        archive.extraction_filter = lambda member, path: member
        archive.extractall(directory)
    return directory / name


def log_lines(run: Path) -> list[bytes]:
    return (run / 'metrics.jsonl').read_bytes().splitlines()


def assert_resumed_after_step_4(run: Path, lines_before: list[bytes]) -> None:
    """Checks that a run was started a second time, from the checkpoint of step 4.

    The log keeps its 5 lines up to step 4. All later lines are written again.
    """
    kept_lines = [line for line in lines_before if json.loads(line)['step'] <= 4]
    assert len(kept_lines) == 5
    assert len(lines_before) > 5
    assert log_lines(run)[:5] == kept_lines
    assert len(read_json(run / 'provenance.json', {})['starts']) == 2


def test_a_run_of_an_earlier_version_resumes_with_its_records(tmp_path):
    """This version of the code finishes a run that an earlier version began.

    The run was killed at step 6 of 12, and has a checkpoint of step 4. `EXPECTED` has the losses of
    the same run when the earlier version was not killed.
    """
    run = extract('run', tmp_path)
    lines_before = log_lines(run)
    stored = json.loads((run / 'config.json').read_text())
    config = from_json(Config, stored['config'])

    results = train(config, run)

    assert_resumed_after_step_4(run, lines_before)

    # The losses of all steps and evaluations, each a list with a number for each trial. Another
    # processor may round differently after the checkpoint.
    records = read_metrics(run / 'metrics.jsonl')
    train_losses = [record['loss'] for record in records if record['kind'] == 'train']
    val_losses = [record['val_loss'] for record in records if record['kind'] == 'eval']
    np.testing.assert_allclose(train_losses, EXPECTED['run']['train'], rtol=0, atol=ATOL)
    np.testing.assert_allclose(val_losses, EXPECTED['run']['eval'], rtol=0, atol=ATOL)

    # The result of each trial has its loss in the last evaluation.
    losses_of_results = [result['val_loss'] for result in results]
    assert losses_of_results == val_losses[-1]


def test_a_study_of_an_earlier_version_resumes_its_killed_run_alone(tmp_path):
    """This version of the code finishes a study that an earlier version began.

    One run of the study is finished. The other was killed at step 6 of 12, with a checkpoint of
    step 4. `EXPECTED` has the results of the study when the earlier version was not killed.
    """
    path = extract('study', tmp_path)
    [finished_result] = path.glob('runs/*/result.json')
    finished_run = finished_result.parent
    [killed_run] = [run for run in path.glob('runs/*') if run != finished_run]

    time_of_result = finished_result.stat().st_mtime_ns
    lines_before = log_lines(killed_run)
    results_before = (path / 'results.jsonl').read_bytes()
    ledger_before = (path / 'ledger.jsonl').read_bytes()
    assert results_before

    # The settings with which the study was started.
    study = dataclasses.replace(
        STUDY,
        name='started earlier',
        base=from_json(Config, read_json(path / 'study.json', {})['base']),
        sizes=('d_model=16',),
        tolerance=0.1,
        tuning=TuningConfig(),
    )

    worker.run(study, path)

    # The finished run is not trained again, which would write checkpoints.
    assert finished_result.stat().st_mtime_ns == time_of_result
    assert not (finished_run / 'checkpoints').exists()
    assert_resumed_after_step_4(killed_run, lines_before)

    # The ledger, with the declaration of the study, stays the same.
    assert (path / 'ledger.jsonl').read_bytes() == ledger_before

    # The results of the killed run are added behind the results of the finished run.
    results_after = (path / 'results.jsonl').read_bytes()
    assert results_after.startswith(results_before)
    results = [json.loads(line) for line in results_after.splitlines()]
    for result, expected_fields in zip(results, EXPECTED['study'], strict=True):
        for name, expected in expected_fields.items():
            if name == 'val_loss':
                expected = pytest.approx(expected, abs=ATOL)
            assert result[name] == expected

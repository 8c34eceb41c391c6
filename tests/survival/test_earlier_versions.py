"""A run and a study that an earlier version was killed in: this one brings both to their end.

Each archive in fixtures/ is a directory as `kill -9` left it at step 6 of 12, with a checkpoint at
step 4; expected.json holds the losses of the same version undisturbed. The archives come from one
processor, so the steps after the checkpoint agree to rounding and no better.
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
        # The argument `filter` would do the same from Python 3.11.4 on.
        archive.extraction_filter = lambda member, path: member
        archive.extractall(directory)
    return directory / name


def assert_resumed_after_step_4(run: Path, before: list[bytes]) -> None:
    """The lines of the log up to step 4, of the checkpoint, are kept; there was a second start."""
    kept = [line for line in before if json.loads(line)['step'] <= 4]
    assert len(kept) == 5 < len(before)
    assert (run / 'metrics.jsonl').read_bytes().splitlines()[:5] == kept
    assert len(read_json(run / 'provenance.json', {})['starts']) == 2


def test_a_run_of_an_earlier_version_resumes_with_its_records(tmp_path):
    path = extract('run', tmp_path)
    before = (path / 'metrics.jsonl').read_bytes().splitlines()
    config = from_json(Config, json.loads((path / 'config.json').read_text())['config'])
    results = train(config, path)
    assert_resumed_after_step_4(path, before)
    records = read_metrics(path / 'metrics.jsonl')
    for kind, name in (('train', 'loss'), ('eval', 'val_loss')):
        losses = [r[name] for r in records if r['kind'] == kind]
        np.testing.assert_allclose(losses, EXPECTED['run'][kind], rtol=0, atol=ATOL)
    assert [result['val_loss'] for result in results] == losses[-1]


def test_a_study_of_an_earlier_version_resumes_its_killed_run_and_keeps_the_finished_one(tmp_path):
    path = extract('study', tmp_path)
    (finished,) = path.glob('runs/*/result.json')
    first = (path / 'results.jsonl').read_bytes()
    written = finished.stat().st_mtime_ns
    killed = next(p.parent for p in path.glob('runs/*/lifting.json') if p.parent != finished.parent)
    before = (killed / 'metrics.jsonl').read_bytes().splitlines()
    ledger = (path / 'ledger.jsonl').read_bytes()
    base = from_json(Config, read_json(path / 'study.json', {})['base'])
    fields = {'name': 'started earlier', 'sizes': ('d_model=16',), 'tolerance': 0.1}
    worker.run(dataclasses.replace(STUDY, base=base, tuning=TuningConfig(), **fields), path)
    assert finished.stat().st_mtime_ns == written and not (finished.parent / 'checkpoints').exists()
    assert_resumed_after_step_4(killed, before)
    lines = (path / 'results.jsonl').read_bytes()
    assert lines.startswith(first) and first and (path / 'ledger.jsonl').read_bytes() == ledger
    results = map(json.loads, lines.splitlines())
    for result, expected in zip(results, EXPECTED['study'], strict=True):
        expected['val_loss'] = pytest.approx(expected['val_loss'], abs=ATOL)
        assert result | expected == result

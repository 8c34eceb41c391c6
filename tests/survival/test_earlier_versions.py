"""A run and a study that an earlier version was killed in: this one brings both to their end.

Each archive in fixtures/ is a directory as `kill -9` left it at step 6 of 12, with a checkpoint at
step 4; expected.json holds the losses of the same version undisturbed. The archives come from one
processor, so the steps after the checkpoint agree to rounding and no better.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import (
    Config,
    ControlsConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
    from_json,
)
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.study import worker
from qkattn.train.loop import train

FIXTURES = Path(__file__).with_name('fixtures')
EXPECTED = json.loads((FIXTURES / 'expected.json').read_text())
ATOL = 1e-4
CONFIG = Config(
    model=ModelConfig(num_layers=1, num_heads=2, d_model=16, d_ff=8, context=8, vocab_size=9),
    data=DataConfig(name='copy(length=4,symbols=8)', eval_sequences=8),
    optimizer=OptimizerConfig(warmup_steps=2),
    train=TrainConfig(
        **{'num_steps': 12, 'batch_size': 4, 'eval_every': 4, 'checkpoint_every': 4},
        **{'steps_per_dispatch': 1, 'log_every': 1, 'lifting': 'map'},
    ),
    trials=TrialsConfig(seeds=(0,), learning_rates=(1e-2,)),
)


@pytest.fixture
def started(tmp_path):
    """started(name): the directory that an archive holds."""

    def extract(name: str) -> Path:
        with tarfile.open(FIXTURES / f'{name}.tar.xz') as archive:
            archive.extractall(tmp_path, filter='data')
        return tmp_path / name

    return extract


def values(records, kind, name):
    return [record[name] for record in records if record['kind'] == kind]


def assert_kept(run: Path, before: list[bytes]) -> None:
    """The lines up to the checkpoint at step 4 stay; the run was resumed, not started over."""
    kept = [line for line in before if json.loads(line)['step'] <= 4]
    assert len(kept) == 5 < len(before)
    assert (run / 'metrics.jsonl').read_bytes().splitlines()[:5] == kept
    assert len(read_json(run / 'provenance.json', {})['starts']) == 2


def test_a_run_of_an_earlier_version_resumes_and_keeps_its_records(started):
    path = started('run')
    before = (path / 'metrics.jsonl').read_bytes().splitlines()
    config = from_json(Config, json.loads((path / 'config.json').read_text())['config'])
    assert config.trials.seeds == (0, 1)
    results = train(config, path)
    assert_kept(path, before)
    records = read_metrics(path / 'metrics.jsonl')
    losses, val_losses = values(records, 'train', 'loss'), values(records, 'eval', 'val_loss')
    np.testing.assert_allclose(losses, EXPECTED['run']['train'], rtol=0, atol=ATOL)
    np.testing.assert_allclose(val_losses, EXPECTED['run']['eval'], rtol=0, atol=ATOL)
    assert [result['val_loss'] for result in results] == val_losses[-1]


def test_a_study_of_an_earlier_version_goes_on_where_it_was_killed(started):
    path = started('study')
    (finished,) = path.glob('runs/*/result.json')
    first, written = (path / 'results.jsonl').read_bytes(), finished.stat().st_mtime_ns
    killed = next(p.parent for p in path.glob('runs/*/lifting.json') if p.parent != finished.parent)
    before = (killed / 'metrics.jsonl').read_bytes().splitlines()
    ledger = (path / 'ledger.jsonl').read_bytes()
    study = Study(
        name='started earlier',
        base=CONFIG,
        variants=('qk/vo', 'shared_qk/vo'),
        sizes=('d_model=16',),
        tolerance=0.1,
        controls=ControlsConfig(equal_shape=False, longer=None),
    )
    worker.run(study, path)
    assert finished.stat().st_mtime_ns == written and not (finished.parent / 'checkpoints').exists()
    assert_kept(killed, before)
    lines = (path / 'results.jsonl').read_bytes()
    assert lines.startswith(first) and first and (path / 'ledger.jsonl').read_bytes() == ledger
    for result, expected in zip(
        map(json.loads, lines.splitlines()), EXPECTED['study'], strict=True
    ):
        loss = expected.pop('val_loss')
        assert expected.items() <= result.items()
        assert result['val_loss'] == pytest.approx(loss, abs=ATOL)

"""Runs that tests of several rooms read; and what it means that two finished runs are one."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from qkattn.config import Config
from qkattn.metrics import SPEEDS, TIMES
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.train import program
from qkattn.train.exported import load_stack
from qkattn.train.loop import train

BUILD = program.build  # before any test replaces it
SMALL = {'num_layers': 1, 'd_model': 16}


@pytest.fixture(scope='session')
def built_once():
    """`program.build`, which builds a config's programs once for all tests."""
    kept = functools.cache(BUILD)

    def once(config, lifting=None):
        return kept(config, lifting or config.train.lifting)

    return once


@pytest.fixture
def programs_kept(built_once, monkeypatch):
    """Later starts of a run, in this process, take the programs of the first one."""
    monkeypatch.setattr(program, 'build', built_once)


class FinishedRun(NamedTuple):
    config: Config
    path: Path


@pytest.fixture(scope='session')
def small_run(tiny, built_once, tmp_path_factory):
    """A finished run of a small model, whose directory tests only read."""
    config = tiny(model=SMALL)
    path = tmp_path_factory.mktemp('small') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        train(config, path)
    return FinishedRun(config, path)


def results_of(run: Path) -> list[dict]:
    return read_json(run / 'result.json', [{}])


def without_times(records: list[dict]) -> list[dict]:
    times = TIMES | SPEEDS
    return [{k: v for k, v in record.items() if k not in times} for record in records]


def assert_same_run(one: Path, other: Path) -> None:
    """Two finished runs are one to the last bit, and the first left nothing else behind."""
    assert (one / 'documents.json').read_bytes() == (other / 'documents.json').read_bytes()
    log = read_metrics(one / 'metrics.jsonl')
    other_log = read_metrics(other / 'metrics.jsonl')
    assert [list(record) for record in log] == [list(record) for record in other_log]
    assert without_times(log) == without_times(other_log)
    assert without_times(results_of(one)) == without_times(results_of(other))
    (config, step, state), (_, other_step, other_state) = map(load_stack, (one, other))
    assert step == other_step == config.train.num_steps
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    steps = [r['step'] for r in log if r['kind'] == 'train']
    assert steps == list(range(config.train.log_every, step + 1, config.train.log_every))
    left = [path.name for folder in (one, one / 'checkpoints') for path in folder.iterdir()]
    assert not [name for name in left if name.endswith(('tmp', '.damaged', 'trash'))]


def assert_close(one: Path, other: Path) -> None:
    """Two runs have the same records, whose numbers agree to rounding."""
    equal = ('kind', 'step', 'eval_tokens', 'eval_rows', 'status', 'diverged_at', 'val_bleu')
    close = ('loss', 'val_loss', 'test_loss', 'val_loss_se', 'val_induction_gain', 'val_entropy')
    records = ([*results_of(run), *read_metrics(run / 'metrics.jsonl')] for run in (one, other))
    for a, b in zip(*records, strict=True):
        assert [a.get(name) for name in equal] == [b.get(name) for name in equal]
        for name in close:
            assert a.get(name) == pytest.approx(b.get(name), abs=1e-5), name
    a, b = (read_json(run / 'documents.json', {})['validation'] for run in (one, other))
    assert a['tokens'] == b['tokens']
    for a_C, b_C in zip(a['nats'], b['nats'], strict=True):
        assert a_C == pytest.approx(b_C, abs=1e-3)

"""Fixtures with finished runs, and assertions that two runs are equal."""

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
    """A function like `program.build` that compiles the program of each config only once.

    `lifting` says how the trials of a run are computed. For example, 'map' computes one after
    another.
    """
    cached_build = functools.cache(BUILD)

    def build(config, lifting=None):
        # The default is the lifting of the config. Both ways to call share one entry of the cache.
        if lifting is None:
            lifting = config.train.lifting
        return cached_build(config, lifting)

    return build


@pytest.fixture
def programs_kept(built_once, monkeypatch):
    """Runs of the same config share one compiled program."""
    monkeypatch.setattr(program, 'build', built_once)


class FinishedRun(NamedTuple):
    config: Config
    path: Path


@pytest.fixture(scope='session')
def small_run(tiny, built_once, tmp_path_factory):
    """A finished run of a small model. Tests only read its directory."""
    config = tiny(model=SMALL)
    path = tmp_path_factory.mktemp('small') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        train(config, path)
    return FinishedRun(config, path)


def results_of(run: Path) -> list[dict]:
    return read_json(run / 'result.json', [{}])


def without_times(records: list[dict]) -> list[dict]:
    """Copies of the records without times and speeds, which differ between equal runs."""
    fields_of_time = TIMES | SPEEDS
    copies = []
    for record in records:
        copy = {name: value for name, value in record.items() if name not in fields_of_time}
        copies.append(copy)
    return copies


def assert_same_run(run: Path, expected: Path) -> None:
    """Asserts that two finished runs are bitwise equal, except for times.

    Also asserts that `run` logged every step once and left no temporary files.

    Args:
        run: The directory of a run, which may have been stopped and resumed.
        expected: The directory of a run of the same config.
    """
    # The losses on documents and the results of trials are equal.
    assert (run / 'documents.json').read_bytes() == (expected / 'documents.json').read_bytes()
    assert without_times(results_of(run)) == without_times(results_of(expected))

    # The records that were logged during training have equal fields, in the same order.
    records = read_metrics(run / 'metrics.jsonl')
    expected_records = read_metrics(expected / 'metrics.jsonl')
    assert without_times(records) == without_times(expected_records)
    for record, expected_record in zip(records, expected_records, strict=True):
        assert list(record) == list(expected_record)

    # The last checkpoint has the same parameters and the same state of the optimizer.
    config, step, state = load_stack(run)
    _, expected_step, expected_state = load_stack(expected)
    assert step == config.train.num_steps
    assert expected_step == config.train.num_steps
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)

    # Each step with a record, such as 10, 20, 30, was logged once and in order.
    log_every = config.train.log_every
    logged_steps = [record['step'] for record in records if record['kind'] == 'train']
    assert logged_steps == list(range(log_every, step + 1, log_every))

    # No temporary file, damaged checkpoint or deleted checkpoint is left.
    for directory in (run, run / 'checkpoints'):
        for path in directory.iterdir():
            assert not path.name.endswith(('tmp', '.damaged', 'trash'))


def assert_close(run: Path, expected: Path) -> None:
    """Asserts that two runs have the same records, with losses that agree to rounding.

    Losses may differ, because other devices may add numbers in another order. Times are not
    compared.
    """
    exact_fields = ['kind', 'step', 'status', 'diverged_at', 'eval_tokens', 'eval_rows', 'val_bleu']
    close_fields = ['loss', 'val_loss', 'test_loss', 'val_loss_se']
    close_fields += ['val_induction_gain', 'val_entropy']

    # The results of each trial, then the records that were logged during training.
    records = [*results_of(run), *read_metrics(run / 'metrics.jsonl')]
    expected_records = [*results_of(expected), *read_metrics(expected / 'metrics.jsonl')]
    for record, expected_record in zip(records, expected_records, strict=True):
        # Each record has only some of the fields. A missing field is None in both records.
        for name in exact_fields:
            assert record.get(name) == expected_record.get(name), name
        for name in close_fields:
            assert record.get(name) == pytest.approx(expected_record.get(name), abs=1e-5), name

    contents = read_json(run / 'documents.json', {})
    expected_contents = read_json(expected / 'documents.json', {})
    documents = contents['validation']
    expected_documents = expected_contents['validation']
    assert documents['tokens'] == expected_documents['tokens']
    # For each trial, the losses on C documents. A loss is a sum over tokens, in nats.
    for nats_C, expected_nats_C in zip(documents['nats'], expected_documents['nats'], strict=True):
        assert nats_C == pytest.approx(expected_nats_C, abs=1e-3)

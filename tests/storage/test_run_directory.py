"""The run directory: its one owner, its one configuration, and what it records at a start."""

import dataclasses
import hashlib
import importlib
import json
import os
import sys

import numpy as np
import pytest

from qkattn.config import Config, OptimizerConfig, TrialsConfig, fingerprint, to_json
from qkattn.errors import ConfigError, InUseError
from qkattn.storage import leases, run_directory
from qkattn.storage.files import write_atomic
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.storage.run_directory import RunDirectory
from tests.processes import git

CONFIG = Config(trials=TrialsConfig(seeds=(0, 1)))


@pytest.mark.parametrize('far', [False, True], ids=['disk', 'bucket'])
def test_a_directory_has_one_owner(tmp_path, request, monkeypatch, far):
    server = request.getfixturevalue('bucket') if far else None
    path = 'gs://runs/a' if far else tmp_path
    with RunDirectory(path, CONFIG) as first:
        assert not first.lost()
        first.metrics.append({'step': 5})
        owner = f'^workdir={path} is in use by process {os.getpid()} on '
        with pytest.raises(InUseError, match=owner):
            RunDirectory(path, CONFIG)
    if not far:
        # A start that is killed as it writes its results leaves a temporary file behind.
        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', lambda *_: None)
            write_atomic(tmp_path / 'result.json', '[]')
        assert [*tmp_path.glob('.*')]
    with RunDirectory(path, CONFIG) as again:
        assert again.metrics.last_step == 5
    assert not [*tmp_path.glob('.*')]
    if server:
        kept = {'a/config.json', 'a/metrics.jsonl', 'a/provenance.json'}
        assert set(server.names('runs')) == kept


def test_an_owner_whose_lease_was_taken_over_writes_no_metrics(bucket, monkeypatch):
    path = 'gs://runs/a'
    seconds = leases.seconds
    with RunDirectory(path, CONFIG) as first:
        first.metrics.append({'step': 5})
        # The lease of the first owner expires, and the second takes it over.
        monkeypatch.setattr(leases, 'seconds', lambda: seconds() + leases.EXPIRY)
        bucket.set_age('runs', 'a/lock', leases.EXPIRY + 1)
        with RunDirectory(path, CONFIG) as second:
            second.metrics.append({'step': 9})
        assert first.lost()
        assert not second.lost()
    assert read_metrics(f'{path}/metrics.jsonl') == [{'step': 9}]


def test_another_config_is_refused_with_exactly_the_fields_that_differ(tmp_path):
    RunDirectory(tmp_path, CONFIG).close()
    before = (tmp_path / 'config.json').read_bytes()
    changed = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, d_model=64, window=8),
        trials=TrialsConfig(seeds=(0, 2)),
        mesh=dataclasses.replace(CONFIG.mesh, data=2),  # of the machine, so no difference
    )
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(tmp_path, changed)
    _, *listed, _ = map(str.strip, str(refusal.value).splitlines())
    assert listed[:2] == ['model.d_model: 128 -> 64', 'model.window: null -> 8']
    assert listed[2:] == ['trials.seeds: [0, 1] -> [0, 2]']
    # A refusal leaves the directory free.
    RunDirectory(tmp_path, CONFIG).close()
    assert (tmp_path / 'config.json').read_bytes() == before
    stored = {'hash': fingerprint(CONFIG), 'config': to_json(CONFIG)}
    assert read_json(tmp_path / 'config.json', {}) == stored


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('config.json', '{"hash": "a", "config": {}}', r'config\.json .*its hash does not match'),
        ('checkpoints/1', '', 'holds checkpoints but no config.json'),
        ('study.json', '{}', 'holds a study; give a run its own directory'),
    ],
)
def test_a_directory_that_holds_something_else_is_refused(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        RunDirectory(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {name.partition('/')[0], 'lock'}


def test_provenance_gains_one_entry_per_start(tmp_path, monkeypatch, outside):
    config = Config(
        optimizer=OptimizerConfig(name='lion:lion(b2=0.9)', schedule='cooldown:cooldown')
    )
    importlib.import_module('lion')
    for typed in (['-m', 'experiments.train', '--workdir=w'], ['/bin/qkattn', 'train']):
        monkeypatch.setattr(sys, 'orig_argv', ['/bin/python3', *typed])
        RunDirectory(tmp_path / 'run', config).close()
    first, second = json.loads((tmp_path / 'run/provenance.json').read_text())['starts']
    assert first['command'] == ['python', '-m', 'experiments.train', '--workdir=w']
    assert second['command'] == ['qkattn', 'train']
    assert first['started'] <= second['started']
    assert first['versions']['numpy'] == np.__version__
    assert first['devices']['count'] >= 1
    # Only modules that have been imported, which a run has done with all of them.
    sha256 = hashlib.sha256((outside / 'lion.py').read_bytes()).hexdigest()
    assert first['imported'] == {'lion:lion': sha256}


def test_git_state_is_that_of_the_package(tmp_path, monkeypatch):
    package = tmp_path / 'repository' / 'package'
    outside = package / '.venv' / 'package'
    for directory in (package, outside):
        directory.mkdir(parents=True)
        (directory / '__init__.py').touch()
    (package / '.gitignore').write_text('.venv')

    state = run_directory.git_state(package)
    assert state['commit'] is state['dirty'] is None
    assert 'not a git repository' in state['reason']
    git(package, 'init', '-q')
    git(package, 'add', '.')
    git(package, 'commit', '-qm', 'first')
    assert run_directory.git_state(outside)['commit'] is None, "in somebody else's checkout"
    head = git(package, 'rev-parse', 'HEAD')
    assert run_directory.git_state(package) == {'commit': head, 'dirty': False}
    (package / '__init__.py').write_text('changed = 1\n')
    assert run_directory.git_state(package) == {'commit': head, 'dirty': True}
    git(package, 'checkout', '-q', '.')
    git(package, 'config', 'core.quotePath', 'false')
    (package / os.fsdecode(b'caf\xe9')).touch()  # in Latin-1
    assert run_directory.git_state(package) == {'commit': head, 'dirty': True}
    monkeypatch.setenv('PATH', str(tmp_path))
    assert "'git'" in run_directory.git_state(package)['reason']

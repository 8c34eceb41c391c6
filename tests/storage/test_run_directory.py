"""The run directory: its one owner, its one configuration, and what it records at a start."""

import dataclasses
import hashlib
import importlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from qkattn.config import (
    Config,
    OptimizerConfig,
    TrialsConfig,
    fingerprint,
    fingerprint_of,
    to_json,
)
from qkattn.errors import ConfigError, InUseError
from qkattn.storage import run_directory
from qkattn.storage.records import read_json
from qkattn.storage.run_directory import RunDirectory
from tests.processes import start_python

CONFIG = Config(trials=TrialsConfig(seeds=(0, 1)))


def test_a_directory_in_use_is_refused_until_its_process_is_killed(tmp_path):
    source = """
        import sys, time
        from qkattn.config import Config
        from qkattn.storage.run_directory import RunDirectory
        with RunDirectory(sys.argv[1], Config()) as run:
            for step in range(1, 6):
                run.metrics.append({'step': step})
            print('holding', flush=True)
            time.sleep(60)
    """
    path = tmp_path / 'run'
    holder = start_python(source, path)
    try:
        assert holder.stdout.readline() == 'holding\n', holder.stderr.read()
        with pytest.raises(InUseError, match=f'^workdir={path} is in use by process {holder.pid} '):
            RunDirectory(path, Config())
    finally:
        holder.kill()
        holder.communicate()
    with RunDirectory(path, Config()) as run:
        # What was appended before kill -9 is there although nothing was flushed or closed.
        assert run.resumed and run.metrics.last_step == 5


def test_a_directory_in_a_bucket_has_one_owner(bucket):
    with RunDirectory('gs://runs/a', CONFIG) as first:
        assert not first.resumed and not first.lost()
        with pytest.raises(InUseError, match='workdir=gs://runs/a is in use by process '):
            RunDirectory('gs://runs/a', CONFIG)
    with RunDirectory('gs://runs/a', CONFIG) as again:
        assert again.resumed and 'a/lock' in bucket.names('runs')
    assert bucket.names('runs') == ['a/config.json', 'a/metrics.jsonl', 'a/provenance.json']


def with_fields(config, **sections):
    for name, fields in sections.items():
        section = dataclasses.replace(getattr(config, name), **fields)
        config = dataclasses.replace(config, **{name: section})
    return config


def test_another_config_is_refused_with_exactly_the_fields_that_differ(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as run:
        assert not run.resumed
    before = (tmp_path / 'config.json').read_bytes()
    changed = with_fields(
        CONFIG,
        model={'d_model': 64, 'window': 8},
        trials={'seeds': (0, 2)},
        mesh={'data': 2},  # of the machine, so no difference
    )
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(tmp_path, changed)
    listed = [line.strip() for line in str(refusal.value).splitlines()[1:-1]]
    assert listed == [
        'model.d_model: 128 -> 64',
        'model.window: null -> 8',
        'trials.seeds: [0, 1] -> [0, 2]',
    ]
    # A refusal leaves the directory free.
    with RunDirectory(tmp_path, CONFIG) as run:
        assert run.resumed
    assert (tmp_path / 'config.json').read_bytes() == before
    stored = {'hash': fingerprint(CONFIG), 'config': to_json(CONFIG)}
    assert read_json(tmp_path / 'config.json', {}) == stored


def write_config(path, stored):
    content = {'hash': fingerprint_of(stored), 'config': stored}
    (path / 'config.json').write_text(json.dumps(content))


def test_a_run_is_resumed_whatever_its_config_lacks_and_its_hash_was(tmp_path):
    stored = to_json(CONFIG)
    del stored['model']['window'], stored['decode']
    write_config(tmp_path, stored)
    assert fingerprint_of(stored) != fingerprint(CONFIG)
    with RunDirectory(tmp_path, CONFIG) as run:
        assert run.resumed
    with pytest.raises(ConfigError, match='model.window: null -> 8'):
        RunDirectory(tmp_path, with_fields(CONFIG, model={'window': 8}))
    stored['model']['of_tomorrow'] = 'sigmoid'
    write_config(tmp_path, stored)
    with pytest.raises(ConfigError, match=r'config\.json has an unknown field model\.of_tomorrow='):
        RunDirectory(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('config.json', '{"hash": "a", "config": {}}', r'config\.json .*its hash is not that of'),
        ('checkpoints/1', '', 'holds checkpoints but no config.json'),
        ('study.json', '{}', 'holds a study; give a run its own directory'),
    ],
)
def test_a_directory_without_its_config_is_not_adopted(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        RunDirectory(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {name.partition('/')[0], 'lock'}


def test_provenance_gains_one_entry_per_start(tmp_path, monkeypatch, outside):
    config = Config(optimizer=OptimizerConfig(name='lion:lion(b2=0.9)', schedule='wsd:wsd'))
    importlib.import_module('lion')
    for typed in (['-m', 'experiments.train', '--workdir=w'], ['/bin/qkattn', 'train']):
        monkeypatch.setattr(sys, 'orig_argv', ['/bin/python3', *typed])
        RunDirectory(tmp_path / 'run', config).close()
    first, second = json.loads((tmp_path / 'run/provenance.json').read_text())['starts']
    assert first['command'] == ['python', '-m', 'experiments.train', '--workdir=w']
    assert second['command'] == ['qkattn', 'train'] and first['started'] <= second['started']
    assert first['versions']['numpy'] == np.__version__ and first['devices']['count'] >= 1
    # Only modules that have been imported, which a run has done with all of them.
    sha256 = hashlib.sha256((outside / 'lion.py').read_bytes()).hexdigest()
    assert first['imported'] == {'lion:lion': sha256}


def test_git_state_in_and_outside_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / 'repository' / 'package'
    package.mkdir(parents=True)
    (package / '__init__.py').touch()

    def git(*arguments: str) -> str:
        identity = ['-c', 'user.name=t', '-c', 'user.email=t@example.com']
        command = ['git', '-C', str(package.parent), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    outside = run_directory.git_state(package)
    assert (outside['commit'], outside['dirty']) == (None, None)
    assert 'not a git repository' in outside['reason']
    git('init', '-q')
    assert run_directory.git_state(package)['commit'] is None, 'not tracked by this repository'
    git('add', '.')
    git('commit', '-qm', 'first')
    environment = package.parent / '.venv' / 'package'
    environment.mkdir(parents=True)
    (environment / '__init__.py').touch()
    assert run_directory.git_state(environment)['commit'] is None, "in somebody else's checkout"
    shutil.rmtree(environment.parent)
    head = git('rev-parse', 'HEAD')
    assert run_directory.git_state(package) == {'commit': head, 'dirty': False}
    (package / '__init__.py').write_text('changed = 1\n')
    assert run_directory.git_state(package) == {'commit': head, 'dirty': True}
    monkeypatch.setenv('PATH', str(tmp_path))
    assert "'git'" in run_directory.git_state(package)['reason']

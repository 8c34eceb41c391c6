"""The run directory: its one owner, its one configuration, and what it records at a start."""

import dataclasses
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

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
from qkattn.errors import ConfigError, InUseError, RunDirectoryError
from qkattn.storage import run_directory
from qkattn.storage.files import as_path
from qkattn.storage.records import read_json
from qkattn.storage.run_directory import RunDirectory
from tests.processes import start_python

CONFIG = Config(trials=TrialsConfig(seeds=(0, 1)))

HOLD_DIRECTORY = """
    import sys, time
    from qkattn.config import Config
    from qkattn.storage.run_directory import RunDirectory
    with RunDirectory.open(sys.argv[1], Config()) as run:
        for step in range(1, 6):
            run.metrics.append({'step': step})
        print('holding', flush=True)
        time.sleep(60)
"""


def test_a_directory_in_use_is_refused_until_its_process_is_killed(tmp_path):
    path = tmp_path / 'run'
    holder = start_python(HOLD_DIRECTORY, path)
    try:
        assert holder.stdout.readline() == 'holding\n', holder.stderr.read()
        with pytest.raises(InUseError, match=f'^workdir={path} is in use by process {holder.pid} '):
            RunDirectory.open(path, Config())
    finally:
        holder.kill()
        holder.communicate()
    with RunDirectory.open(path, Config()) as run:
        assert run.resumed
        # What was appended before kill -9 is there although nothing was flushed or closed.
        assert run.metrics.last_step == 5


def test_a_directory_in_a_bucket_has_one_owner(bucket):
    with RunDirectory.open('gs://runs/a', CONFIG) as first:
        assert not first.resumed and not first.lost()
        with pytest.raises(InUseError, match='workdir=gs://runs/a is in use by process '):
            RunDirectory.open('gs://runs/a', CONFIG)
    with RunDirectory.open('gs://runs/a', CONFIG) as again:
        assert again.resumed and as_path('gs://runs/a/lock').exists()
    assert bucket.names('runs') == ['a/config.json', 'a/metrics.jsonl', 'a/provenance.json']


def test_the_directory_of_a_study_is_refused_and_left_alone(tmp_path):
    (tmp_path / 'study.json').write_text('{}')
    with pytest.raises(ConfigError, match='holds a study; give a run its own directory'):
        RunDirectory.open(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {'study.json', 'lock'}


def test_a_config_is_written_once(tmp_path):
    with RunDirectory.open(tmp_path, CONFIG) as run:
        assert not run.resumed and run.path.is_absolute()
    path = tmp_path / 'config.json'
    written = path.stat()
    with RunDirectory.open(tmp_path, CONFIG) as run:
        assert run.resumed
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert read_json(path, {}) == {'hash': fingerprint(CONFIG), 'config': to_json(CONFIG)}


def with_fields(config, **sections):
    for name, fields in sections.items():
        section = dataclasses.replace(getattr(config, name), **fields)
        config = dataclasses.replace(config, **{name: section})
    return config


def test_another_config_is_refused_with_exactly_the_fields_that_differ(tmp_path):
    RunDirectory.open(tmp_path, CONFIG).close()
    before = (tmp_path / 'config.json').read_bytes()
    changed = with_fields(
        CONFIG,
        model={'d_model': 64, 'window': 8},
        trials={'seeds': (0, 2)},
        mesh={'data': 2},  # of the machine, so no difference
    )
    with pytest.raises(ConfigError) as refusal:
        RunDirectory.open(tmp_path, changed)
    listed = [line.strip() for line in str(refusal.value).splitlines()[1:-1]]
    assert listed == [
        'model.d_model: 128 -> 64',
        'model.window: null -> 8',
        'trials.seeds: [0, 1] -> [0, 2]',
    ]
    assert (tmp_path / 'config.json').read_bytes() == before
    # A refusal leaves the directory free.
    RunDirectory.open(tmp_path, CONFIG).close()


def write_config(path, stored):
    (path / 'config.json').write_text(
        json.dumps({'hash': fingerprint_of(stored), 'config': stored})
    )


def test_a_run_is_resumed_whatever_its_config_lacks_and_its_hash_was(tmp_path):
    RunDirectory.open(tmp_path, CONFIG).close()
    stored = to_json(CONFIG)
    del stored['model']['window'], stored['decode']
    write_config(tmp_path, stored)
    assert fingerprint_of(stored) != fingerprint(CONFIG)
    with RunDirectory.open(tmp_path, CONFIG) as run:
        assert run.resumed
    with pytest.raises(ConfigError, match='model.window: null -> 8'):
        RunDirectory.open(tmp_path, with_fields(CONFIG, model={'window': 8}))
    stored['model']['of_tomorrow'] = 'sigmoid'
    write_config(tmp_path, stored)
    with pytest.raises(ConfigError, match=r'config\.json has an unknown field model\.of_tomorrow='):
        RunDirectory.open(tmp_path, CONFIG)
    write_config(tmp_path, {'model': []})
    with pytest.raises(RunDirectoryError, match=r'config\.json is damaged \(model=\[\] must be'):
        RunDirectory.open(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('config.json', '{"hash": "a", "config": {}}', r'config\.json .*its hash is not that of'),
        ('checkpoints/1', '', 'holds checkpoints but no config.json'),
    ],
)
def test_a_directory_without_its_config_is_not_adopted(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(RunDirectoryError, match=message):
        RunDirectory.open(tmp_path, CONFIG)


def test_provenance_gains_one_entry_per_start(tmp_path, monkeypatch):
    for typed in (['-m', 'experiments.train', '--workdir=w'], ['/bin/qkattn', 'train']):
        monkeypatch.setattr(sys, 'orig_argv', ['/bin/python3', *typed])
        RunDirectory.open(tmp_path, CONFIG).close()
    starts = json.loads((tmp_path / 'provenance.json').read_text())['starts']
    first, second = (start['command'] for start in starts)
    assert first == ['python', '-m', 'experiments.train', '--workdir=w']
    assert second == ['qkattn', 'train']
    assert starts[0]['versions']['numpy'] == np.__version__
    assert set(starts[0]['versions']) == set(run_directory.RECORDED_VERSIONS)
    assert starts[0]['devices']['count'] >= 1
    assert starts[0]['started'] <= starts[1]['started']


def test_provenance_has_the_source_of_what_comes_from_outside(tmp_path, outside):
    named = OptimizerConfig(name='lion:lion(b2=0.9)', schedule='wsd:wsd')
    importlib.import_module('lion')
    RunDirectory.open(tmp_path / 'run', Config(optimizer=named)).close()
    (start,) = json.loads((tmp_path / 'run' / 'provenance.json').read_text())['starts']
    # Only modules that have been imported, which a run has done with all of them.
    sha256 = hashlib.sha256((outside / 'lion.py').read_bytes()).hexdigest()
    assert start['imported'] == {'lion:lion': sha256}


def git(directory: Path, *arguments: str) -> str:
    identity = ['-c', 'user.name=t', '-c', 'user.email=t@example.com']
    command = ['git', '-C', str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_in_and_outside_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / 'repository' / 'package'
    package.mkdir(parents=True)
    (package / '__init__.py').touch()
    outside = run_directory.git_state(package)
    assert (outside['commit'], outside['dirty']) == (None, None)
    assert 'not a git repository' in outside['reason']

    git(package.parent, 'init', '-q')
    assert run_directory.git_state(package)['commit'] is None, 'not tracked by this repository'
    git(package.parent, 'add', '.')
    git(package.parent, 'commit', '-qm', 'first')
    head = git(package.parent, 'rev-parse', 'HEAD')
    environment = package.parent / '.venv' / 'package'
    environment.mkdir(parents=True)
    (environment / '__init__.py').touch()
    assert run_directory.git_state(environment)['commit'] is None, "in somebody else's checkout"
    shutil.rmtree(environment.parent)
    # A hook's variables must not lead to another repository.
    monkeypatch.setenv('GIT_DIR', str(tmp_path / 'elsewhere'))
    assert run_directory.git_state(package) == {'commit': head, 'dirty': False}
    (package / '__init__.py').write_text('changed = 1\n')
    assert run_directory.git_state(package) == {'commit': head, 'dirty': True}

    monkeypatch.setenv('PATH', str(tmp_path))
    assert "'git'" in run_directory.git_state(package)['reason']

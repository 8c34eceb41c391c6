"""The run directory: its one owner, its one configuration, and what it records at a start."""

import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
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


@pytest.fixture(params=['disk', 'bucket'])
def run_path(request, tmp_path):
    if request.param == 'disk':
        return tmp_path
    request.getfixturevalue('bucket')
    return 'gs://runs/a'


def test_a_directory_has_one_owner(run_path):
    """The process that trains a run owns the run's directory.

    Opening the directory again is refused. The message names the owner, which is this process.
    """
    owner = f'^workdir={run_path} is in use by process {os.getpid()} on '

    with RunDirectory(run_path, CONFIG) as first:
        # The right to the directory would be lost if another process took it over.
        assert not first.lost()
        first.metrics.append({'step': 5})
        with pytest.raises(InUseError, match=owner):
            RunDirectory(run_path, CONFIG)

    # A closed directory may be opened again, and has the metrics that were written.
    with RunDirectory(run_path, CONFIG) as reopened:
        assert reopened.metrics.last_step == 5


def test_unfinished_files_are_removed_at_a_start(tmp_path, monkeypatch):
    """The start of a run removes temporary files that a killed process left in its directory.

    `write_atomic` writes a hidden file, and then renames this file with `os.replace`.
    """
    RunDirectory(tmp_path, CONFIG).close()
    # Without the renaming, the hidden file stays. A killed process leaves the same.
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', lambda *_: None)
        write_atomic(tmp_path / 'result.json', '[]')
    hidden_files = list(tmp_path.glob('.*'))
    assert hidden_files != []

    # The next start of the run removes the hidden file.
    RunDirectory(tmp_path, CONFIG).close()

    hidden_files = list(tmp_path.glob('.*'))
    assert hidden_files == []


def test_a_closed_run_in_a_bucket_leaves_no_lock(bucket):
    with RunDirectory('gs://runs/a', CONFIG) as run:
        run.metrics.append({'step': 5})
    RunDirectory('gs://runs/a', CONFIG).close()

    names = set(bucket.names('runs'))
    assert names == {'a/config.json', 'a/metrics.jsonl', 'a/provenance.json'}


def test_an_owner_whose_lease_was_taken_over_writes_no_metrics(bucket, monkeypatch):
    path = 'gs://runs/a'

    with RunDirectory(path, CONFIG) as first:
        # In a bucket, records stay in memory until the directory is closed.
        first.metrics.append({'step': 5})

        # The lease of the first owner expires. The first owner sees this on its own clock.
        clock = leases.seconds
        monkeypatch.setattr(leases, 'seconds', lambda: clock() + leases.EXPIRY)
        # Other processes see the age of the lock in the bucket.
        bucket.set_age('runs', 'a/lock', leases.EXPIRY + 1)

        # So a second owner takes over, and writes its record when its block ends.
        with RunDirectory(path, CONFIG) as second:
            second.metrics.append({'step': 9})

        assert first.lost()
        assert not second.lost()

    # The first owner was closed last. Without its lease, it did not write step 5.
    assert read_metrics(f'{path}/metrics.jsonl') == [{'step': 9}]


CHANGED_CONFIG = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, d_model=64, window=8),
    trials=TrialsConfig(seeds=(0, 2)),
    mesh=dataclasses.replace(CONFIG.mesh, data=2),  # of the machine, so no difference
)


def test_another_config_is_refused_with_the_fields_that_differ(tmp_path):
    """A run can only be continued with the config that its directory stores.

    Settings of the machine may differ. Of these, CHANGED_CONFIG changes the mesh.
    """
    RunDirectory(tmp_path, CONFIG).close()

    with pytest.raises(ConfigError) as refusal:
        RunDirectory(tmp_path, CHANGED_CONFIG)

    # The message has a heading, lines `FIELD: STORED VALUE -> NEW VALUE`, and a line of advice.
    _, *field_lines, _ = str(refusal.value).splitlines()
    assert field_lines == [
        '  model.d_model: 128 -> 64',
        '  model.window: null -> 8',
        '  trials.seeds: [0, 1] -> [0, 2]',
    ]


def test_a_refused_config_leaves_the_directory_as_it_was(tmp_path):
    """The directory of a run stores the config, and is not opened with another config."""
    config_file = tmp_path / 'config.json'
    RunDirectory(tmp_path, CONFIG).close()
    before = config_file.read_bytes()

    with pytest.raises(ConfigError):
        RunDirectory(tmp_path, CHANGED_CONFIG)

    # The refused process holds no lock, so the directory can be opened with the stored config.
    RunDirectory(tmp_path, CONFIG).close()
    assert config_file.read_bytes() == before
    stored = read_json(config_file, {})
    assert stored == {'hash': fingerprint(CONFIG), 'config': to_json(CONFIG)}


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('config.json', '{"hash": "a", "config": {}}', r'config\.json .*its hash does not match'),
        ('checkpoints/1', '', 'holds checkpoints but no config.json'),
        ('study.json', '{}', 'holds a study; give a run its own directory'),
    ],
)
def test_a_directory_that_holds_something_else_is_refused(tmp_path, name, content, message):
    """A run may not start where there is a damaged config, a study, or only checkpoints."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)

    with pytest.raises(ConfigError, match=message):
        RunDirectory(tmp_path, CONFIG)

    # Only the lock file was added.
    name_in_directory, _, _ = name.partition('/')
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {name_in_directory, 'lock'}


def read_starts(directory):
    provenance = json.loads((directory / 'provenance.json').read_text())
    return provenance['starts']


def test_provenance_gains_one_entry_per_start(tmp_path, monkeypatch):
    """Provenance is the command, time, software and devices of each start of a run."""
    # The run is started by a module of experiments, and then by the program qkattn.
    python = '/bin/python3'
    monkeypatch.setattr(sys, 'orig_argv', [python, '-m', 'experiments.train', '--workdir=w'])
    RunDirectory(tmp_path, CONFIG).close()
    monkeypatch.setattr(sys, 'orig_argv', [python, '/bin/qkattn', 'train'])
    RunDirectory(tmp_path, CONFIG).close()

    first, second = read_starts(tmp_path)

    # Commands are stored without the paths of programs.
    assert first['command'] == ['python', '-m', 'experiments.train', '--workdir=w']
    assert second['command'] == ['qkattn', 'train']

    # Times are in ISO format, so they sort as text.
    assert first['started'] <= second['started']
    assert first['versions']['numpy'] == np.__version__
    assert first['devices']['count'] >= 1


def test_provenance_has_hashes_of_imported_outside_modules(tmp_path, outside):
    """A run stores a hash of each imported module from outside the package.

    The config names the modules `lion` and `cooldown`, which are in the directory `outside`.
    """
    config = Config(
        optimizer=OptimizerConfig(name='lion:lion(b2=0.9)', schedule='cooldown:cooldown')
    )
    # Only `lion` has been imported when the run starts.
    importlib.import_module('lion')

    RunDirectory(tmp_path / 'run', config).close()

    (start,) = read_starts(tmp_path / 'run')
    source = (outside / 'lion.py').read_bytes()
    hash_of_source = hashlib.sha256(source).hexdigest()
    assert start['imported'] == {'lion:lion': hash_of_source}


def make_package(directory):
    directory.mkdir(parents=True)
    (directory / '__init__.py').touch()
    return directory


def commit_package(package):
    """Makes a git repository of the package, and returns its first commit."""
    git(package, 'init', '-q')
    git(package, 'add', '.')
    git(package, 'commit', '-qm', 'first')
    return git(package, 'rev-parse', 'HEAD')


def test_a_package_outside_of_a_repository_has_no_git_state(tmp_path):
    package = make_package(tmp_path / 'package')

    state = run_directory.git_state(package)

    assert state['commit'] is None
    assert state['dirty'] is None
    assert 'not a git repository' in state['reason']


def test_an_installed_package_does_not_have_the_git_state_around_it(tmp_path):
    package = make_package(tmp_path / 'repository' / 'package')
    installed = make_package(package / '.venv' / 'package')
    (package / '.gitignore').write_text('.venv')
    commit_package(package)

    assert run_directory.git_state(installed)['commit'] is None


def test_the_git_state_tells_whether_a_file_was_changed(tmp_path):
    package = make_package(tmp_path / 'repository' / 'package')
    commit = commit_package(package)
    assert run_directory.git_state(package) == {'commit': commit, 'dirty': False}

    (package / '__init__.py').write_text('changed = 1\n')
    assert run_directory.git_state(package) == {'commit': commit, 'dirty': True}


def test_the_git_state_counts_a_new_file_with_a_name_in_latin_1(tmp_path):
    package = make_package(tmp_path / 'repository' / 'package')
    commit = commit_package(package)
    git(package, 'config', 'core.quotePath', 'false')

    # With quotePath off, git prints the byte 0xe9 of the name as it is, which is no UTF-8.
    name = os.fsdecode(b'caf\xe9')
    (package / name).touch()

    assert run_directory.git_state(package) == {'commit': commit, 'dirty': True}


def test_the_git_state_says_that_git_is_too_slow(tmp_path, monkeypatch):
    """git warns on standard error, and does not end in time, as on a slow network disk."""

    def time_out(command, **settings):
        # `subprocess.run` gives the output before a timeout as bytes, whatever the encoding.
        raise subprocess.TimeoutExpired(command, settings['timeout'], stderr=b'warning: slow')

    monkeypatch.setattr(run_directory, 'run_program', time_out)

    state = run_directory.git_state(tmp_path)

    # 30 s is the timeout. The reason is text, because provenance.json stores it.
    assert state['reason'].endswith('timed out after 30 seconds')


def test_the_git_state_says_that_git_is_missing(tmp_path, monkeypatch):
    package = make_package(tmp_path / 'repository' / 'package')
    commit_package(package)
    empty_directory = tmp_path / 'bin'
    empty_directory.mkdir()
    monkeypatch.setenv('PATH', str(empty_directory))

    assert "'git'" in run_directory.git_state(package)['reason']

"""Which commit a package belongs to, in and outside a checkout."""

import shutil
import subprocess
from pathlib import Path

from qkattn.storage import run_directory


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

"""Installation: pins, and launch/venv.sh with stand-ins for python and pip. Nothing is fetched."""

import ast
import fcntl
import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TESTED_PYTHONS = ('3.11', '3.12')
SCRIPTS = sorted([*ROOT.glob('launch/*.sh'), ROOT / '.ci' / 'run'])
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']

# Pinned although pyproject.toml leaves it to jax: bitwise results depend on it.
PINNED_BEYOND_PYPROJECT = {'jaxlib'}


def pins(python_version: str) -> dict[str, Requirement]:
    """Returns the requirements in force for one Python, by canonical name; each may occur once."""
    found: dict[str, Requirement] = {}
    for line in (ROOT / 'requirements.txt').read_text().splitlines():
        text = line.split('#')[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({'python_version': python_version}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f'{name} is pinned twice for Python {python_version}'
            found[name] = requirement
    return found


def ranges(*extras: str) -> dict[str, Requirement]:
    """Returns pyproject.toml's dependencies and those of `extras`, by canonical name."""
    optional = PYPROJECT['optional-dependencies']
    texts = [*PYPROJECT['dependencies'], *(text for extra in extras for text in optional[extra])]
    return {canonicalize_name(Requirement(text).name): Requirement(text) for text in texts}


def imported_modules() -> dict[str, Path]:
    """Returns the top-level modules that the package imports, each with one file that does."""
    found: dict[str, Path] = {}
    for folder in ('qkattn', 'experiments', 'configs'):
        for path in sorted((ROOT / folder).rglob('*.py')):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module]
                for name in names:
                    found.setdefault(name.split('.')[0], path.relative_to(ROOT))
    return found


# Imported where it is used, with one sentence where it is missing: reading .pt files needs it.
OPTIONAL = {'torch'}


@pytest.mark.parametrize('python_version', TESTED_PYTHONS)
def test_every_import_is_pinned_and_declared(python_version):
    own = {'qkattn', 'experiments', 'configs'}
    distributions = importlib.metadata.packages_distributions()
    modules = imported_modules()
    assert 'jax' in modules
    for module, path in modules.items():
        if module in own | OPTIONAL or module in sys.stdlib_module_names:
            continue
        assert module in distributions, f'{path} imports {module}, which is not installed'
        names = {canonicalize_name(name) for name in distributions[module]}
        assert names & pins(python_version).keys(), f'{path}: {module} is not in requirements.txt'
        assert names & ranges().keys(), f'{path}: {module} is not in pyproject.toml'


@pytest.mark.parametrize('python_version', TESTED_PYTHONS)
def test_pins_are_exact_and_inside_the_ranges_of_pyproject(python_version):
    pinned, declared = pins(python_version), ranges('test')
    assert pinned.keys() - declared.keys() == PINNED_BEYOND_PYPROJECT
    assert not declared.keys() - pinned.keys(), 'declared but not pinned'
    for name, requirement in pinned.items():
        (specifier,) = requirement.specifier
        assert specifier.operator == '==' and '*' not in specifier.version, requirement
        if name in declared:
            assert declared[name].specifier.contains(specifier.version), requirement


def test_accelerator_extras_are_satisfied_by_the_pinned_jax():
    for extra in ('cuda', 'tpu'):
        wanted = Requirement(PYPROJECT['optional-dependencies'][extra][0])
        for python_version in TESTED_PYTHONS:
            (specifier,) = pins(python_version)['jax'].specifier
            assert wanted.specifier.contains(specifier.version)


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script):
    assert script.stat().st_mode & stat.S_IXUSR, f'{script} is not executable'
    assert script.read_text().startswith('#!/')
    subprocess.run(['bash', '-n', script], check=True)


# launch/venv.sh, with a python that makes environments out of itself and a pip that only counts

FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *version_info*3,\\ 11*) exit "${FAKE_VERSION_STATUS:-0}" ;;
  *ensurepip*) exit "${FAKE_ENSUREPIP_STATUS:-0}" ;;
  '-I -m venv '*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  '-I -m pip '*) echo "$*" >>"$FAKE_PIP_LOG"; exit "${FAKE_PIP_STATUS:-0}" ;;
  *realpath*) echo "$FAKE_BASE" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Sandbox:
    """A copy of what venv.sh reads, in a path with a space, and a PATH with nothing else on it."""

    def __init__(self, directory: Path):
        self.root = directory / 'a tree'
        self.venv = self.root / '.venv'
        self.pip_log = directory / 'pip.log'
        self.bin = directory / 'bin'
        (self.root / 'launch').mkdir(parents=True)
        self.bin.mkdir()
        for name in ('launch/venv.sh', 'requirements.txt', 'pyproject.toml'):
            shutil.copy(ROOT / name, self.root / name)
        for tool in ('bash', 'dirname', 'mkdir', 'mv', 'rm', 'cp', 'ls', 'flock'):
            if (found := shutil.which(tool)) is not None:
                (self.bin / tool).symlink_to(found)

    def add_python(self, name: str = 'python3') -> Path:
        path = self.bin / name
        path.write_text(FAKE_PYTHON)
        path.chmod(0o755)
        return path

    def start(self, **variables: object) -> subprocess.Popen:
        environment = {
            'PATH': str(self.bin),
            'HOME': '',
            'FAKE_PIP_LOG': str(self.pip_log),
            'FAKE_BASE': str(self.bin / 'python3'),
            'REAL_PYTHON': sys.executable,
            **{name: str(value) for name, value in variables.items()},
        }
        command = [self.bin / 'bash', self.root / 'launch' / 'venv.sh']
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=environment, cwd='/', stdout=pipe, stderr=pipe, text=True
        )

    def run(self, **variables: object) -> subprocess.CompletedProcess:
        process = self.start(**variables)
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def pip_calls(self) -> int:
        return len(self.pip_log.read_text().splitlines()) if self.pip_log.exists() else 0


@pytest.fixture
def sandbox(tmp_path) -> Sandbox:
    return Sandbox(tmp_path)


def test_without_a_recent_python_one_sentence_says_so(sandbox):
    nothing = sandbox.run()
    sandbox.add_python()
    old = sandbox.run(FAKE_VERSION_STATUS=1)
    for result in (nothing, old):
        assert result.returncode == 2
        assert result.stderr == (
            'venv: no Python >= 3.11 found on PATH; install one or set PYTHON to its path.\n'
        )
    chosen = sandbox.run(FAKE_VERSION_STATUS=1, PYTHON='python3')
    assert chosen.returncode == 2
    assert chosen.stderr == (
        'venv: PYTHON=python3 is not a working Python >= 3.11; set PYTHON to one.\n'
    )
    assert not sandbox.venv.exists()


@pytest.mark.parametrize('variables', [{}, {'PYTHON': 'python3'}])
def test_without_the_venv_module_one_sentence_says_so(sandbox, variables):
    sandbox.add_python()
    result = sandbox.run(FAKE_ENSUREPIP_STATUS=1, **variables)
    assert result.returncode == 2
    assert result.stderr == (
        'venv: python3 has no venv module; install it (Debian: python3-venv).\n'
    )
    assert not sandbox.venv.exists()


def test_the_environment_is_reused_until_its_inputs_change(sandbox):
    sandbox.add_python()
    first = sandbox.run()
    assert first.returncode == 0, first.stderr
    assert sandbox.pip_calls() == 2, 'requirements, then the package'
    second = sandbox.run()
    assert (second.returncode, second.stderr) == (0, f'venv: using {sandbox.venv}\n')
    assert sandbox.pip_calls() == 2

    with open(sandbox.root / 'requirements.txt', 'a') as file:
        file.write('# changed\n')
    (sandbox.venv / 'left-over').touch()
    third = sandbox.run()
    assert third.returncode == 0, third.stderr
    assert sandbox.pip_calls() == 4
    assert not (sandbox.venv / 'left-over').exists()


def test_an_interrupted_installation_is_recreated(sandbox):
    sandbox.add_python()
    failed = sandbox.run(FAKE_PIP_STATUS=1)
    assert failed.returncode == 1
    assert 'could not install requirements.txt' in failed.stderr
    assert sandbox.venv.exists()
    repaired = sandbox.run()
    assert repaired.returncode == 0
    assert 'incomplete or out of date' in repaired.stderr
    assert sandbox.pip_calls() == 3
    (sandbox.venv / 'bin' / 'python').unlink()
    assert sandbox.run().returncode == 0
    assert sandbox.pip_calls() == 5, 'an environment whose interpreter is gone is recreated'


@pytest.mark.skipif(shutil.which('flock') is None, reason='venv.sh locks where flock exists')
def test_a_second_installation_waits_for_the_first(sandbox):
    sandbox.add_python()
    with open(sandbox.root / 'requirements.txt') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = sandbox.start()
        assert process.stderr.readline() == 'venv: waiting for another installation to finish\n'
        assert sandbox.pip_calls() == 0
    assert process.wait() == 0
    process.communicate()
    assert sandbox.pip_calls() == 2


def test_a_copied_environment_is_recreated(sandbox, tmp_path):
    sandbox.add_python()
    assert sandbox.run().returncode == 0
    shutil.copytree(sandbox.venv, tmp_path / 'copy')
    result = sandbox.run(QKATTN_VENV=tmp_path / 'copy')
    assert 'recreating it' in result.stderr
    assert sandbox.pip_calls() == 4


def test_a_copied_tree_gets_its_own_environment(sandbox, tmp_path):
    sandbox.add_python()
    assert sandbox.run().returncode == 0
    shutil.copytree(sandbox.root, tmp_path / 'copy')
    sandbox.root = tmp_path / 'copy'
    result = sandbox.run()
    assert 'recreating it' in result.stderr
    assert sandbox.pip_calls() == 4
    # The editable installation points to one tree, so two trees cannot share an environment.
    result = sandbox.run(QKATTN_VENV=tmp_path / 'a tree' / '.venv')
    assert 'recreating it' in result.stderr
    assert sandbox.pip_calls() == 6


def test_a_directory_that_the_script_did_not_make_is_left_alone(sandbox, tmp_path):
    sandbox.add_python()
    unrelated = tmp_path / 'home'
    unrelated.mkdir()
    (unrelated / 'thesis').touch()
    result = sandbox.run(QKATTN_VENV=unrelated)
    assert result.returncode == 2
    assert 'was not made by this script' in result.stderr
    assert os.listdir(unrelated) == ['thesis']
    assert sandbox.run(QKATTN_VENV=tmp_path / 'elsewhere').returncode == 0
    assert not sandbox.venv.exists()

"""Installation: pins, and launch/venv.sh with stand-ins for python and pip. Nothing is fetched."""

import ast
import fcntl
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
TESTED_PYTHONS = ('3.11', '3.12')
SCRIPTS = sorted([*ROOT.glob('launch/*.sh'), *ROOT.glob('launch/*.sbatch'), ROOT / '.ci' / 'run'])
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']

OWN = {'qkattn', 'experiments', 'configs'}
# Imported where it is used, with one sentence where it is missing: reading .pt files needs it.
OPTIONAL = {'torch'}
# Pinned although pyproject.toml leaves it to jax: bitwise results depend on it.
PINNED_BEYOND_PYPROJECT = {'jaxlib'}


def by_name(texts) -> dict[str, Requirement]:
    """Returns the requirements by canonical name; each may occur once."""
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        assert name not in found, f'{name} is required twice'
        found[name] = requirement
    return found


def pins(python_version: str) -> dict[str, Requirement]:
    """Returns the lines of requirements.txt in force for one Python."""
    lines = (ROOT / 'requirements.txt').read_text().splitlines()
    texts = [text for line in lines if (text := line.split('#')[0].strip())]
    markers = {text: Requirement(text).marker for text in texts}
    environment = {'python_version': python_version}
    return by_name(t for t, marker in markers.items() if not marker or marker.evaluate(environment))


def imported_modules() -> set[str]:
    """Returns the top-level modules that the package imports."""
    paths = [path for folder in OWN for path in (ROOT / folder).rglob('*.py')]
    found = set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split('.')[0])
    return found


@pytest.mark.parametrize('python_version', TESTED_PYTHONS)
def test_every_import_is_pinned_and_declared(python_version):
    distributions = importlib.metadata.packages_distributions()
    pinned, declared = pins(python_version), by_name(PYPROJECT['dependencies'])
    foreign = imported_modules() - OWN - OPTIONAL - sys.stdlib_module_names
    assert 'jax' in foreign
    for module in foreign:
        names = {canonicalize_name(name) for name in distributions[module]}
        assert names & pinned.keys(), f'{module} is not in requirements.txt'
        assert names & declared.keys(), f'{module} is not in pyproject.toml'


@pytest.mark.parametrize('python_version', TESTED_PYTHONS)
def test_pins_are_exact_and_inside_the_ranges_of_pyproject(python_version):
    extras = PYPROJECT['optional-dependencies']
    pinned, declared = pins(python_version), by_name(PYPROJECT['dependencies'] + extras['test'])
    assert pinned.keys() - declared.keys() == PINNED_BEYOND_PYPROJECT
    assert not declared.keys() - pinned.keys(), 'declared but not pinned'
    for name, requirement in pinned.items():
        (specifier,) = requirement.specifier
        assert specifier.operator == '==' and '*' not in specifier.version, requirement
        wanted = [declared[name]] if name in declared else []
        if name == 'jax':
            wanted += [Requirement(extras[extra][0]) for extra in ('cuda', 'tpu')]
        assert all(one.specifier.contains(specifier.version) for one in wanted), requirement


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script):
    assert script.stat().st_mode & stat.S_IXUSR, f'{script} is not executable'
    assert script.read_text().startswith('#!/')
    subprocess.run(['bash', '-n', script], check=True)


# The wheel, as an installation unpacks it

SHIPPED = {p.stem for p in ROOT.glob('configs/*.py')} | {
    p.stem for p in ROOT.glob('experiments/*.py') if p.stem != '__init__'
}
FROM_ELSEWHERE = f"""
import site, sys
sys.path[:] = [sys.argv[1], *(p for p in sys.path if p not in ('', {str(ROOT)!r}))]
sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]
for name in [name for name in sys.modules if name.startswith('__editable__')]:
    del sys.modules[name]
site.addsitedir(sys.argv.pop(1))
from qkattn.__main__ import main
main()"""


@pytest.mark.parametrize('hook', ['build_wheel', 'build_editable'])
def test_an_installation_has_the_commands_and_the_configs(tmp_path, hook):
    if Version(importlib.metadata.version('setuptools')) < Version('77'):
        pytest.skip('building a wheel needs setuptools >= 77')
    source, site = tmp_path / 'source', tmp_path / 'site'  # the build writes beside its source
    for folder in OWN:
        ignored = shutil.ignore_patterns('__pycache__', 'results')
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ('pyproject.toml', 'setup.py', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, source)
    program = f'from setuptools import build_meta; build_meta.{hook}({str(tmp_path)!r})'
    command = [sys.executable, '-c', program]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = tmp_path.glob('*.whl')
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)

    def qkattn(*arguments: str) -> tuple[int, str]:
        """Exit code and output of `qkattn ...` with `site` as the only place of the package."""
        (elsewhere := tmp_path / 'elsewhere').mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, '-c', FROM_ELSEWHERE, site, *arguments],
            cwd=elsewhere,
            env={**os.environ, 'PYTHONPATH': ''},
            capture_output=True,
            text=True,
        )
        assert not any(elsewhere.iterdir())
        lines = (done.stdout + done.stderr).splitlines(keepends=True)
        # Shown where imports take seconds.
        return done.returncode, ''.join(x for x in lines if not x.startswith('qkattn: starting'))

    code, text = qkattn('--help')
    assert code == 0, text
    assert SHIPPED <= {line.split()[0] for line in text.splitlines() if line}
    assert 'qkattn = qkattn.__main__:main' in next(site.glob('*/entry_points.txt')).read_text()
    if hook == 'build_editable':
        return
    assert {path.name.partition('-')[0] for path in site.iterdir()} == {'qkattn'}
    for folder in OWN:
        below = site / 'qkattn' / ('' if folder == 'qkattn' else folder)
        files = [path for path in (source / folder).rglob('*') if path.is_file()]
        assert not [f for f in files if not (below / f.relative_to(source / folder)).exists()]
    for arguments, flag in (
        (('prepare_data', '--config=small'), '--out'),
        (('verify',), '--results'),
    ):
        code, text = qkattn(*arguments)
        assert code == 2 and text.startswith(f'{flag}=DIRECTORY is required'), text


# launch/venv.sh, with a python that makes environments out of itself and a pip that only counts

FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *version_info*3,\\ 11*) exit "${FAKE_VERSION_STATUS:-0}" ;;
  *ensurepip*) exit "${FAKE_ENSUREPIP_STATUS:-0}" ;;
  '-I -m venv '*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  *' --dry-run '*) exit "${FAKE_PINS_STATUS:-1}" ;; # whether all pins are installed
  '-I -m pip '*) echo "$*" >>"$FAKE_PIP_LOG"; exit "${FAKE_PIP_STATUS:-0}" ;;
  *realpath*) echo "$FAKE_BASE" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Sandbox:
    """A copy of what venv.sh reads, in a path with a space, and a PATH with a python and tools."""

    def __init__(self, directory: Path):
        self.root = directory / 'a tree'
        self.venv = self.root / '.venv'
        self.pip_log = directory / 'pip.log'
        self.bin = directory / 'bin'
        (self.root / 'launch').mkdir(parents=True)
        self.bin.mkdir()
        for name in ('launch/venv.sh', 'requirements.txt', 'pyproject.toml', 'setup.py'):
            shutil.copy(ROOT / name, self.root / name)
        for tool in ('bash', 'dirname', 'mkdir', 'mv', 'rm', 'cp', 'ls', 'flock'):
            if (found := shutil.which(tool)) is not None:
                (self.bin / tool).symlink_to(found)
        self.python = self.bin / 'python3'
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def start(self, **variables: object) -> subprocess.Popen:
        environment = {
            'PATH': str(self.bin),
            'HOME': '',
            'FAKE_PIP_LOG': str(self.pip_log),
            'FAKE_BASE': str(self.python),
            'REAL_PYTHON': sys.executable,
            **{name: str(value) for name, value in variables.items()},
        }
        command = [self.bin / 'bash', self.root / 'launch' / 'venv.sh']
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
        return subprocess.Popen(command, env=environment, cwd='/', **pipes)

    def run(self, expected: int = 0, **variables: object) -> str:
        """What the script says on the way to the expected exit code."""
        process = self.start(**variables)
        stderr = process.communicate()[1]
        assert process.returncode == expected, stderr
        return stderr

    def pip_calls(self) -> int:
        return len(self.pip_log.read_text().splitlines()) if self.pip_log.exists() else 0


@pytest.fixture
def sandbox(tmp_path) -> Sandbox:
    return Sandbox(tmp_path)


NO_PYTHON = 'no Python >= 3.11 found on PATH; install one or set PYTHON to its path.'
WRONG_PYTHON = 'PYTHON=python3 is not a working Python >= 3.11; set PYTHON to one.'
NO_VENV = 'python3 has no venv module; install it (Debian: python3-venv).'


@pytest.mark.parametrize(
    ('variables', 'sentence'),
    [
        (None, NO_PYTHON),
        ({'FAKE_VERSION_STATUS': 1}, NO_PYTHON),
        ({'FAKE_VERSION_STATUS': 1, 'PYTHON': 'python3'}, WRONG_PYTHON),
        ({'FAKE_ENSUREPIP_STATUS': 1}, NO_VENV),
        ({'FAKE_ENSUREPIP_STATUS': 1, 'PYTHON': 'python3'}, NO_VENV),
    ],
)
def test_without_a_suitable_python_one_sentence_says_so(sandbox, variables, sentence):
    if variables is None:
        sandbox.python.unlink()
    assert sandbox.run(2, **variables or {}) == f'venv: {sentence}\n'
    assert not sandbox.venv.exists()


def files_below(directory: Path) -> dict[Path, bytes | None]:
    paths = sorted(directory.rglob('*'))
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def test_a_complete_environment_is_reused_and_never_changed_under_a_job(sandbox):
    sandbox.run()
    assert sandbox.pip_calls() == 2, 'requirements, then the package'
    assert sandbox.run() == f'venv: using {sandbox.venv}\n'
    assert sandbox.pip_calls() == 2

    with open(sandbox.root / 'requirements.txt', 'a') as file:
        file.write('# changed\n')
    (sandbox.venv / 'of a job').touch()
    before = files_below(sandbox.venv)
    text = sandbox.run(2)
    assert f'{sandbox.venv} has other packages than requirements.txt; once nothing runs' in text
    assert len(text.splitlines()) == 1
    assert files_below(sandbox.venv) == before and sandbox.pip_calls() == 2
    # Where all of them are installed, as after pip in that sentence, the package alone follows.
    assert sandbox.run(FAKE_PINS_STATUS=0) == f'venv: using {sandbox.venv}\n'
    assert sandbox.pip_calls() == 3 and (sandbox.venv / 'of a job').exists()
    assert sandbox.run() == f'venv: using {sandbox.venv}\n' and sandbox.pip_calls() == 3


def of_another_python(sandbox, tmp_path):
    """Another node that mounts it may have its interpreter."""
    sandbox.run()
    stamp = sandbox.venv / 'qkattn-stamp'
    stamp.write_text('python 3.10 riscv64\n' + stamp.read_text().partition('\n')[2])
    return sandbox.venv, '.venv is for Python 3.10 riscv64, unlike PYTHON or this machine'


def without_an_interpreter(sandbox, tmp_path):
    sandbox.run()
    (sandbox.venv / 'bin' / 'python').unlink()
    return sandbox.venv, 'unlike PYTHON or this machine; set QKATTN_VENV to another path'


def of_another_clone(sandbox, tmp_path, failing=0):
    """An editable installation points to one tree, so two trees cannot share an environment."""
    first, shared = sandbox.root, tmp_path / 'shared'
    sandbox.run(failing, QKATTN_VENV=shared, FAKE_PIP_STATUS=failing)
    sandbox.root = shutil.copytree(first, tmp_path / 'clone')
    return shared, f' for {first}; set QKATTN_VENV to another path'


def unfinished_of_another_clone(sandbox, tmp_path):
    return of_another_clone(sandbox, tmp_path, failing=1)


def copied(sandbox, tmp_path):
    sandbox.run()
    (tmp_path / 'mount').symlink_to(sandbox.root)
    same = tmp_path / 'mount' / '.venv'  # a second path is no copy
    assert sandbox.run(QKATTN_VENV=same) == f'venv: using {same}\n'
    copy = shutil.copytree(sandbox.venv, tmp_path / 'copy')
    return copy, f'copy was made as {sandbox.venv} for '


def moved(sandbox, tmp_path):
    sandbox.run()
    old, sandbox.root = sandbox.venv, sandbox.root.rename(tmp_path / 'moved')
    return sandbox.root / '.venv', f'moved/.venv was made as {old} for '


def made_by_someone_else(sandbox, tmp_path):
    (home := tmp_path / 'home').mkdir()
    (home / 'thesis').touch()
    return home, 'was not made by this script'


@pytest.mark.parametrize(
    'case',
    [of_another_python, without_an_interpreter, of_another_clone, unfinished_of_another_clone]
    + [copied, moved, made_by_someone_else],
)
def test_an_environment_that_is_not_of_this_tree_and_machine_is_left_alone(sandbox, tmp_path, case):
    directory, sentence = case(sandbox, tmp_path)
    before, calls = files_below(directory), sandbox.pip_calls()
    text = sandbox.run(2, QKATTN_VENV=directory)
    assert sentence in text and len(text.splitlines()) == 1
    assert files_below(directory) == before and sandbox.pip_calls() == calls


@pytest.mark.parametrize('linked', [False, True])
def test_an_interrupted_installation_is_started_over(sandbox, tmp_path, linked):
    if linked:
        (tmp_path / 'scratch').mkdir()
        sandbox.venv.symlink_to(tmp_path / 'scratch')
    assert 'could not install requirements.txt' in sandbox.run(1, FAKE_PIP_STATUS=1)
    (sandbox.venv / 'left-over').touch()
    assert 'creating' in sandbox.run()
    assert sandbox.pip_calls() == 3
    assert not (sandbox.venv / 'left-over').exists()
    assert sandbox.venv.is_symlink() == linked
    assert sandbox.run() == f'venv: using {sandbox.venv}\n'


needs_flock = pytest.mark.skipif(not shutil.which('flock'), reason='venv.sh locks where flock is')


@needs_flock
def test_a_second_installation_waits_for_the_first(sandbox):
    sandbox.run(1, FAKE_PIP_STATUS=1)
    with open(sandbox.venv / 'made-by-qkattn', 'a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = sandbox.start()
        assert process.stderr.readline() == 'venv: waiting for another installation to finish\n'
        assert sandbox.pip_calls() == 1
    process.communicate()
    assert process.returncode == 0
    assert sandbox.pip_calls() == 3


@needs_flock
def test_two_installers_at_a_time_install_once(sandbox):
    both = [sandbox.start() for _ in range(2)]
    for process in both:
        assert process.communicate()[1] and process.returncode == 0
    assert sandbox.pip_calls() == 2


def test_git_ignores_an_environment_that_is_a_link(tmp_path):
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    shutil.copy(ROOT / '.gitignore', tmp_path)
    (tmp_path / '.venv').symlink_to(tmp_path / 'scratch')
    status = ['git', '-C', tmp_path, 'status', '--porcelain']
    assert subprocess.check_output(status, text=True) == '?? .gitignore\n'


def test_launchers_install_extras_that_there_are():
    extras, named = PYPROJECT['optional-dependencies'], set()
    files = [path for path in (ROOT / 'launch').rglob('*') if path.suffix in ('', '.py', '.yaml')]
    for path in [*files, ROOT / 'docs' / 'launch.md']:
        text = path.read_text() if path.is_file() else ''
        for first, second in re.findall(r'\b(cuda|tpu),(\w+)', text):
            named |= {first, second}
    assert {'cuda', 'tpu'} < named <= extras.keys()

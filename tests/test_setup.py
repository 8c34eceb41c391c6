"""Installation: pins, a wheel, and launch/venv.sh with stand-ins for python and pip.

Nothing is fetched.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import qkattn
from tests.launch.launchers import write_program
from tests.processes import ROOT

SCRIPTS = sorted([*ROOT.glob('launch/*.sh'), *ROOT.glob('launch/*.sbatch'), ROOT / '.ci' / 'run'])
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
EXTRAS = PYPROJECT['optional-dependencies']
CORE = PYPROJECT['dependencies']
OURS = {'qkattn', 'experiments', 'configs'}
# Imported where it is used, with one sentence where it is missing: reading .pt files needs it.
OPTIONAL = {'torch'}


def by_name(texts, python_version: str) -> dict[str, Requirement]:
    """The requirements in force for one Python, by canonical name; each may occur once."""
    environment = {'python_version': python_version}
    every = [r for r in map(Requirement, texts) if not r.marker or r.marker.evaluate(environment)]
    named = {canonicalize_name(requirement.name): requirement for requirement in every}
    assert len(named) == len(every)
    return named


def imported_modules() -> set[str]:
    """The top-level modules that the package imports."""
    paths = [path for folder in OURS for path in (ROOT / folder).rglob('*.py')]
    names = set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split('.')[0])
    return names


@pytest.mark.parametrize('python_version', ['3.11', '3.12'])
def test_requirements_pin_one_version_in_the_declared_range(python_version):
    lines = (ROOT / 'requirements.txt').read_text().splitlines()
    pins = filter(None, (line.partition('#')[0].strip() for line in lines))
    pinned = by_name(pins, python_version)
    declared = by_name(CORE + EXTRAS['lab'] + EXTRAS['test'] + EXTRAS['docs'], python_version)
    # Left to jax in pyproject.toml; pinned, as bitwise results depend on it.
    assert pinned.keys() - declared.keys() == {'jaxlib'}
    assert not declared.keys() - pinned.keys()
    for name, pin in pinned.items():
        (specifier,) = pin.specifier
        assert specifier.operator == '==' and '*' not in specifier.version, pin
        ranges = [declared[name]] if name in declared else []
        ranges += map(Requirement, (EXTRAS['cuda'] + EXTRAS['tpu']) if name == 'jax' else ())
        assert all(one.specifier.contains(specifier.version) for one in ranges), pin


@pytest.mark.parametrize('python_version', ['3.11', '3.12'])
def test_imports_are_declared(python_version):
    distributions = importlib.metadata.packages_distributions()
    required = by_name(CORE + EXTRAS['lab'], python_version).keys()
    for module in imported_modules() - OURS - OPTIONAL - sys.stdlib_module_names:
        assert required & {*map(canonicalize_name, distributions[module])}, module


def test_private_modules_of_jax_are_used_below_its_upper_bound():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob('qkattn/**/*.py')
        if 'from jax._src' in path.read_text()
    }
    assert users == {
        'qkattn/jobs/agreement.py',
        'qkattn/jobs/detection.py',
        'qkattn/train/program.py',
    }
    bounds = {specifier.operator for specifier in by_name(CORE, '3.11')['jax'].specifier}
    assert bounds == {'>=', '<'}


# An installation without extras

# Hides the packages of `hidden`, as if they were not installed.
WITHOUT_EXTRAS = """
import importlib.machinery, runpy, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition('.')[0] not in {hidden}:
            return importlib.machinery.PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""


def modules_of_extras() -> set[str]:
    """The installed top-level modules that `pip install qkattn` alone does not bring."""
    core = set()
    pending = {canonicalize_name(Requirement(text).name) for text in CORE}
    while pending:
        name = pending.pop()
        core.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({'extra': ''}):
                pending |= {canonicalize_name(requirement.name)} - core
    return {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module not in OURS and not core & set(map(canonicalize_name, owners))
    }


def run_without_extras(program: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a program where packages of the extras cannot be imported."""
    finder = WITHOUT_EXTRAS.replace('{hidden}', repr(modules_of_extras()))
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    command = [sys.executable, '-c', finder + program]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)


def test_the_core_needs_four_packages():
    assert by_name(CORE, '3.11').keys() == {'jax', 'flax', 'numpy', 'scipy'}


USE_OF_THE_CLASS = """
import jax
from qkattn.attention import AttentionSpec

spec = AttentionSpec(score='qk', value='vo', d_model=8, num_heads=2)
score = SignedDiagonal(spec, key=jax.random.key(0))
print(score.matrix().shape)
"""


def code_after(page: str, place: str) -> str:
    """The first block of Python behind the text `place` of a page."""
    return (ROOT / page).read_text('utf-8').split(place)[1].split('```python\n')[1].split('```')[0]


def test_examples_run_without_extras(tmp_path):
    """One process runs them all, each with names of its own."""
    example_of_class = code_after('README.md', '<!-- example: signed_diagonal.py -->')
    programs = [
        code_after('docs/extend.md', '## Without the laboratory'),
        example_of_class + USE_OF_THE_CLASS,
        code_after('README.md', '## Use a layer'),
    ]
    done = run_without_extras('\n'.join(f'exec({text!r}, {{}})' for text in programs), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        '(2, 16, 64)',
        '(2, 16, 256)',
        '(2, 8, 8)',
        '254528 parameters',
    ]


def test_the_command_without_extras_names_the_one_that_it_needs():
    done = run_without_extras("runpy.run_module('qkattn', run_name='__main__')")
    sentence = "commands need the packages of the laboratory: pip install 'qkattn[lab]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, '', sentence)


def test_extras_that_launchers_install_exist():
    files = [path for path in (ROOT / 'launch').rglob('*') if path.suffix in ('', '.py', '.yaml')]
    text = ''.join(path.read_text() for path in files + [ROOT / 'docs/launch.md'] if path.is_file())
    named = {name for pair in re.findall(r'\b(cuda|tpu),(?!cpu)(\w+)', text) for name in pair}
    assert {'cuda', 'tpu'} < named <= EXTRAS.keys()


def test_the_version_is_the_same_everywhere():
    citation = re.search(r'^version: (.+)$', (ROOT / 'CITATION.cff').read_text(), re.M)
    assert PYPROJECT['version'] == qkattn.__version__ == citation[1]


def test_docs_sh_refuses_to_build_into_a_directory_of_other_files(tmp_path):
    (tmp_path / 'thesis').touch()
    for arguments in ([tmp_path], ['--serve', tmp_path], ['--serve=x'], ['--help'], ['a', 'b']):
        command = ['bash', ROOT / 'launch/docs.sh', *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert [*tmp_path.iterdir()] == [tmp_path / 'thesis']


def test_scripts_are_executable():
    for script in SCRIPTS:
        assert script.stat().st_mode & stat.S_IXUSR
        assert script.read_text().startswith('#!/')


def test_scripts_have_no_syntax_error():
    for script in SCRIPTS:
        subprocess.run(['bash', '-n', script], check=True)


def test_an_installation_has_all_files_of_the_package(tmp_path):
    if Version(importlib.metadata.version('setuptools')) < Version('77'):
        pytest.skip('building a wheel needs setuptools >= 77')
    source = tmp_path / 'source'  # the build writes beside it
    site = tmp_path / 'site'
    ignored = shutil.ignore_patterns('__pycache__', 'results', 'unfinished')
    for folder in OURS:
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ('pyproject.toml', 'setup.py', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, source)
    program = f'from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})'
    subprocess.run([sys.executable, '-c', program], cwd=source, check=True, capture_output=True)
    (built,) = tmp_path.glob('*.whl')
    shutil.unpack_archive(built, site, 'zip')
    assert 'qkattn = qkattn.__main__:main' in next(site.glob('*/entry_points.txt')).read_text()
    (elsewhere := tmp_path / 'elsewhere').mkdir()
    command = [sys.executable, '-m', 'qkattn', 'train', '--config=small', '--dry_run=v5']
    env = {**os.environ, 'PYTHONPATH': str(site), 'PYTHONDONTWRITEBYTECODE': '1'}
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b'--dry_run=v5 must be')
    assert not any(elsewhere.iterdir())
    assert {path.name.partition('-')[0] for path in site.iterdir()} == {'qkattn'}
    for folder in OURS:
        below = site / 'qkattn' / ('' if folder == 'qkattn' else folder)
        names = [path.relative_to(source / folder) for path in (source / folder).rglob('*.*')]
        assert names
        assert all((below / name).exists() for name in names)


# launch/venv.sh, with a python that makes environments out of itself and a pip that only counts

FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *ensurepip*) exit "${FAKE_VERSION_STATUS:-0}" ;;
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
        self.bin = directory / 'bin'
        self.venv = self.root / '.venv'
        self.pip_log = directory / 'pip.log'
        (self.root / 'launch').mkdir(parents=True)
        for name in ('launch/venv.sh', 'requirements.txt', 'pyproject.toml', 'setup.py'):
            shutil.copy(ROOT / name, self.root / name)
        write_program(self.bin / 'python3', FAKE_PYTHON)
        for tool in ('bash', 'dirname', 'mkdir', 'mv', 'rm', 'cp', 'ls', 'flock'):
            if (path := shutil.which(tool)) is not None:
                (self.bin / tool).symlink_to(path)

    def start(self, **variables: object) -> subprocess.Popen:
        python = self.bin / 'python3'
        known = {'PATH': self.bin, 'HOME': '', 'FAKE_PIP_LOG': self.pip_log, 'FAKE_BASE': python}
        known |= {'REAL_PYTHON': sys.executable, **variables}
        env = {name: str(value) for name, value in known.items()}
        command = [self.bin / 'bash', self.root / 'launch/venv.sh']
        return subprocess.Popen(command, env=env, cwd='/', stderr=subprocess.PIPE, text=True)

    def run(self, expected: int = 0, **variables: object) -> str:
        """What the script prints on the way to the expected exit code."""
        process = self.start(**variables)
        stderr = process.communicate()[1]
        assert process.returncode == expected, stderr
        return stderr

    def refused(self, sentence: str, directory: Path | None = None, **variables: object) -> None:
        """It ends in one line, and changes no environment."""
        directory = directory or self.venv

        def state() -> tuple:
            paths = sorted(directory.rglob('*'))
            return self.pip_calls(), paths, [path.read_bytes() for path in paths if path.is_file()]

        before = state()
        text = self.run(2, QKATTN_VENV=directory, **variables)
        assert sentence in text
        assert len(text.splitlines()) == 1
        assert state() == before

    def pip_calls(self) -> int:
        return len(self.pip_log.read_text().splitlines()) if self.pip_log.exists() else 0


@pytest.fixture
def sandbox(tmp_path) -> Sandbox:
    return Sandbox(tmp_path)


def test_a_missing_or_unsuitable_python_is_refused_in_one_sentence(sandbox):
    sentence = 'no Python >= 3.11 with its venv module (Debian: python3-venv) is '
    for where, chosen in (('on PATH; ', {}), ('python3; ', {'PYTHON': 'python3'})):
        sandbox.refused(sentence + where, FAKE_VERSION_STATUS=1, **chosen)
    assert not sandbox.venv.exists()


def test_an_argument_is_refused(sandbox):
    command = [sandbox.bin / 'bash', sandbox.root / 'launch/venv.sh', '--help']
    done = subprocess.run(command, env={'PATH': str(sandbox.bin)}, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert not sandbox.venv.exists()
    assert "takes no arguments, but '--help'" in done.stderr


def test_a_complete_environment_is_reused(sandbox):
    sandbox.run()
    assert sandbox.pip_calls() == 2, 'requirements, then the package'
    assert sandbox.run() == f'venv: using {sandbox.venv}\n'
    assert sandbox.pip_calls() == 2


def test_an_environment_is_never_changed_under_a_job(sandbox):
    sandbox.run()
    with open(sandbox.root / 'requirements.txt', 'a') as file:
        file.write('# changed\n')
    sandbox.refused('was made for other requirements; ')
    (sandbox.venv / 'of a job').touch()
    # Where all of them are installed, as after pip in that sentence, the package alone follows.
    assert sandbox.run(FAKE_PINS_STATUS=0) == f'venv: using {sandbox.venv}\n'
    assert sandbox.pip_calls() == 3
    assert (sandbox.venv / 'of a job').exists()


def test_an_environment_made_elsewhere_is_left_alone(sandbox, tmp_path):
    sandbox.run()
    (tmp_path / 'mount').symlink_to(sandbox.root)
    same = tmp_path / 'mount/.venv'  # a second path is no copy
    assert sandbox.run(QKATTN_VENV=same) == f'venv: using {same}\n'
    lines = (stamp := sandbox.venv / 'qkattn-stamp').read_text().splitlines(keepends=True)
    names = ['python', 'requirements', 'environment', 'repository']
    assert [line.split()[0] for line in lines] == names
    for number, line in enumerate(lines):
        other = f'{line.split()[0]} other\n'
        stamp.write_text(''.join([*lines[:number], other, *lines[number + 1 :]]))
        words = 'other requirements' if number == 1 else other.strip()
        sandbox.refused(f'.venv was made for {words}; set QKATTN_VENV to another path')
    stamp.write_text(''.join(lines))
    (sandbox.venv / 'bin/python').unlink()
    sandbox.refused('.venv was made for python ')
    (home := tmp_path / 'home').mkdir()
    (home / 'thesis').touch()
    sandbox.refused('was not made by this script', home)


def test_an_interrupted_installation_is_started_over_where_the_environment_is_a_link(
    sandbox, tmp_path
):
    (tmp_path / 'scratch').mkdir()
    sandbox.venv.symlink_to(tmp_path / 'scratch')
    assert 'could not install requirements.txt' in sandbox.run(1, FAKE_PIP_STATUS=1)

    # What the interrupted installation left is removed, and the link stays.
    (sandbox.venv / 'left-over').touch()
    assert 'creating' in sandbox.run()
    assert sandbox.pip_calls() == 3
    assert sandbox.venv.is_symlink()
    assert not (sandbox.venv / 'left-over').exists()
    assert sandbox.run() == f'venv: using {sandbox.venv}\n'


@pytest.mark.skipif(not shutil.which('flock'), reason='venv.sh locks where flock is')
def test_two_installers_at_a_time_install_once(sandbox):
    both = [sandbox.start() for _ in range(2)]
    for process in both:
        assert process.communicate()[1]
        assert process.returncode == 0
    assert sandbox.pip_calls() == 2


@pytest.mark.skipif(not shutil.which('flock'), reason='venv.sh locks where flock is')
def test_an_installation_that_another_has_just_finished_is_used(sandbox):
    flock = sandbox.bin / 'flock'
    flock.unlink()
    other = f'{{ : >"$0.called"; "{sandbox.root}/launch/venv.sh"; }}'
    write_program(
        flock, f'#!/bin/sh\n[ -e "$0.called" ] || {other}\nexec {shutil.which("flock")} "$@"\n'
    )
    assert 'venv: using' in sandbox.run()
    assert sandbox.pip_calls() == 2

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
    """The requirements that hold for this Python, by canonical name. None may occur twice."""
    environment = {'python_version': python_version}
    named: dict[str, Requirement] = {}
    for requirement in map(Requirement, texts):
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        assert name not in named
        named[name] = requirement
    return named


def imported_modules() -> set[str]:
    """The top-level modules that the package imports."""
    paths = [path for folder in OURS for path in (ROOT / folder).rglob('*.py')]
    modules = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
    return {module.split('.')[0] for module in modules}


@pytest.mark.parametrize('python_version', ['3.11', '3.12'])
def test_requirements_pin_one_version_in_the_declared_range(python_version):
    lines = (ROOT / 'requirements.txt').read_text().splitlines()
    without_comments = [line.partition('#')[0].strip() for line in lines]
    pinned = by_name([line for line in without_comments if line], python_version)
    declared = by_name(CORE + EXTRAS['lab'] + EXTRAS['test'] + EXTRAS['docs'], python_version)

    # jaxlib is left to jax in pyproject.toml. It is pinned, as bitwise results depend on it.
    assert 'jaxlib' not in declared
    assert pinned.keys() == declared.keys() | {'jaxlib'}
    for name, pin in pinned.items():
        (specifier,) = pin.specifier
        assert specifier.operator == '==', pin
        assert '*' not in specifier.version, pin
        if name in declared:
            assert declared[name].specifier.contains(specifier.version), pin

    jax_version = next(iter(pinned['jax'].specifier)).version
    for requirement in map(Requirement, EXTRAS['cuda'] + EXTRAS['tpu']):
        assert requirement.specifier.contains(jax_version), requirement


@pytest.mark.parametrize('python_version', ['3.11', '3.12'])
def test_imports_are_declared(python_version):
    distributions = importlib.metadata.packages_distributions()
    required = by_name(CORE + EXTRAS['lab'], python_version).keys()
    for module in imported_modules() - OURS - OPTIONAL - sys.stdlib_module_names:
        # The installed packages that have this module.
        packages = {canonicalize_name(name) for name in distributions[module]}
        assert packages & required, module


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
    jax_requirement = by_name(CORE, '3.11')['jax']
    bounds = {specifier.operator for specifier in jax_requirement.specifier}
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


def packages_of_core() -> set[str]:
    """The packages that `pip install qkattn` installs."""
    packages = set()
    pending = [canonicalize_name(Requirement(text).name) for text in CORE]
    while pending:
        name = pending.pop()
        if name in packages:
            continue
        packages.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({'extra': ''}):
                pending.append(canonicalize_name(requirement.name))
    return packages


def modules_of_extras() -> set[str]:
    """The installed top-level modules that `pip install qkattn` alone does not bring."""
    core = packages_of_core()
    modules = set()
    for module, owners in importlib.metadata.packages_distributions().items():
        is_in_core = any(canonicalize_name(owner) in core for owner in owners)
        if module not in OURS and not is_in_core:
            modules.add(module)
    return modules


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
    text = (ROOT / page).read_text('utf-8')
    behind_place = text.split(place)[1]
    return behind_place.split('```python\n')[1].split('```')[0]


def test_examples_run_without_extras(tmp_path):
    example_of_class = code_after('README.md', '<!-- example: signed_diagonal.py -->')
    programs = [
        code_after('docs/extend.md', '## Without the laboratory'),
        example_of_class + USE_OF_THE_CLASS,
        code_after('README.md', '## Use a layer'),
    ]

    # One process runs them all, each with its own globals.
    calls = [f'exec({program!r}, {{}})' for program in programs]
    done = run_without_extras('\n'.join(calls), tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        '(2, 16, 64)',
        '(2, 16, 256)',
        '(2, 8, 8)',
        '254528 parameters',
    ]


def test_the_command_without_extras_names_the_one_that_it_needs():
    done = run_without_extras("runpy.run_module('qkattn', run_name='__main__')")
    assert done.returncode == 2
    assert done.stdout == ''
    sentence = "commands need the packages of the laboratory: pip install 'qkattn[lab]'\n"
    assert done.stderr == sentence


def test_extras_that_launchers_install_exist():
    files = [ROOT / 'docs/launch.md']
    for path in (ROOT / 'launch').rglob('*'):
        if path.is_file() and path.suffix in ('', '.py', '.yaml'):
            files.append(path)

    # Extras are named as in qkattn[cuda,lab]. 'cuda,cpu' is a list of platforms.
    named = set()
    for file in files:
        for accelerator, other in re.findall(r'\b(cuda|tpu),(?!cpu)(\w+)', file.read_text()):
            named |= {accelerator, other}
    assert named > {'cuda', 'tpu'}
    assert named <= EXTRAS.keys()


def test_the_version_is_the_same_everywhere():
    citation = re.search(r'^version: (.+)$', (ROOT / 'CITATION.cff').read_text(), re.M)
    assert PYPROJECT['version'] == qkattn.__version__
    assert citation[1] == qkattn.__version__


def test_docs_sh_refuses_to_build_into_a_directory_of_other_files(tmp_path):
    (tmp_path / 'thesis').touch()
    for arguments in ([tmp_path], ['--serve', tmp_path]):
        assert_refused('launch/docs.sh', *arguments)
    assert list(tmp_path.iterdir()) == [tmp_path / 'thesis']


def test_docs_sh_refuses_other_arguments():
    for arguments in (['--serve=x'], ['--help'], ['a', 'b']):
        assert_refused('launch/docs.sh', *arguments)


def assert_refused(script: str, *arguments: object) -> None:
    """Runs a script of the repository, which must refuse its arguments in one line."""
    command = ['bash', ROOT / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


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
    source = tmp_path / 'source'
    site = tmp_path / 'site'
    copy_sources(source)
    install(source, site)

    # It has the command, and nothing beside the package and its metadata.
    entry_points = next(site.glob('*/entry_points.txt')).read_text()
    assert 'qkattn = qkattn.__main__:main' in entry_points
    assert {path.name.partition('-')[0] for path in site.iterdir()} == {'qkattn'}

    # All files are there. The other folders are installed inside the package.
    for folder in OURS:
        installed = site / 'qkattn' if folder == 'qkattn' else site / 'qkattn' / folder
        names = [path.relative_to(source / folder) for path in (source / folder).rglob('*.*')]
        assert names
        for name in names:
            assert (installed / name).exists()

    # The command runs from another directory, and writes nothing there.
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    command = [sys.executable, '-m', 'qkattn', 'train', '--config=small', '--dry_run=v5']
    env = {**os.environ, 'PYTHONPATH': str(site), 'PYTHONDONTWRITEBYTECODE': '1'}
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b'--dry_run=v5 must be')
    assert not any(elsewhere.iterdir())


def copy_sources(directory: Path) -> None:
    """Copies what a wheel is built from. A build writes into the directory of its sources."""
    ignored = shutil.ignore_patterns('__pycache__', 'results', 'unfinished')
    for folder in OURS:
        shutil.copytree(ROOT / folder, directory / folder, ignore=ignored)
    for name in ('pyproject.toml', 'setup.py', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, directory)


def install(source: Path, site: Path) -> None:
    """Builds a wheel and unpacks it into the directory `site`, as an installation does."""
    wheels = source.parent / 'wheels'
    wheels.mkdir()
    program = f'from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})'
    subprocess.run([sys.executable, '-c', program], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob('*.whl')
    shutil.unpack_archive(wheel, site, 'zip')


# launch/venv.sh, with a stand-in for python: it makes environments that are copies of itself, and
# its pip only logs its calls. Variables FAKE_... are exit codes and paths.

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
            path = shutil.which(tool)
            if path is not None:
                (self.bin / tool).symlink_to(path)

    def start(self, **variables: object) -> subprocess.Popen:
        """Starts venv.sh with these environment variables."""
        defaults = {
            'PATH': self.bin,
            'HOME': '',
            'FAKE_PIP_LOG': self.pip_log,
            'FAKE_BASE': self.bin / 'python3',
            'REAL_PYTHON': sys.executable,
        }
        env = {name: str(value) for name, value in (defaults | variables).items()}
        command = [self.bin / 'bash', self.root / 'launch/venv.sh']
        return subprocess.Popen(command, env=env, cwd='/', stderr=subprocess.PIPE, text=True)

    def run(self, expected: int = 0, **variables: object) -> str:
        """Runs venv.sh, which must end with the expected exit code; returns what it prints."""
        process = self.start(**variables)
        stderr = process.communicate()[1]
        assert process.returncode == expected, stderr
        return stderr

    def refused(self, sentence: str, directory: Path | None = None, **variables: object) -> None:
        """Runs venv.sh, which must refuse with one line and leave the environment as it is."""
        directory = directory or self.venv
        calls_before = self.pip_calls()
        contents_before = contents(directory)
        text = self.run(2, QKATTN_VENV=directory, **variables)
        assert sentence in text
        assert len(text.splitlines()) == 1
        assert self.pip_calls() == calls_before
        assert contents(directory) == contents_before

    def pip_calls(self) -> int:
        """The number of calls of pip by all runs."""
        if not self.pip_log.exists():
            return 0
        return len(self.pip_log.read_text().splitlines())


def contents(directory: Path) -> dict[Path, bytes | None]:
    """The content of every file below a directory; None for a directory."""
    paths = directory.rglob('*')
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def sandbox(tmp_path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.mark.parametrize(
    ('variables', 'place'),
    [
        pytest.param({}, 'on PATH; ', id='on PATH'),
        pytest.param({'PYTHON': 'python3'}, 'python3; ', id='named'),
    ],
)
def test_an_unsuitable_python_is_refused_in_one_sentence(sandbox, variables, place):
    sentence = f'no Python >= 3.11 with its venv module (Debian: python3-venv) is {place}'
    sandbox.refused(sentence, FAKE_VERSION_STATUS=1, **variables)
    assert not sandbox.venv.exists()


def test_an_argument_is_refused(sandbox):
    command = [sandbox.bin / 'bash', sandbox.root / 'launch/venv.sh', '--help']
    done = subprocess.run(command, env={'PATH': str(sandbox.bin)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
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

    # Where all of them are installed, the package alone is installed again.
    (sandbox.venv / 'of a job').touch()
    all_installed = 0
    assert sandbox.run(FAKE_PINS_STATUS=all_installed) == f'venv: using {sandbox.venv}\n'
    assert sandbox.pip_calls() == 3
    assert (sandbox.venv / 'of a job').exists()


def test_an_environment_may_have_a_second_path(sandbox, tmp_path):
    sandbox.run()
    (tmp_path / 'mount').symlink_to(sandbox.root)
    second_path = tmp_path / 'mount/.venv'
    assert sandbox.run(QKATTN_VENV=second_path) == f'venv: using {second_path}\n'


def test_an_environment_made_for_something_else_is_left_alone(sandbox):
    sandbox.run()
    stamp = sandbox.venv / 'qkattn-stamp'
    made_for = dict(line.split(' ', maxsplit=1) for line in stamp.read_text().splitlines())
    assert list(made_for) == ['python', 'requirements', 'environment', 'repository']

    refusals = {
        'python': 'python other',
        'requirements': 'other requirements',
        'environment': 'environment other',
        'repository': 'repository other',
    }
    for name, words in refusals.items():
        changed = made_for | {name: 'other'}
        stamp.write_text(''.join(f'{key} {value}\n' for key, value in changed.items()))
        sandbox.refused(f'.venv was made for {words}; set QKATTN_VENV to another path')


def test_an_environment_without_its_python_is_left_alone(sandbox):
    sandbox.run()
    (sandbox.venv / 'bin/python').unlink()
    sandbox.refused('.venv was made for python ')


def test_a_directory_of_other_files_is_left_alone(sandbox, tmp_path):
    home = tmp_path / 'home'
    home.mkdir()
    (home / 'thesis').touch()
    sandbox.refused('was not made by this script', home)


def test_an_interrupted_installation_is_started_over(sandbox, tmp_path):
    # The environment is a link to a directory elsewhere.
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
    processes = [sandbox.start(), sandbox.start()]
    for process in processes:
        stderr = process.communicate()[1]
        assert stderr
        assert process.returncode == 0
    assert sandbox.pip_calls() == 2, 'requirements, then the package'


@pytest.mark.skipif(not shutil.which('flock'), reason='venv.sh locks where flock is')
def test_an_installation_that_another_has_just_finished_is_used(sandbox):
    # A stand-in for flock, in which another installer runs to its end before the first lock.
    flock = sandbox.bin / 'flock'
    flock.unlink()
    write_program(
        flock,
        f"""#!/bin/sh
if [ ! -e "$0.called" ]; then
  : >"$0.called"
  "{sandbox.root}/launch/venv.sh"
fi
exec {shutil.which('flock')} "$@"
""",
    )
    assert 'venv: using' in sandbox.run()
    assert sandbox.pip_calls() == 2

"""Installation: pins, a wheel, and launch/venv.sh with stand-ins for python and pip.

Nothing is downloaded.
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
# Only reading .pt files needs torch. It is imported there, and may be missing.
OPTIONAL = {'torch'}


def by_name(texts, python_version: str) -> dict[str, Requirement]:
    """Parses requirements, such as 'jax>=0.10.2; python_version >= "3.12"'.

    Requirements for other versions of Python are left out. A second requirement of a package fails.

    Returns:
        The requirement of each package, by the package's canonical name.
    """
    environment = {'python_version': python_version}
    requirement_by_name: dict[str, Requirement] = {}
    for text in texts:
        requirement = Requirement(text)
        marker = requirement.marker  # such as python_version >= "3.12", or None
        if marker and not marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        assert name not in requirement_by_name, f'{name} is required twice'
        requirement_by_name[name] = requirement
    return requirement_by_name


def imported_modules() -> set[str]:
    """The top-level modules that files of the wheel import, as 'jax' for `import jax.numpy`."""
    paths = [path for folder in OURS for path in (ROOT / folder).rglob('*.py')]
    modules = set()
    for path in paths:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
    return {module.split('.')[0] for module in modules}


@pytest.mark.parametrize('python_version', ['3.11', '3.12'])
def test_requirements_pin_one_version_in_the_declared_range(python_version):
    """requirements.txt has one exact version of each package that pyproject.toml declares."""
    lines = (ROOT / 'requirements.txt').read_text().splitlines()
    lines_without_comments = [line.partition('#')[0].strip() for line in lines]
    pins = [line for line in lines_without_comments if line]
    pinned = by_name(pins, python_version)
    # CORE and EXTRAS are read from pyproject.toml.
    declared = by_name(CORE + EXTRAS['lab'] + EXTRAS['test'] + EXTRAS['docs'], python_version)

    # jax chooses its jaxlib. requirements.txt pins jaxlib, because bitwise results depend on it.
    assert 'jaxlib' not in declared
    assert pinned.keys() == declared.keys() | {'jaxlib'}

    # A pin, such as ==0.10.2, lies in the declared range, such as >=0.10.2,<0.13.
    for name, pin in pinned.items():
        (specifier,) = pin.specifier
        assert specifier.operator == '==', pin
        assert '*' not in specifier.version, pin
        if name in declared:
            assert declared[name].specifier.contains(specifier.version), pin

    # The extras for GPUs and TPUs also require jax, in ranges that contain the pinned version.
    (jax_pin,) = pinned['jax'].specifier
    for text in EXTRAS['cuda'] + EXTRAS['tpu']:
        requirement = Requirement(text)
        assert requirement.specifier.contains(jax_pin.version), requirement


@pytest.mark.parametrize('python_version', ['3.11', '3.12'])
def test_imports_are_declared(python_version):
    """Each module that is imported belongs to a package that pyproject.toml requires."""
    # For example, the module 'google' belongs to all installed packages with modules in google/.
    packages_by_module = importlib.metadata.packages_distributions()
    required_packages = by_name(CORE + EXTRAS['lab'], python_version).keys()

    modules_of_others = imported_modules() - OURS - OPTIONAL - sys.stdlib_module_names
    for module in modules_of_others:
        packages = {canonicalize_name(name) for name in packages_by_module[module]}
        assert packages & required_packages, module


def test_private_modules_of_jax_are_used_below_its_upper_bound():
    """jax has an upper bound, because its private modules jax._src may change in any version."""
    files_with_private_imports = set()
    for path in ROOT.glob('qkattn/**/*.py'):
        if 'from jax._src' in path.read_text():
            files_with_private_imports.add(path.relative_to(ROOT).as_posix())
    # Only these three files may import from jax._src.
    assert files_with_private_imports == {
        'qkattn/jobs/agreement.py',
        'qkattn/jobs/detection.py',
        'qkattn/train/program.py',
    }

    # The requirement has a lower and an upper bound, as in 'jax>=0.10.2,<0.13'.
    core_requirements = by_name(CORE, '3.11')
    jax_range = core_requirements['jax'].specifier
    operators = {bound.operator for bound in jax_range}
    assert operators == {'>=', '<'}


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
    """The packages that `pip install qkattn` installs, including requirements of requirements."""
    packages = set()
    pending = [canonicalize_name(Requirement(text).name) for text in CORE]
    while pending:
        name = pending.pop()
        if name in packages:
            continue
        packages.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            marker = requirement.marker
            # A marker such as extra == 'cuda' is false here, because no extra is installed.
            if marker is None or marker.evaluate({'extra': ''}):
                pending.append(canonicalize_name(requirement.name))
    return packages


def modules_of_extras() -> set[str]:
    """The installed top-level modules that `pip install qkattn` does not install."""
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
    """The first block of Python that follows the text `place` on a page."""
    text = (ROOT / page).read_text('utf-8')
    behind_place = text.split(place)[1]
    return behind_place.split('```python\n')[1].split('```')[0]


def test_examples_run_without_extras(tmp_path):
    """Examples of the pages run with only the packages that `pip install qkattn` installs."""
    layer_and_model = code_after('docs/extend.md', '## Without the laboratory')
    example_of_class = code_after('README.md', '<!-- example: signed_diagonal.py -->')
    merged_model = code_after('README.md', '## Use a layer')
    programs = [layer_and_model, example_of_class + USE_OF_THE_CLASS, merged_model]

    # One process runs them all, each with its own globals.
    calls = [f'exec({program!r}, {{}})' for program in programs]
    finished = run_without_extras('\n'.join(calls), tmp_path)

    # The merged model has 4 layers of width D, with 4 heads in each.
    D = 64
    embeddings = (256 + 128) * D  # 256 tokens and 128 positions
    weights_of_layer = (4 + 1 + 1 + 8) * D * D  # 4 heads' W_QK, then W_V, W_O and the MLP
    gains = (2 * 4 + 1) * D  # two norms in each of the 4 layers, and the final norm
    num_parameters = embeddings + 4 * weights_of_layer + gains

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        '(2, 16, 64)',  # 2 sequences of 16 tokens, of width 64
        '(2, 16, 256)',  # logits of 256 tokens
        '(2, 8, 8)',  # USE_OF_THE_CLASS prints the shape of A, for 2 heads and width 8
        f'{num_parameters} parameters',
    ]


def test_the_command_without_extras_names_the_one_that_it_needs():
    done = run_without_extras("runpy.run_module('qkattn', run_name='__main__')")
    assert done.returncode == 2
    assert done.stdout == ''
    sentence = "commands need the packages of the laboratory: pip install 'qkattn[lab]'\n"
    assert done.stderr == sentence


def test_extras_that_launchers_install_exist():
    """Launchers and docs/launch.md name only extras that pyproject.toml has.

    An extra is a set of optional packages, such as `gcs` in `pip install 'qkattn[gcs]'`.
    """
    files = [ROOT / 'docs/launch.md']
    for path in (ROOT / 'launch').rglob('*'):
        if path.is_file() and path.suffix in ('', '.py', '.yaml'):
            files.append(path)

    # Extras are named as in EXTRAS=cuda,gcs. A list with cpu, such as 'cuda,cpu', names platforms.
    pair_of_extras = re.compile(r'\b(cuda|tpu),(?!cpu)(\w+)')
    named_extras = set()
    for file in files:
        for pair in pair_of_extras.findall(file.read_text()):
            named_extras.update(pair)

    # The files name both accelerators, and at least one other extra.
    assert named_extras > {'cuda', 'tpu'}
    assert named_extras <= EXTRAS.keys()


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
    """A wheel has the command `qkattn` and all files, and works outside of the repository."""
    if Version(importlib.metadata.version('setuptools')) < Version('77'):
        pytest.skip('building a wheel needs setuptools >= 77')
    source = tmp_path / 'source'
    site = tmp_path / 'site'
    copy_sources(source)
    # A clone also has stored studies, whose files end like package data. A wheel has none of them,
    # since `verify` takes a directory of results beside it for a whole one.
    for name in ('results/claims/cpu/lm_rank', 'unfinished/lm_long'):
        study = source / 'experiments' / name / 'study.json'
        study.parent.mkdir(parents=True)
        study.touch()
    install(source, site)
    for name in ('results', 'unfinished'):
        shutil.rmtree(source / 'experiments' / name)
        assert not (site / 'qkattn/experiments' / name).exists()

    # The command `qkattn` calls the function `main`.
    entry_points = next(site.glob('*/entry_points.txt')).read_text()
    assert 'qkattn = qkattn.__main__:main' in entry_points

    # `site` has only the package `qkattn` and its metadata `qkattn-VERSION.dist-info`.
    installed_names = {path.name.partition('-')[0] for path in site.iterdir()}
    assert installed_names == {'qkattn'}

    # In a wheel, the folders experiments and configs are inside the package.
    installed_folders = {
        'qkattn': site / 'qkattn',
        'experiments': site / 'qkattn/experiments',
        'configs': site / 'qkattn/configs',
    }
    assert installed_folders.keys() == OURS
    for folder, installed_folder in installed_folders.items():
        files = list((source / folder).rglob('*.*'))
        assert files
        for file in files:
            name = file.relative_to(source / folder)
            assert (installed_folder / name).exists()

    assert_runs_in(tmp_path / 'elsewhere', site)


def assert_runs_in(directory: Path, site: Path) -> None:
    """Checks that the package in `site` runs in a new directory, and writes nothing there."""
    directory.mkdir()
    env = {**os.environ, 'PYTHONPATH': str(site), 'PYTHONDONTWRITEBYTECODE': '1'}

    # The command finds the config `small` in the package. Then it refuses `--dry_run=v5`, because
    # the flag takes a chip with a shape, such as v5p-2x4x4.
    command = [sys.executable, '-m', 'qkattn', 'train', '--config=small', '--dry_run=v5']
    refused = subprocess.run(command, cwd=directory, env=env, capture_output=True)

    assert refused.returncode == 2
    last_line = refused.stderr.splitlines()[-1]
    assert last_line.startswith(b'--dry_run=v5 must be')
    assert not any(directory.iterdir())


def copy_sources(directory: Path) -> None:
    """Copies what a wheel is built from, because a build writes into its source directory."""
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


# launch/venv.sh runs with this stand-in for python. An environment that the stand-in makes has a
# copy of the stand-in. Its pip only logs its calls. Variables FAKE_... are exit codes and paths.

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
    """A small repository with venv.sh, and a PATH with a stand-in for python."""

    def __init__(self, directory: Path):
        """Makes the repository, and the directory `bin` with all programs on the PATH.

        The programs are the stand-in for python, and tools such as mkdir.
        """
        self.root = directory / 'a tree'  # the repository, in a path with a space
        self.bin = directory / 'bin'
        self.venv = self.root / '.venv'
        self.pip_log = directory / 'pip.log'  # a line for each call of pip

        (self.root / 'launch').mkdir(parents=True)
        for name in ('launch/venv.sh', 'requirements.txt', 'pyproject.toml', 'setup.py'):
            shutil.copy(ROOT / name, self.root / name)

        write_program(self.bin / 'python3', FAKE_PYTHON)
        for tool in ('bash', 'dirname', 'mkdir', 'mv', 'rm', 'cp', 'ls', 'flock'):
            path = shutil.which(tool)
            # A machine may lack flock. Then venv.sh does not lock.
            if path is not None:
                (self.bin / tool).symlink_to(path)

    def start(self, **variables: object) -> subprocess.Popen:
        """Starts venv.sh with the default environment variables, changed by `variables`."""
        defaults = {
            'PATH': self.bin,
            'HOME': '',
            # Variables of the stand-in for python.
            'FAKE_PIP_LOG': self.pip_log,
            'FAKE_BASE': self.bin / 'python3',  # the interpreter behind an environment's python
            'REAL_PYTHON': sys.executable,  # runs what the stand-in does not answer itself
        }
        env = {name: str(value) for name, value in (defaults | variables).items()}
        command = [self.bin / 'bash', self.root / 'launch/venv.sh']
        return subprocess.Popen(command, env=env, cwd='/', stderr=subprocess.PIPE, text=True)

    def run(self, expected: int = 0, **variables: object) -> str:
        """Runs venv.sh and returns what it prints. The exit code must be the expected one."""
        process = self.start(**variables)
        stderr = process.communicate()[1]
        assert process.returncode == expected, stderr
        return stderr

    def refused(self, sentence: str, directory: Path | None = None, **variables: object) -> None:
        """Runs venv.sh, which must refuse in one line and must not change the environment."""
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
    """The content of every file below a directory, by path. For a directory it is None."""
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
    """venv.sh replaces no packages in an environment, because a job may be using them."""
    sandbox.run()
    # One call of pip installs the requirements, and a second one the package.
    assert sandbox.pip_calls() == 2

    # The requirements change. With FAKE_PINS_STATUS=1, pip says that some are not installed.
    with open(sandbox.root / 'requirements.txt', 'a') as file:
        file.write('# changed\n')
    sandbox.refused('was made for other requirements; ', FAKE_PINS_STATUS=1)

    # If all requirements are installed, a third call installs only the package again.
    file_of_job = sandbox.venv / 'of a job'
    file_of_job.touch()
    output = sandbox.run(FAKE_PINS_STATUS=0)
    assert output == f'venv: using {sandbox.venv}\n'
    assert sandbox.pip_calls() == 3
    assert file_of_job.exists()


def test_an_environment_may_have_a_second_path(sandbox, tmp_path):
    sandbox.run()
    (tmp_path / 'mount').symlink_to(sandbox.root)
    second_path = tmp_path / 'mount/.venv'
    assert sandbox.run(QKATTN_VENV=second_path) == f'venv: using {second_path}\n'


def test_an_environment_made_for_something_else_is_left_alone(sandbox):
    """venv.sh refuses an environment if any line of its stamp differs from what is needed.

    The stamp is a file in which venv.sh notes what an environment was made for. Each line is a name
    and a value, such as 'python 3.11 x86_64'.
    """
    sandbox.run()  # makes the environment
    stamp = sandbox.venv / 'qkattn-stamp'
    lines = stamp.read_text().splitlines()
    made_for = dict(line.split(' ', maxsplit=1) for line in lines)
    assert list(made_for) == ['python', 'requirements', 'environment', 'repository']

    # For each name, the value becomes 'other'. Messages never show the hash of requirements.
    descriptions = {
        'python': 'python other',
        'requirements': 'other requirements',
        'environment': 'environment other',
        'repository': 'repository other',
    }
    for name, description in descriptions.items():
        changed = made_for | {name: 'other'}
        changed_lines = [f'{key} {value}\n' for key, value in changed.items()]
        stamp.write_text(''.join(changed_lines))
        sandbox.refused(f'.venv was made for {description}; set QKATTN_VENV to another path')


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
    """After a failure of pip, the next run of venv.sh empties the environment and starts over."""
    # The environment is a link to another directory.
    scratch = tmp_path / 'scratch'
    scratch.mkdir()
    sandbox.venv.symlink_to(scratch)

    # The first run ends with 1, because its first call of pip fails.
    output_of_failure = sandbox.run(expected=1, FAKE_PIP_STATUS=1)
    assert 'could not install requirements.txt' in output_of_failure
    left_over = sandbox.venv / 'left-over'
    left_over.touch()

    # The second run calls pip twice, for the requirements and for the package. The link stays.
    output = sandbox.run()
    assert 'creating' in output
    assert sandbox.pip_calls() == 1 + 2
    assert sandbox.venv.is_symlink()
    assert not left_over.exists()

    # The environment is complete, so the third run uses it.
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
    """venv.sh installs nothing if another venv.sh has finished while it waited for the lock.

    venv.sh locks an environment with the program flock, which is replaced here. On its first call,
    the replacement first runs another venv.sh to its end. Every call then runs the real flock.
    """
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

    output = sandbox.run()

    assert 'venv: using' in output
    # Only the other venv.sh has called pip: for the requirements, then for the package.
    assert sandbox.pip_calls() == 2

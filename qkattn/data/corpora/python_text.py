"""Python sources of this machine as text: no download.

`stdlib` is the running interpreter's standard library, so its version names the interpreter's.
`packages` is sources and documentation of the distributions that this package depends on, so its
version is a hash of theirs: the same pins give the same text on every machine.
"""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, readable, split_of
from qkattn.errors import ConfigError

# Of the standard library. Tests, vendored and site packages; what distributions put into packages
# of their own or leave out; generated tables.
STDLIB_LEFT_OUT = {
    *('__phello__', '__pycache__', 'dist-packages', 'distutils', 'encodings', 'ensurepip'),
    *('idlelib', 'lib2to3', 'msilib', 'pydoc_data', 'site-packages', 'test', 'tests', 'tkinter'),
    'turtledemo',
}
# Files that hold the paths and settings of one machine.
STDLIB_FILES_LEFT_OUT = ('_sysconfigdata*.py', 'sitecustomize.py', 'usercustomize.py')

# Of requirements.txt, and installed with the extra `lab`. Another one would make another corpus.
DISTRIBUTIONS = (
    *('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'scipy', 'orbax-checkpoint'),
    *('tensorflow-datasets', 'importlib_resources', 'array_record', 'safetensors', 'grain'),
    *('tokenizers', 'babel', 'requests', 'sacrebleu', 'absl-py', 'ml_collections', 'matplotlib'),
    *('jinja2', 'markupsafe', 'pandas', 'tqdm'),
)
SUFFIXES = {'.py', '.md', '.rst'}  # .txt files here are lists of labels and checksums
# Scripts; tests and their data; copies of other packages.
LEFT_OUT = {
    *('..', '_testing', '_vendor', 'benchmarks', 'internal_test_util', 'test', 'testing', 'tests'),
    'vendor',
}
# Tests; files that are generated, that differ between platforms, or that are in most distributions.
FILES_LEFT_OUT = (
    *('test_*', '*_test.py', '*_tests.py', 'conftest.py', 'LICENSE*', '*_gen.py', '*_pb2*.py'),
    *('__config__.py', '_distributor_init*.py', '*version*.py'),
)
MIN_BYTES = 500  # shorter files are hardly more than a licence


def stdlib(config: DataConfig) -> Corpus:
    """The standard library; a file is a document, in the order of the paths.

    The splits of about 40/30/30 follow from a module's name and not its bytes, so that a module
    that one interpreter validates on is not trained on in another.
    """
    version = '.'.join(map(str, sys.version_info[:3]))
    return _corpus('stdlib', f'py{version}-2.0.0', modules, _stdlib_split)


def packages(config: DataConfig) -> Corpus:
    """The distributions' texts; a file is a document, in the order of the names.

    Folders, whose files share passages, are split 80/10/10.
    """
    with readable("data.name='packages'", 'install requirements.txt', ImportError):
        pins = ' '.join(f'{name}=={metadata.version(name)}' for name in DISTRIBUTIONS)
    version = f'2.0.0-{hashlib.sha256(pins.encode()).hexdigest()[:12]}'

    def split(name: str) -> str:
        return split_of(name.rpartition('/')[0], 80, 10)

    return _corpus('packages', version, _installed, split)


def _corpus(
    name: str, version: str, files: Callable[[], dict[str, Path]], split: Callable[[str], str]
) -> Corpus:

    def names(wanted: str) -> list[str]:
        return [name for name in files() if split(name) == wanted]

    def texts(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: (files()[n].read_bytes() for n in names(split)) for split in SPLITS}

    return Corpus(name=name, version=version, splits=SPLITS, documents=texts, names=names)


def _stdlib_split(path: str) -> str:
    parts = PurePosixPath(path).with_suffix('').parts
    return split_of('.'.join(parts[:-1] if parts[-1] == '__init__' else parts), 40, 30)


def _left_out(path: PurePosixPath, directories: set[str], files: tuple[str, ...]) -> bool:
    return bool(directories.intersection(path.parts[:-1])) or any(map(path.match, files))


# Once: the library's directory also holds all that is installed.
@functools.cache
def modules() -> dict[str, Path]:
    """The files of the standard library that belong to it, by their paths inside, sorted."""
    root = Path(sysconfig.get_path('stdlib'))
    names = (PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob('*.py'))
    kept = (
        str(name)
        for name in names
        # A directory that is no package (config-3.x-<platform>, lib-dynload) is generated.
        if all(part.isidentifier() for part in name.parts[:-1])
        and not _left_out(name, STDLIB_LEFT_OUT, STDLIB_FILES_LEFT_OUT)
    )
    return {name: root / name for name in sorted(kept)}


# Once: read for the names and twice for the texts.
@functools.cache
def _installed() -> dict[str, Path]:
    """Documents by name, without those that are not UTF-8, almost empty or copies of another."""
    if unlisted := [name for name in DISTRIBUTIONS if metadata.files(name) is None]:
        raise ConfigError(f"data.name='packages': pip does not list the files of {unlisted}.")
    files = {
        file.as_posix(): Path(str(file.locate()))
        for name in DISTRIBUTIONS
        for file in metadata.files(name)
        # Descriptions name the licences of what a platform's wheel includes.
        if file.suffix in SUFFIXES
        and not file.parts[0].endswith('.dist-info')
        and not _left_out(file, LEFT_OUT, FILES_LEFT_OUT)
    }
    kept: dict[bytes, str] = {}
    for name in sorted(files):
        text = files[name].read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if len(text) >= MIN_BYTES and 0 not in text:
            kept.setdefault(hashlib.sha256(b' '.join(text.split())).digest(), name)
    return {name: files[name] for name in kept.values()}

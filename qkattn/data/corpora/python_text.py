"""Python sources of this machine as text: no download.

`stdlib` is the running interpreter's standard library, so its version names the interpreter's.
`packages` is sources and documentation of the distributions that this package depends on, so its
version is a hash of theirs: the same pins give the same text on every machine.
"""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, split_of
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

# Of requirements.txt, and installed with the package. Another one would make another corpus.
DISTRIBUTIONS = (
    *('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'scipy', 'orbax-checkpoint'),
    *('tensorflow-datasets', 'importlib_resources', 'array_record', 'safetensors', 'grain'),
    *('tokenizers', 'babel', 'requests', 'sacrebleu', 'absl-py', 'ml_collections', 'matplotlib'),
    *('jinja2', 'markupsafe', 'pandas', 'tqdm'),
)
# Text files (.txt) of these distributions are lists of labels and checksums.
SUFFIXES = {'.py', '.md', '.rst'}
# Tests and their data; copies of other packages.
LEFT_OUT = {
    *('_testing', '_vendor', 'benchmarks', 'internal_test_util', 'test', 'testing', 'tests'),
    'vendor',
}
# Tests; files that are generated, that differ between platforms, or that are in most distributions.
FILES_LEFT_OUT = (
    *('test_*', '*_test.py', '*_tests.py', 'conftest.py', 'LICENSE*', '*_gen.py', '*_pb2*.py'),
    *('__config__.py', '_distributor_init*.py', '*version*.py'),
)
# Shorter files are hardly more than a licence.
MIN_BYTES = 500


class Document(NamedTuple):
    """A file; `name` is its path inside the library or the installation."""

    name: str
    path: Path


def stdlib(config: DataConfig) -> Corpus:
    """The standard library; a file is a document, in the order of the paths.

    The splits of about 40/30/30 follow from a module's name and not its bytes, so that a module
    that one interpreter validates on is not trained on in another. There are some 380 modules:
    smaller evaluation splits would be a few dozen documents.
    """
    root = Path(sysconfig.get_path('stdlib'))
    version = '.'.join(map(str, sys.version_info[:3]))
    # Once: the library's directory also holds all that is installed.
    documents = functools.cache(lambda: [Document(name, root / name) for name in modules(root)])
    return _corpus(
        'stdlib', f'py{version}-2.0.0', documents, lambda path: split_of(module_name(path), 40, 30)
    )


def packages(config: DataConfig) -> Corpus:
    """The distributions' texts; a file is a document, in the order of the names, split 80/10/10.

    Raises:
      ConfigError: a distribution that is not installed.
    """
    pins = []
    for name in DISTRIBUTIONS:
        try:
            pins.append(f'{name}=={metadata.version(name)}')
        except metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"data.name='packages' holds the sources of {name}, which is not installed; "
                'install requirements.txt.'
            ) from error
    version = f'1.0.0-{hashlib.sha256(" ".join(pins).encode()).hexdigest()[:12]}'
    documents = functools.partial(_installed, tuple(pins))
    return _corpus('packages', version, documents, lambda name: split_of(name, 80, 10))


def _corpus(
    name: str, version: str, documents: Callable[[], list[Document]], split: Callable[[str], str]
) -> Corpus:
    def chosen(wanted: str) -> list[Document]:
        return [document for document in documents() if split(document.name) == wanted]

    return Corpus(
        name=name,
        version=version,
        splits=SPLITS,
        documents=lambda language: {
            split: (document.path.read_bytes() for document in chosen(split)) for split in SPLITS
        },
        names=lambda split: [document.name for document in chosen(split)],
    )


def module_name(path: str) -> str:
    """Dotted module name of a file: 'json/decoder.py' -> 'json.decoder'."""
    parts = PurePosixPath(path).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def _left_out(path: PurePosixPath, directories: set[str], files: tuple[str, ...]) -> bool:
    return bool(directories.intersection(path.parts[:-1])) or any(map(path.match, files))


def modules(root: Path) -> list[str]:
    """Sorted paths, relative to `root`, of the files of the standard library that belong to it.

    Raises:
      FileNotFoundError: there are none (a standard library in a zip file, for example).
    """
    files = (PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob('*.py'))
    paths = sorted(
        str(path)
        for path in files
        # A directory that is no package (config-3.x-<platform>, lib-dynload) is generated.
        if all(part.isidentifier() for part in path.parts[:-1])
        and not _left_out(path, STDLIB_LEFT_OUT, STDLIB_FILES_LEFT_OUT)
    )
    if not paths:
        raise FileNotFoundError(
            f'The standard library at {str(root)!r} holds no source files (*.py); run with an '
            'interpreter that has its library unpacked on disk.'
        )
    return paths


def belongs(path: PurePosixPath) -> bool:
    """Whether a file of a distribution, by its path in the installation, is text of `packages`."""
    # Scripts lie outside; descriptions name the licences of what a platform's wheel includes.
    elsewhere = path.parts[0] == '..' or path.parts[0].endswith('.dist-info')
    return (
        path.suffix in SUFFIXES and not elsewhere and not _left_out(path, LEFT_OUT, FILES_LEFT_OUT)
    )


# Read for the names and twice for the texts.
@functools.lru_cache(maxsize=1)
def _installed(pins: tuple[str, ...]) -> list[Document]:
    """All documents by name, without those that are not UTF-8, almost empty or copies of another.

    Raises:
      ConfigError: a distribution without a list of its files, or without one of them.
    """
    documents = []
    for name in DISTRIBUTIONS:
        if (files := metadata.files(name)) is None:
            raise ConfigError(
                f"data.name='packages': {name} was installed without a list of its files; install "
                'it with pip.'
            )
        documents += [
            Document(file.as_posix(), Path(str(file.locate()))) for file in files if belongs(file)
        ]
    kept: dict[bytes, Document] = {}
    for document in sorted(documents):
        try:
            text = document.path.read_bytes()
            text.decode()
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise ConfigError(
                f"data.name='packages': {str(document.path)!r} cannot be read ({error.strerror}); "
                'install requirements.txt again.'
            ) from error
        if len(text) >= MIN_BYTES and 0 not in text:
            kept.setdefault(hashlib.sha256(b' '.join(text.split())).digest(), document)
    return list(kept.values())

"""The running interpreter's own standard library as a text corpus: no download, on every machine.

The text differs between interpreter versions, so the corpus version names the interpreter's.
"""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus

# Tests, vendored and site packages; what distributions put into packages of their own or leave
# out; generated tables.
EXCLUDED_DIRECTORIES = frozenset(
    {
        '__phello__',
        '__pycache__',
        'dist-packages',
        'distutils',
        'encodings',
        'ensurepip',
        'idlelib',
        'lib2to3',
        'msilib',
        'pydoc_data',
        'site-packages',
        'test',
        'tests',
        'tkinter',
        'turtledemo',
    }
)
# Files that hold the paths and settings of one machine.
EXCLUDED_FILES = ('_sysconfigdata*.py', 'sitecustomize.py', 'usercustomize.py')

# Of the selection and the split.
VERSION = '2.0.0'
SPLITS = ('train', 'validation', 'test')
PYTHON = 'py' + '.'.join(map(str, sys.version_info[:3]))


def module_name(path: str) -> str:
    """Dotted module name of a file: 'json/decoder.py' -> 'json.decoder'."""
    parts = PurePosixPath(path).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def split_of(path: str) -> str:
    """The split of a file, about 40/30/30, by the sha256 of its module's name.

    The name and not the bytes decide, and 'zipfile.py' goes with 'zipfile/__init__.py', so a module
    that one interpreter version validates on is not trained on in another. The library has some
    380 modules: smaller evaluation splits would be a few dozen documents.
    """
    digest = hashlib.sha256(module_name(path).encode()).digest()
    percent = int.from_bytes(digest[:8]) * 100 >> 64
    return 'train' if percent < 40 else 'validation' if percent < 70 else 'test'


def module_paths(root: Path) -> list[str]:
    """Sorted paths, relative to `root`, of the files of the corpus.

    Raises:
      FileNotFoundError: if there are none (a standard library in a zip file, for example).
    """

    def belongs(path: PurePosixPath) -> bool:
        # A directory that is no package (config-3.x-<platform>, lib-dynload) is generated.
        return (
            not EXCLUDED_DIRECTORIES.intersection(path.parts[:-1])
            and all(part.isidentifier() for part in path.parts[:-1])
            and not any(path.match(pattern) for pattern in EXCLUDED_FILES)
        )

    found = (PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob('*.py'))
    paths = sorted(str(path) for path in found if belongs(path))
    if not paths:
        raise FileNotFoundError(
            f'The standard library at {str(root)!r} holds no source files (*.py); run with an '
            'interpreter that has its library unpacked on disk.'
        )
    return paths


def corpus(config: DataConfig) -> Corpus:
    """The corpus; a file is a document, in the order of the paths."""
    root = Path(sysconfig.get_path('stdlib'))
    # Once: the library's directory also holds all that is installed.
    paths = functools.cache(lambda: module_paths(root))

    def names(split: str) -> list[str]:
        return [path for path in paths() if split_of(path) == split]

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: _texts(root, names(split)) for split in SPLITS}

    return Corpus(
        name='stdlib',
        version=f'{PYTHON}-{VERSION}',
        languages=(),
        splits=SPLITS,
        documents=documents,
        names=names,
    )


def _texts(root: Path, paths: list[str]) -> Iterator[bytes]:
    for path in paths:
        yield (root / path).read_bytes()

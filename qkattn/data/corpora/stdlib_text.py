"""The running interpreter's own standard library as a text corpus: no download, on every machine.

Bytes differ between interpreter versions, so the version is part of the config name.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.cache import data_root
from qkattn.data.corpora import builders
from qkattn.data.corpora.corpus import Corpus

# Tests, vendored and site packages; what distributions put into packages of their own or leave
# out; tables that a program wrote.
LEFT_OUT_DIRECTORIES = frozenset(
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
LEFT_OUT_FILES = ('_sysconfigdata*.py', 'sitecustomize.py', 'usercustomize.py')

SPLITS = ('train', 'validation', 'test')
PYTHON = 'py' + '.'.join(map(str, sys.version_info[:3]))


def module_name(path: str) -> str:
    """Dotted module name of a file: 'json/decoder.py' -> 'json.decoder'."""
    parts = PurePosixPath(path).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def split_of(path: str) -> str:
    """The split of a file, about 90/5/5, by the sha256 of its module's name.

    The name and not the bytes decide, and 'zipfile.py' goes with 'zipfile/__init__.py', so a module
    that one interpreter version validates on is not trained on in another.
    """
    digest = hashlib.sha256(module_name(path).encode()).digest()
    percent = int.from_bytes(digest[:8]) * 100 >> 64
    return 'train' if percent < 90 else 'validation' if percent < 95 else 'test'


def module_paths(root: Path) -> list[str]:
    """Sorted paths, relative to `root`, of the files of the corpus.

    Raises:
      FileNotFoundError: if there are none (a standard library in a zip file, for example).
    """

    def belongs(path: PurePosixPath) -> bool:
        # A directory that is no package (config-3.x-<platform>, lib-dynload) is generated.
        return (
            not LEFT_OUT_DIRECTORIES.intersection(path.parts[:-1])
            and all(part.isidentifier() for part in path.parts[:-1])
            and not any(path.match(pattern) for pattern in LEFT_OUT_FILES)
        )

    found = (PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob('*.py'))
    paths = sorted(str(path) for path in found if belongs(path))
    if not paths:
        raise FileNotFoundError(
            f'The standard library at {str(root)!r} holds no source files (*.py); run with an '
            'interpreter that has its library unpacked on disk.'
        )
    return paths


class StdlibText(tfds.core.GeneratorBasedBuilder):
    """Source files of Python's standard library: {'path': relative path, 'text': the bytes}."""

    VERSION = tfds.core.Version('1.0.0')
    RELEASE_NOTES = {'1.0.0': 'Modules without tests and generated tables, split by module name.'}
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=PYTHON)]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {'path': tfds.features.Text(), 'text': tfds.features.Text()}
            ),
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[str, dict[str, str | bytes]]]]:
        root = Path(sysconfig.get_path('stdlib'))
        paths = module_paths(root)
        return {
            split: self._generate_examples(root, [p for p in paths if split_of(p) == split])
            for split in SPLITS
        }

    def _generate_examples(
        self, root: Path, paths: list[str]
    ) -> Iterator[tuple[str, dict[str, str | bytes]]]:
        for path in paths:
            yield path, {'path': path, 'text': (root / path).read_bytes()}


def version() -> str:
    """What the corpus depends on: the interpreter's version and the builder's."""
    return f'{PYTHON}-{StdlibText.VERSION}'


def prepare(data_dir: Path) -> tfds.core.DatasetBuilder:
    """The builder, prepared under `data_dir`; safe to call from many processes at once."""
    return builders.prepare(lambda: StdlibText(data_dir=data_dir), data_dir=data_dir)


def documents(data_dir: Path) -> dict[str, Iterable[bytes]]:
    """Texts of each split in the order of their paths; prepares the corpus where it is missing.

    Raises:
      RuntimeError: while iterating, if the prepared files are damaged.
    """
    builder = prepare(data_dir)
    return {split: builders.texts(builder, split, 'text') for split in SPLITS}


def corpus(config: DataConfig) -> Corpus:
    """The corpus; its files are prepared when documents are asked for."""
    return Corpus(
        name='stdlib',
        version=version(),
        languages=(),
        splits=SPLITS,
        documents=lambda language: documents(data_root(config.data_dir)),
    )

"""Sources and documentation of the packages that this one depends on: no download, many documents.

The text is that of the installed distributions, so the corpus version names their versions: the
same pins give the same text on every machine.
"""

import functools
import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus
from qkattn.errors import ConfigError

# Of requirements.txt, and installed with the package. Another one would make another corpus.
DISTRIBUTIONS = (
    *('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'scipy', 'orbax-checkpoint'),
    *('tensorflow-datasets', 'importlib_resources', 'array_record', 'safetensors', 'grain'),
    *('tokenizers', 'babel', 'requests', 'sacrebleu', 'absl-py', 'ml_collections', 'matplotlib'),
    *('jinja2', 'markupsafe', 'pandas', 'tqdm'),
)
# Text files (.txt) of these distributions are lists of labels and checksums.
SUFFIXES = frozenset({'.py', '.md', '.rst'})
# Tests and their data; copies of other packages.
EXCLUDED_DIRECTORIES = frozenset(
    {
        '_testing',
        '_vendor',
        'benchmarks',
        'internal_test_util',
        'test',
        'testing',
        'tests',
        'vendor',
    }
)
# Tests; files that are generated, that differ between platforms, or that are in most distributions.
EXCLUDED_FILES = (
    *('test_*', '*_test.py', '*_tests.py', 'conftest.py'),
    *(
        'LICENSE*',
        '*_gen.py',
        '*_pb2*.py',
        '__config__.py',
        '_distributor_init*.py',
        '*version*.py',
    ),
)
# Shorter files are hardly more than a licence.
MIN_BYTES = 500

# Of the selection and the split.
VERSION = '1.0.0'
SPLITS = ('train', 'validation', 'test')


class Document(NamedTuple):
    """A file of a distribution; `name` is its path inside the installation."""

    name: str
    path: Path


def belongs(path: PurePosixPath) -> bool:
    """Whether a file of a distribution, by its path in the installation, is text of the corpus."""
    return (
        path.suffix in SUFFIXES
        # Scripts lie outside; descriptions name the licences of what a platform's wheel includes.
        and not (path.parts[0] == '..' or path.parts[0].endswith('.dist-info'))
        and not EXCLUDED_DIRECTORIES.intersection(path.parts[:-1])
        and not any(path.match(pattern) for pattern in EXCLUDED_FILES)
    )


def split_of(name: str) -> str:
    """The split of a file, about 80/10/10, by the sha256 of its name and not of its bytes."""
    percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) * 100 >> 64
    return 'train' if percent < 80 else 'validation' if percent < 90 else 'test'


def corpus(config: DataConfig) -> Corpus:
    """The corpus; a file is a document, in the order of the names.

    Raises:
      ConfigError: a distribution that is not installed.
    """
    pins = tuple(_pin(name) for name in DISTRIBUTIONS)

    def chosen(split: str) -> list[Document]:
        return [document for document in _documents(pins) if split_of(document.name) == split]

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: (doc.path.read_bytes() for doc in chosen(split)) for split in SPLITS}

    return Corpus(
        name='packages',
        version=f'{VERSION}-{hashlib.sha256(" ".join(pins).encode()).hexdigest()[:12]}',
        languages=(),
        splits=SPLITS,
        documents=documents,
        names=lambda split: [document.name for document in chosen(split)],
    )


def _pin(name: str) -> str:
    try:
        return f'{name}=={metadata.version(name)}'
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"data.name='packages' holds the sources of {name}, which is not installed; install "
            'requirements.txt.'
        ) from error


# Read for the names and twice for the texts.
@functools.lru_cache(maxsize=1)
def _documents(pins: tuple[str, ...]) -> tuple[Document, ...]:
    """All documents by name, without those that are not UTF-8, almost empty or copies of another.

    Raises:
      ConfigError: a distribution without a list of its files, or without one of them.
    """
    found = sorted(
        Document(file.as_posix(), Path(str(file.locate())))
        for name in DISTRIBUTIONS
        for file in _files(name)
        if belongs(file)
    )
    kept: dict[bytes, Document] = {}
    for document in found:
        try:
            text = document.path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"data.name='packages': {str(document.path)!r} cannot be read ({error.strerror}); "
                'install requirements.txt again.'
            ) from error
        if len(text) >= MIN_BYTES and 0 not in text and _is_utf8(text):
            kept.setdefault(hashlib.sha256(b' '.join(text.split())).digest(), document)
    return tuple(kept.values())


def _files(name: str) -> list[metadata.PackagePath]:
    files = metadata.files(name)
    if files is None:
        raise ConfigError(
            f"data.name='packages': {name} was installed without a list of its files; install it "
            'with pip.'
        )
    return files


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True

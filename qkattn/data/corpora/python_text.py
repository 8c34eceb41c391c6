"""The corpus `stdlib`: the running interpreter's standard library as text, without a download."""

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, split_of

# Tests, vendored packages, installed packages and generated tables. Also parts that distributions
# of Python leave out or put into packages of their own.
# fmt: off
DIRECTORIES_LEFT_OUT = {
    '__phello__', '__pycache__', 'dist-packages', 'distutils', 'encodings', 'ensurepip', 'idlelib',
    'lib2to3', 'msilib', 'pydoc_data', 'site-packages', 'test', 'tests', 'tkinter', 'turtledemo',
}
# fmt: on
# Files that hold the paths and settings of one machine.
FILES_LEFT_OUT = ('_sysconfigdata*.py', 'sitecustomize.py', 'usercustomize.py')


def stdlib(config: DataConfig) -> Corpus:
    """Opens the standard library of the running interpreter. Each file is a document.

    The documents are in the order of their paths. About 40 % are in train, and about 30 % each in
    validation and test. The name of a module decides its split. So a module is in the same split
    under every version of Python, even if its text differs.
    """

    def names(split: str) -> list[str]:
        return [path for path in modules() if _split(path) == split]

    def read_texts(split: str) -> Iterator[bytes]:
        for name in names(split):
            yield modules()[name].read_bytes()

    interpreter = '.'.join(map(str, sys.version_info[:3]))
    return Corpus(
        name='stdlib',
        version=f'py{interpreter}-2.0.0',
        splits=SPLITS,
        documents=lambda language: {split: read_texts(split) for split in SPLITS},
        names=names,
    )


def _split(path: str) -> str:
    """Returns the split of a module, by its name: 'json/decoder.py' is the module json.decoder."""
    parts = PurePosixPath(path).with_suffix('').parts
    if parts[-1] == '__init__':  # 'json/__init__.py' is the module json
        parts = parts[:-1]
    return split_of('.'.join(parts), train=40, validation=30)


@functools.cache
def modules() -> dict[str, Path]:
    """Returns the files of the corpus by their paths in the library, such as 'json/decoder.py'.

    The paths are sorted.
    """
    root = Path(sysconfig.get_path('stdlib'))
    paths = []
    for directory, subdirectories, files in os.walk(root):
        # The walk goes on in the directories that stay in the list. Those that cannot be packages,
        # such as lib-dynload, hold generated files.
        subdirectories[:] = [
            name
            for name in subdirectories
            if name.isidentifier() and name not in DIRECTORIES_LEFT_OUT
        ]
        for name in files:
            path = PurePosixPath(Path(directory, name).relative_to(root).as_posix())
            is_left_out = any(path.match(pattern) for pattern in FILES_LEFT_OUT)
            if path.suffix == '.py' and not is_left_out:
                paths.append(str(path))
    return {path: root / path for path in sorted(paths)}

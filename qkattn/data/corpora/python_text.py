"""The corpus `stdlib`: source files of the running interpreter's standard library."""

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, split_of

# Tests, vendored and installed packages, generated tables, and parts that some distributions of
# Python leave out.
# fmt: off
DIRECTORIES_LEFT_OUT = {
    '__phello__', '__pycache__', 'dist-packages', 'distutils', 'encodings', 'ensurepip', 'idlelib',
    'lib2to3', 'msilib', 'pydoc_data', 'site-packages', 'test', 'tests', 'tkinter', 'turtledemo',
}
# fmt: on
# Files with paths and settings of one machine.
FILES_LEFT_OUT = ('_sysconfigdata*.py', 'sitecustomize.py', 'usercustomize.py')


def stdlib(config: DataConfig) -> Corpus:
    """Opens the standard library of the running interpreter. Each file is a document.

    About 40 % of the files are in train, and about 30 % each in validation and test. A module is in
    the same split in every version of Python.
    """

    def names(split: str) -> list[str]:
        return [path for path in modules() if _split(path) == split]

    def read_texts(split: str) -> Iterator[bytes]:
        for path in names(split):
            yield modules()[path].read_bytes()

    python_version = '.'.join(map(str, sys.version_info[:3]))  # such as '3.12.4'
    return Corpus(
        name='stdlib',
        version=f'py{python_version}-2.0.0',
        splits=SPLITS,
        documents=lambda language: {split: read_texts(split) for split in SPLITS},
        names=names,
    )


def _split(path: str) -> str:
    """Returns the split of a module by its dotted name, such as json.decoder."""
    parts = PurePosixPath(path).with_suffix('').parts
    if parts[-1] == '__init__':  # 'json/__init__.py' is the module json
        parts = parts[:-1]
    module_name = '.'.join(parts)
    return split_of(module_name, train=40, validation=30)


@functools.cache
def modules() -> dict[str, Path]:
    """Returns the source files by sorted path in the library, such as 'json/decoder.py'."""
    root = Path(sysconfig.get_path('stdlib'))
    relative_paths = []
    for directory, subdirectories, file_names in os.walk(root):
        # `os.walk` enters the subdirectories that stay in this list. Names that are not
        # identifiers, such as lib-dynload, are not packages.
        subdirectories[:] = [
            name
            for name in subdirectories
            if name.isidentifier() and name not in DIRECTORIES_LEFT_OUT
        ]
        for file_name in file_names:
            path = Path(directory, file_name).relative_to(root)
            is_left_out = any(path.match(pattern) for pattern in FILES_LEFT_OUT)
            if path.suffix == '.py' and not is_left_out:
                relative_paths.append(path.as_posix())
    return {path: root / path for path in sorted(relative_paths)}

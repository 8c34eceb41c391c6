"""The corpus `stdlib`: the running interpreter's standard library as text, without a download."""

import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SPLITS, Corpus, split_of

# Tests, vendored and site packages; what distributions put into packages of their own or leave out;
# generated tables.
# fmt: off
DIRECTORIES_LEFT_OUT = {
    '__phello__', '__pycache__', 'dist-packages', 'distutils', 'encodings', 'ensurepip', 'idlelib',
    'lib2to3', 'msilib', 'pydoc_data', 'site-packages', 'test', 'tests', 'tkinter', 'turtledemo',
}
# fmt: on
# Files that hold the paths and settings of one machine.
FILES_LEFT_OUT = ('_sysconfigdata*.py', 'sitecustomize.py', 'usercustomize.py')


def stdlib(config: DataConfig) -> Corpus:
    """The standard library; a file is a document, in the order of the paths.

    Its version names that of the interpreter. The splits of about 40/30/30 follow from a module's
    name and not its bytes, so that a module that one interpreter validates on is not trained on in
    another.
    """

    def names(split: str) -> list[str]:
        return [path for path in modules() if _split(path) == split]

    def texts(split: str) -> Iterator[bytes]:
        for name in names(split):
            yield modules()[name].read_bytes()

    interpreter = '.'.join(map(str, sys.version_info[:3]))
    return Corpus(
        name='stdlib',
        version=f'py{interpreter}-2.0.0',
        splits=SPLITS,
        documents=lambda language: {split: texts(split) for split in SPLITS},
        names=names,
    )


def _split(path: str) -> str:
    """The split of a module by its name: of json.decoder for 'json/decoder.py'."""
    parts = PurePosixPath(path).with_suffix('').parts
    if parts[-1] == '__init__':  # of a package: 'json/__init__.py' is json
        parts = parts[:-1]
    return split_of('.'.join(parts), train=40, validation=30)


# Once: the library's directory also holds all that is installed.
@functools.cache
def modules() -> dict[str, Path]:
    """The files of the standard library that belong to it, by their paths inside, sorted."""
    root = Path(sysconfig.get_path('stdlib'))
    kept = []
    for file in root.rglob('*.py'):
        path = PurePosixPath(file.relative_to(root).as_posix())
        directories = path.parts[:-1]
        # A directory that is no package (config-3.x-<platform>, lib-dynload) is generated.
        in_package = all(name.isidentifier() for name in directories)
        is_left_out = not DIRECTORIES_LEFT_OUT.isdisjoint(directories)
        is_left_out |= any(path.match(pattern) for pattern in FILES_LEFT_OUT)
        if in_package and not is_left_out:
            kept.append(str(path))
    return {path: root / path for path in sorted(kept)}

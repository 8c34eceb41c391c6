"""Paths that users and files name: their text, and the regular files that are read at them."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from qkattn.errors import RunDirectoryError, UnsuitableFileError

# Most bytes of a file that is read whole, but for texts to train on.
LARGEST = 2**32
# What is at a path that holds no regular file, by its type.
_KINDS = {
    stat.S_IFIFO: 'a pipe',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
    stat.S_IFSOCK: 'a socket',
}


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path on a file system, ~ expanded; RunDirectoryError where ~ has no directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        problem = 'names no home directory; set HOME, or give a path without ~'
        raise RunDirectoryError(f'{path} {problem}') from error


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened to be read; never waits for a process that writes to a pipe.

    UnsuitableFileError for a pipe, a device or a socket, OSError for whatever else is no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # sockets cannot be opened at all
            raise _unsuitable(path, _problem(os.stat(path).st_mode)) from error
        raise
    try:
        _require_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, 'rb')


def read_regular(path: str | os.PathLike[str], most: int | None = LARGEST) -> bytes:
    """The content of a regular file of at most `most` bytes, None for any number.

    UnsuitableFileError for a larger one, and as `open_regular`.
    """
    with open_regular(path) as file:
        _require_size(path, os.fstat(file.fileno()).st_size, most)
        return file.read()


def require_regular(path: str | os.PathLike[str], most: int | None = LARGEST) -> None:
    """Raises as `read_regular`, for a file that a library reads."""
    status = os.stat(path)
    _require_regular(path, status)
    _require_size(path, status.st_size, most)


def require_regular_tree(directory: str | os.PathLike[str]) -> None:
    """Raises UnsuitableFileError where something in a directory is neither file nor directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                require_regular_tree(entry.path)
            elif not entry.is_file():
                _require_regular(entry.path, os.stat(entry.path))


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise _unsuitable(path, _problem(status.st_mode))


def _require_size(path: str | os.PathLike[str], size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise _unsuitable(path, f'it has {size:,} bytes, and {most:,} are read at most')


def _problem(mode: int) -> str:
    """Why a file of this mode is not read."""
    kind = _KINDS.get(stat.S_IFMT(mode), 'something else')
    return f'it is {kind} and no regular file'


def _unsuitable(path: str | os.PathLike[str], problem: str) -> UnsuitableFileError:
    return UnsuitableFileError(errno.EINVAL, problem, os.fspath(path))

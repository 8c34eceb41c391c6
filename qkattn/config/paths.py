"""Reads files whose paths come from users, and refuses pipes and devices, which could block."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from qkattn.errors import RunDirectoryError, UnsuitableFileError

# The size limit, in bytes, of files that are read as a whole.
LARGEST = 2**32
# Names of file types in error messages.
_KINDS = {
    stat.S_IFIFO: 'a pipe',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
    stat.S_IFSOCK: 'a socket',
}


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Returns a path with ~ expanded; raises RunDirectoryError if ~ names no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        problem = 'names no home directory; set HOME, or give a path without ~'
        raise RunDirectoryError(f'{path} {problem}') from error


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading.

    Raises:
        UnsuitableFileError: The file is a pipe, a device or a socket.
        OSError: The path does not exist or is a directory.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        is_socket = error.errno == errno.ENXIO  # sockets cannot be opened
        if not is_socket:
            raise
        problem = _problem(os.stat(path).st_mode)
        raise _unsuitable_file_error(path, problem) from error
    try:
        _require_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, 'rb')


def read_regular(path: str | os.PathLike[str], most: int | None = LARGEST) -> bytes:
    """Reads a regular file.

    Args:
        path: The file.
        most: The size limit in bytes; None for no limit.

    Raises:
        UnsuitableFileError: The file is too large or not a regular file.
        OSError: The path does not exist or is a directory.
    """
    with open_regular(path) as file:
        _require_size(path, os.fstat(file.fileno()).st_size, most)
        return file.read()


def require_regular(path: str | os.PathLike[str], most: int | None = LARGEST) -> None:
    """Checks a file without reading it; raises the errors of `read_regular`."""
    status = os.stat(path)
    _require_regular(path, status)
    _require_size(path, status.st_size, most)


def require_regular_tree(directory: str | os.PathLike[str]) -> None:
    """Raises UnsuitableFileError if a tree holds anything but regular files and directories."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                require_regular_tree(entry.path)
            elif not entry.is_file():
                _require_regular(entry.path, os.stat(entry.path))


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raises an error if a path with this status is a directory or no regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise _unsuitable_file_error(path, _problem(status.st_mode))


def _require_size(path: str | os.PathLike[str], size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise _unsuitable_file_error(path, f'it has {size:,} bytes, and {most:,} are read at most')


def _problem(mode: int) -> str:
    """Returns why a file of this mode is refused."""
    file_type = _KINDS.get(stat.S_IFMT(mode), 'something else')
    return f'it is {file_type} and no regular file'


def _unsuitable_file_error(path: str | os.PathLike[str], problem: str) -> UnsuitableFileError:
    return UnsuitableFileError(errno.EINVAL, problem, os.fspath(path))

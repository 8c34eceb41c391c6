"""Paths, directories and atomic writes, on a shared file system or in a bucket."""

import contextlib
import errno
import functools
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from etils import epath

from qkattn.errors import ConfigError, DiskError, RunDirectoryError
from qkattn.jobs.signals import no_interrupt
from qkattn.storage import buckets

_FAILED = {
    errno.ENOSPC: 'the disk is full',
    errno.EDQUOT: 'the quota of this user is used up',
    errno.EFBIG: 'a file is larger than this process may write',
    errno.EIO: 'the disk fails',
    errno.ESTALE: 'its file system is gone',
    errno.ENOTCONN: 'its file system is gone',
}
_DENIED = {
    errno.EROFS: 'its file system is read-only',
    errno.EACCES: 'this user may not write there',
}


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path that text names: in a bucket where it is a gs:// URL, else on a file system.

    Raises:
      RunDirectoryError: a URL of another kind, or a bucket that does not exist or is out of reach.
      ConfigError: a bucket, and the extra `gcs` is not installed.
    """
    return buckets.to_path(path) if buckets.is_url(path) else Path(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """`as_path`, absolute, as orbax needs it."""
    path = as_path(path)
    return path if buckets.is_url(path) else path.absolute()


def expanded(path: str | os.PathLike[str]) -> Path:
    """`as_path` with the home directory for ~, which an empty HOME does not set.

    Raises:
      ConfigError: this user has no home directory; else as `as_path`.
    """
    if buckets.is_url(path):
        return as_path(path)
    if not os.environ.get('HOME', 'unset'):
        del os.environ['HOME']  # for libraries that have caches there, too
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f'{os.fspath(path)} has no meaning without a home directory; set HOME, or give another '
            'directory'
        ) from error


# Directories


def check_directory(path: str | os.PathLike[str], *, create: bool = False) -> Path:
    """Returns `path` made absolute if files can be written there; creates it only if asked to.

    Raises:
      RunDirectoryError: neither `path` nor its nearest existing parent takes files, or the bucket
        takes no objects.
    """
    if buckets.is_url(path):
        directory = as_path(path)
        buckets.check_writable(directory)
        return directory
    # POSIX keeps two leading slashes apart from one; orbax cannot write below them.
    directory = Path('/' + os.path.abspath(path).lstrip('/'))
    try:
        str(directory).encode()  # orbax takes paths in UTF-8 alone
        if create:
            with disk_errors(directory, creates=True):
                directory.mkdir(parents=True, exist_ok=True)
        existing = next(p for p in (directory, *directory.parents) if p.exists())
        with disk_errors(existing), tempfile.TemporaryFile(dir=existing):
            pass  # permissions alone do not say whether a file system takes files
    except UnicodeEncodeError as error:
        raise RunDirectoryError(
            f'workdir={str(directory)!a} is not UTF-8 in this locale '
            f'({sys.getfilesystemencoding()}); give a directory of another name, or set LC_ALL to '
            'a locale of UTF-8'
        ) from error
    except OSError as error:
        raise RunDirectoryError(
            f'workdir={directory} cannot be used ({error.strerror}); '
            'give a directory that this user can write to'
        ) from error
    return directory


def make_directory(path: str | os.PathLike[str]) -> Path:
    """Creates `path`, unless it exists, and returns it absolute; raises as `check_directory`."""
    return check_directory(path, create=True)


def remove_tree(path: Path) -> None:
    """Deletes a directory, if it is there, as far as that is possible."""
    if not buckets.is_url(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        cast(epath.Path, path).rmtree(missing_ok=True)


def require_room(directory: str | os.PathLike[str], size: int) -> None:
    """Raises DiskError unless `directory` takes files of `size` bytes in all; a bucket does."""
    if buckets.is_url(directory):
        return
    with disk_errors(directory, denied=True), tempfile.TemporaryFile(dir=directory):
        pass
    free = shutil.disk_usage(directory).free
    if free < size:
        raise _unwritable(directory, f'its disk has {free:,} of the {size:,} bytes that are needed')


def require_same_directory(directory: Path, before: os.stat_result) -> None:
    """Raises DiskError where a path is no longer the directory of which it had this status."""
    with disk_errors(directory):
        if not os.path.samestat(os.stat(directory), before):
            raise _gone(directory)


# Files


def version_of(path: Path) -> tuple[int, int]:
    """What differs once the file is another one: its size, and when it changed."""
    if buckets.is_url(path):
        return 0, buckets.generation(path)
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes `content` (text as UTF-8) to `path` and returns the path.

    A reader, or a crash, sees the old file or the whole of this one, which is on the disk when the
    call returns. Several processes may write the same path. Missing directories are created.
    """
    data = content.encode() if isinstance(content, str) else content
    path = as_path(path)
    if buckets.is_url(path):
        with no_interrupt:
            buckets.write(path, data)
        return path
    with disk_errors(path.parent, creates=True):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Written by open(), not tempfile, so that the permissions are those that the umask allows.
    with no_interrupt, _replacing(path, f'.{path.name}.{uuid.uuid4().hex}.tmp') as temporary:
        temporary.write_bytes(data)
    return path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path` that replaces it atomically when the block succeeds.

    For files that a library writes. The temporary name is fixed, so that the next writer overwrites
    what a killed one left; two writers need a lock. For a path in a bucket it is a local file.
    """
    path = as_path(path)
    if buckets.is_url(path):
        with tempfile.TemporaryDirectory() as directory:
            yield (temporary := Path(directory, path.name))
            buckets.write(path, temporary.read_bytes())
        return
    with _replacing(path, f'{path.name}.tmp') as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask gives it; safetensors makes private files
        yield temporary
        temporary.chmod(mode)


@contextlib.contextmanager
def _replacing(path: Path, name: str) -> Iterator[Path]:
    if path.is_dir():
        raise RunDirectoryError(f'{path} is a directory in the place of a file; move it away')
    temporary = path.with_name(name)
    with disk_errors(path.parent):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yields `path`, or for one in a bucket a local file of the same name and content."""
    if not buckets.is_url(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        local = Path(directory, path.name)
        local.write_bytes(buckets.read(path).content)
        yield local


# Errors


@contextlib.contextmanager
def disk_errors(
    path: str | os.PathLike[str], *, denied: bool = False, creates: bool = False
) -> Iterator[None]:
    """A block that writes at or below `path`.

    Args:
      creates: whether it creates `path`, which is then not gone where it does not exist.
      denied: whether a directory that may not be written is one of these errors, too.

    Raises:
      DiskError: the block failed because the disk is full, over quota, or fails, or because the
        directory is gone; what was on the disk before is still there, so that the same command goes
        on once there is room.
    """
    try:
        yield
    except DiskError:
        raise
    except Exception as error:  # libraries raise many kinds, with the text of the system's error
        path = as_path(path)
        absent = not creates and not buckets.is_url(path) and _reason(error, {errno.ENOENT: 'gone'})
        outermost_first = (*reversed(path.parents), path) if absent else ()
        for missing in (p for p in outermost_first if not os.path.lexists(p)):
            raise _gone(missing) from error
        directory = path if os.path.isdir(path) else path.parent
        if reason := _reason(error, _FAILED):
            raise _unwritable(directory, reason) from error
        if denied and (reason := _reason(error, _DENIED)):
            raise _unwritable(directory, reason, 'make it writable') from error
        raise


@functools.cache
def drop_echoes() -> None:
    """Keeps tensorstore from printing a traceback for each array that fails after the first.

    The first one ends the event loop of a save, and is raised; the others call that loop in vain
    from threads of C++.
    """
    hook = sys.unraisablehook

    def without_echoes(unraisable: 'sys.UnraisableHookArgs') -> None:
        if unraisable.object is not None or str(unraisable.exc_value) != 'Event loop is closed':
            hook(unraisable)

    sys.unraisablehook = without_echoes


def _reason(error: BaseException, reasons: dict[int, str]) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    for code, reason in reasons.items():
        if number == code or (number is None and os.strerror(code) in str(error)):
            return reason
    return None


def _gone(directory: Path) -> DiskError:
    return DiskError(
        f'{directory} is gone: it was removed, renamed or unmounted; put it back and run the same '
        'command again, which goes on from what is saved'
    )


def _unwritable(
    directory: str | os.PathLike[str], reason: str, advice: str = 'make room'
) -> DiskError:
    return DiskError(
        f'{directory} cannot be written: {reason}; {advice} and run the same command again, which '
        'goes on from what is saved'
    )

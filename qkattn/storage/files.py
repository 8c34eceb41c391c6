"""Paths, directories and atomic writes, on a shared file system or in a bucket."""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

from etils import epath

from qkattn.config.paths import LARGEST, expand_home, read_regular, require_regular
from qkattn.config.setting import PART_END
from qkattn.errors import DiskError, ReadError, RunDirectoryError, UnsuitableFileError
from qkattn.jobs.signals import no_interrupt
from qkattn.storage import buckets

# Reason and advice for each errno with which writing can fail.
_WRITE_FAILURES = {
    errno.ENOSPC: 'the disk is full; make room',
    errno.EDQUOT: 'the quota of this user is used up; make room',
    errno.EFBIG: 'a file is larger than this process may write; raise the limit',
    errno.EIO: 'the disk fails; repair it',
    errno.ESTALE: 'its file system is gone; mount it',
    errno.ENOTCONN: 'its file system is gone; mount it',
    errno.EROFS: 'its file system is read-only; make it writable',
    errno.EACCES: 'this user may not write there; make it writable',
}
# The errno values of a path without a regular file.
_NO_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# Status codes in the error messages of tensorstore that mean a failed read.
_TENSORSTORE_FAILURE_CODES = (
    'ABORTED',
    'CANCELLED',
    'DEADLINE_EXCEEDED',
    'PERMISSION_DENIED',
    'RESOURCE_EXHAUSTED',
    'UNAUTHENTICATED',
    'UNAVAILABLE',
)
_RESUME_ADVICE = 'and run the same command again, which resumes from what is saved'
# An absolute path and the character before it: '"/home/ann/w' in 'wandb(dir="/home/ann/w")'. That
# character is '=', a comma, a quote or a bracket; there is none at the start of the text.
_ABSOLUTE_PATH = re.compile(r"""(^|[=,"'([])(/[^,"')\]]*)""")
# The name of a temporary file of `write_atomic`: .FILE.UUID.tmp.
_TEMPORARY = '.{}.{}.tmp'


class Files(Protocol):
    """A directory on a disk, in a bucket or in an archive."""

    def __truediv__(self, name: str, /) -> 'Readable': ...


class Readable(Files, Protocol):
    """The read-only methods of pathlib.Path that every file of a study has."""

    def exists(self) -> bool: ...

    def is_file(self) -> bool: ...

    def read_bytes(self) -> bytes: ...


def as_readable(path: str | os.PathLike[str] | Readable) -> Readable:
    """Converts a string or path with `as_path`; returns a file in an archive unchanged."""
    return as_path(path) if isinstance(path, str | os.PathLike) else path


def as_path(path: str | os.PathLike[str]) -> Path:
    """Converts a gs:// URL, or a local path with ~ expanded, to a path.

    Raises:
        RunDirectoryError: The home directory is unknown, or the bucket cannot be listed.
    """
    return buckets.to_path(path) if buckets.is_url(path) else expand_home(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Returns `as_path(path)` as an absolute path."""
    path = as_path(path)
    return path if buckets.is_url(path) else path.absolute()


def require_plain_name(name: str) -> str:
    """Returns `name` after checking that it is a single component of a path.

    Call it for untrusted names: 'a/b' or '..' could lead anywhere on the disk.

    Raises:
        RunDirectoryError: The name is empty, '.' or '..', contains a slash or a null character, or
            has PART_END (256) bytes or more.
    """
    is_special = name in ('', os.curdir, os.pardir)
    has_forbidden_character = '/' in name or '\0' in name
    is_too_long = len(os.fsencode(name)) >= PART_END
    if is_special or has_forbidden_character or is_too_long:
        raise RunDirectoryError(
            f'{name!r:.80} is no name of a file or directory; valid is one component of a path, '
            f"below {PART_END} bytes of UTF-8, other than '.' and '..'"
        )
    return name


def run_path(study: Files, directory: str) -> Files:
    """Returns the directory of a run, after checking that it is below its study.

    Args:
        study: Directory of the study.
        directory: The run's directory relative to `study`, such as 'runs/NAME'; may be untrusted.

    Raises:
        RunDirectoryError: `directory` leads out of the study.
    """
    try:
        names = [require_plain_name(name) for name in directory.split('/')]
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f'{directory!r:.80} is no directory inside the study; valid is runs/NAME'
        ) from error
    path = study
    for name in names:
        path = path / name
    return path


def join_without_links(directory: Path, *names: str) -> Path:
    """Returns directory/names[0]/names[1]/... after checking that none of `names` is a link.

    Call it before writing or deleting: in an untrusted directory, a link may lead to any file of
    the user. `directory` itself may be a link.

    Raises:
        RunDirectoryError: One of `names` is a link or not a plain name.
    """
    link = first_link(directory, *names)
    if link is not None:
        raise _link_error(link)
    return directory.joinpath(*names)


def first_link(directory: Path, *names: str) -> Path | None:
    """Returns the first link on the path directory/names[0]/names[1]/..., or None.

    `directory` itself is not checked.

    Raises:
        RunDirectoryError: One of `names` is not a plain name.
    """
    path = directory
    for name in names:
        path = path / require_plain_name(name)
        if not buckets.is_url(path) and path.is_symlink():
            return path
    return None


def in_place(path: str, flags: int) -> int:
    """Opens a regular file that is no link; an `opener` for the built-in `open`.

    Returns:
        The file descriptor.

    Raises:
        RunDirectoryError: The path is a link, or not a regular file.
    """
    # Without O_NONBLOCK, opening a named pipe would block until it has a reader.
    safe_flags = flags | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, safe_flags, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise _link_error(Path(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunDirectoryError(f'{path} is no regular file; remove it')
    return descriptor


def _link_error(path: Path) -> RunDirectoryError:
    """Returns the error for a link where a file would be written or deleted."""
    return RunDirectoryError(
        f'{path} is a link, and nothing is written or deleted through one; put what it links to '
        'in its place, or give another directory'
    )


def read_whole(path: Readable, most: int | None = LARGEST) -> bytes:
    """Reads a regular file, an object in a bucket, or a file in an archive.

    Args:
        path: The file.
        most: Maximum size in bytes of a file on a disk; None for any size.

    Raises:
        UnsuitableFileError: The file is a pipe or a device, or larger than `most`.
        OSError: The file cannot be read.
    """
    # A file in an archive is no `Path`; an object in a bucket is one, with a URL.
    if not isinstance(path, Path) or buckets.is_url(path):
        return path.read_bytes()
    return read_regular(path, most)


def without_directories(text: str) -> str:
    """Shortens the absolute paths in an argument or setting, to hide local directories.

    A path below the working directory becomes relative. Any other path keeps its last component.
    In /home/ann, `--workdir=/home/ann/runs/a` becomes `--workdir=runs/a`. In any other directory,
    it becomes `--workdir=a`.
    """

    def shorten(match: re.Match[str]) -> str:
        before, absolute_path = match.groups()  # such as '=' and '/home/ann/runs/a'
        path = Path(os.path.normpath(absolute_path))
        if path.is_relative_to(Path.cwd()):
            short_path = str(path.relative_to(Path.cwd()))
        else:
            short_path = path.name or '/'
        return before + short_path

    return _ABSOLUTE_PATH.sub(shorten, text)


def check_directory(
    path: str | os.PathLike[str], *, name: str = 'workdir', create: bool = False
) -> Path:
    """Returns the absolute path of a directory, after checking that it is writable.

    Args:
        path: The directory.
        name: The setting that holds `path`, used in error messages only.
        create: Whether to create a missing directory. Without `create`, the nearest existing parent
            is checked.

    Raises:
        RunDirectoryError: The directory is not writable.
    """
    if buckets.is_url(path):
        directory = as_path(path)
        buckets.check_writable(directory)
        return directory

    # abspath keeps two leading slashes, as POSIX allows; orbax needs a single one.
    path_without_slash = os.path.abspath(as_path(path)).lstrip('/')
    directory = Path(f'/{path_without_slash}')
    try:
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        nearest_existing = directory
        while not nearest_existing.exists():
            nearest_existing = nearest_existing.parent
        # Permission bits do not show a read-only file system, so create a file.
        with tempfile.TemporaryFile(dir=nearest_existing):
            pass
    except OSError as error:
        raise RunDirectoryError(
            f'{name}={directory} cannot be used ({error.strerror}); '
            'give a directory that this user can write to'
        ) from error
    return directory


def make_directory(path: str | os.PathLike[str], *, name: str = 'workdir') -> Path:
    """Creates a directory if needed, and checks it with `check_directory`."""
    return check_directory(path, name=name, create=True)


def remove_tree(path: Path) -> None:
    """Deletes a directory tree; ignores files that cannot be deleted.

    If `path` is a link, only the link is deleted.
    """
    if buckets.is_url(path):
        if path.exists():
            cast(epath.Path, path).rmtree(missing_ok=True)  # not a method of `pathlib.Path`
        return
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, ignore_errors=True)


def require_room(directory: Path, size: int) -> None:
    """Raises DiskError if the disk of `directory` has less than `size` free bytes."""
    if buckets.is_url(directory):
        return
    # Creating a temporary file fails if the directory is not writable, also with DiskError.
    with disk_errors(directory), tempfile.TemporaryFile(dir=directory):
        free_bytes = shutil.disk_usage(directory).free
        if free_bytes < size:
            raise DiskError(
                f'{directory} cannot be written: its disk has {free_bytes:,} of the {size:,} bytes '
                f'that are needed; make room {_RESUME_ADVICE}'
            )


def require_same(path: Path, before: os.stat_result) -> None:
    """Raises DiskError if the file at `path` was replaced after its status `before` was read."""
    with disk_errors(path):
        if not os.path.samestat(path.stat(), before):
            raise _gone_error(path)


def version_of(path: Path) -> tuple[int, int]:
    """Returns the size and modification time of a file, which differ after a change."""
    status: Any = path.stat()
    if buckets.is_url(path):
        return status.length, status.mtime
    return status.st_size, status.st_mtime_ns


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes a file atomically and durably, and returns its path.

    Readers see either the old or the new file, even after a crash. Concurrent writers are allowed.
    Text is encoded as UTF-8, and a missing directory is created.
    """
    data = content.encode() if isinstance(content, str) else content
    path = as_path(path)
    if buckets.is_url(path):
        with no_interrupt:
            buckets.write(path, data)
        return path
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    # The module tempfile is not used, because only the owner could read its file.
    temporary_name = _TEMPORARY.format(path.name, uuid.uuid4().hex)
    # After the block, the temporary file replaces `path`; a signal ends the process only then.
    with no_interrupt, _replacing_on_disk(path, temporary_name) as temporary:
        temporary.write_bytes(data)
    return path


def remove_unfinished(directory: Path) -> None:
    """Deletes temporary files of `write_atomic` that killed processes left behind.

    No other process may be writing to `directory`.
    """
    if buckets.is_url(directory):
        return
    any_uuid = '[0-9a-f]' * 32
    pattern = _TEMPORARY.format('*', any_uuid)  # matches '.FILE.UUID.tmp'
    for path in directory.glob(pattern):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces `path` if the block succeeds.

    The temporary file is PATH.tmp, or on a local disk if `path` is in a bucket. Concurrent writers
    of the same path need a lock.
    """
    if buckets.is_url(path):
        with tempfile.TemporaryDirectory() as directory:
            temporary = Path(directory, path.name)
            yield temporary
            buckets.write(path, temporary.read_bytes())
        return

    with _replacing_on_disk(path, f'{path.name}.tmp') as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)  # fails for a link, which could lead anywhere
        # Some writers, such as safetensors, replace the file by one that only its owner can read.
        # Restore the permissions of the user's umask.
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)


@contextlib.contextmanager
def _replacing_on_disk(path: Path, temporary_name: str) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces `path` if the block succeeds.

    `path` is on a disk. The temporary file is in the same directory, and is deleted if the block
    fails. The file and its directory are synced to the disk.
    """
    if path.is_dir():
        raise RunDirectoryError(f'{path} is a directory where a file is expected; move it away')
    temporary = path.with_name(temporary_name)
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
    """Flushes a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yields a local path of a file: `path` itself, or a temporary copy of an object in a bucket.

    Raises:
        UnsuitableFileError: The file is a pipe or a device.
    """
    if not buckets.is_url(path):
        require_regular(path, most=None)  # of any size
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        local = Path(directory, path.name)
        local.write_bytes(buckets.read(path).content)
        yield local


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns errors of a block that writes at or below `path` into DiskError.

    DiskError means that the disk failed or that `path` is gone. Other errors are not changed.
    """
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        disk_error = _to_disk_error(error, path)
        if disk_error is None:
            raise
        raise disk_error from error


def _to_disk_error(error: Exception, path: Path) -> DiskError | None:
    """Converts an error of writing at or below `path`, such as 'No space left on device'.

    Returns None for an error of any other kind.
    """
    is_missing = _is_system_error(error, errno.ENOENT)
    if is_missing and not buckets.is_url(path):
        # Report the outermost directory that is gone.
        from_root = (*reversed(path.parents), path)  # '/', '/runs', '/runs/a' for /runs/a
        for parent_or_path in from_root:
            if not os.path.lexists(parent_or_path):
                return _gone_error(parent_or_path)

    directory = path if os.path.isdir(path) else path.parent
    for error_number, reason in _WRITE_FAILURES.items():
        # For errno.ENOSPC, the reason and advice are 'the disk is full; make room'.
        if _is_system_error(error, error_number):
            return DiskError(f'{directory} cannot be written: {reason} {_RESUME_ADVICE}')
    return None


def _is_system_error(error: Exception, error_number: int) -> bool:
    """Whether the system error `error_number`, such as errno.ENOSPC, caused an error."""
    if isinstance(error, OSError) and error.errno:
        return error.errno == error_number
    # Other errors, raised by libraries, contain only the system's message.
    return os.strerror(error_number) in str(error)


@contextlib.contextmanager
def read_errors(path: Readable) -> Iterator[None]:
    """Turns errors of a block that reads at or below `path` into ReadError.

    ReadError means that the system failed to read, such as an unreachable bucket. Errors about a
    missing or damaged file are not changed.
    """
    try:
        yield
    except Exception as error:
        reason = _find_system_failure(error)  # such as 'out of memory'
        if reason is None:
            raise
        raise ReadError(
            f'{path} cannot be read ({reason}); nothing was changed: run the same command again '
            'once it can be'
        ) from error


def _find_system_failure(error: BaseException) -> str | None:
    """Returns why the system failed to read, from an error or from the errors that led to it.

    Returns None if all of them are other errors, such as a missing or damaged file.
    """
    current: BaseException | None = error
    while current is not None:
        reason = _reason_of_failure(current)
        if reason is not None:
            return reason
        current = current.__cause__ or current.__context__
    return None


def _reason_of_failure(error: BaseException) -> str | None:
    """Returns why the system failed to read, such as 'out of memory', from a single error.

    Returns None for other errors, such as a missing or damaged file.
    """
    if isinstance(error, MemoryError):
        return 'out of memory'
    if isinstance(error, FileNotFoundError | UnsuitableFileError):
        return None
    if isinstance(error, OSError):
        if error.errno in _NO_FILE_ERRNOS:
            return None
        return error.strerror or str(error)

    # Other errors, raised by libraries, contain only the system's message.
    failure_numbers = [number for number in errno.errorcode if number not in _NO_FILE_ERRNOS]
    system_messages = [os.strerror(number) for number in failure_numbers]
    for message in (*system_messages, *_TENSORSTORE_FAILURE_CODES):
        if message in str(error):
            return message
    return None


def _gone_error(path: Path) -> DiskError:
    """Returns the error for a file or directory that vanished while a run wrote to it."""
    return DiskError(
        f'{path} is gone: it was removed, renamed or unmounted; put it back {_RESUME_ADVICE}'
    )

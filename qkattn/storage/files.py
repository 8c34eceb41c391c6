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

# Why writing fails and what a user can do about it, by the system's error number.
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
# Error numbers that do not mean that the system failed: nothing is at a path, or a file instead of
# a directory, or a directory instead of a file.
_MISSING_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# Words by which tensorstore names failures, most of them of a bucket.
_TENSORSTORE_FAILURES = (
    'ABORTED',
    'CANCELLED',
    'DEADLINE_EXCEEDED',
    'PERMISSION_DENIED',
    'RESOURCE_EXHAUSTED',
    'UNAUTHENTICATED',
    'UNAVAILABLE',
)
_RESUME = 'and run the same command again, which resumes from what is saved'
# An absolute path and the character before it. The path starts the text, or follows '=', a comma, a
# quote or a bracket. In 'wandb(dir="/home/ann/w")' it matches '"/home/ann/w'.
_ABSOLUTE = re.compile(r"""(^|[=,"'([])(/[^,"')\]]*)""")
# The name of a temporary file of `write_atomic`, from the name of the file that it replaces and a
# UUID.
_TEMPORARY = '.{}.{}.tmp'


class Files(Protocol):
    """A directory on a disk, in a bucket or in an archive."""

    def __truediv__(self, name: str, /) -> 'Readable': ...


class Readable(Files, Protocol):
    """The part of the interface of pathlib.Path that readers of a study use."""

    def exists(self) -> bool: ...

    def is_file(self) -> bool: ...

    def read_bytes(self) -> bytes: ...


def as_readable(path: str | os.PathLike[str] | Readable) -> Readable:
    """Returns a file in an archive as it is, and anything else as `as_path`."""
    return as_path(path) if isinstance(path, str | os.PathLike) else path


def as_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a URL in a bucket, or of a file or directory with ~ expanded.

    Raises RunDirectoryError if ~ names no home directory, or if the bucket cannot be listed.
    """
    return buckets.to_path(path) if buckets.is_url(path) else expand_home(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Returns `as_path(path)` as an absolute path, as orbax needs it."""
    path = as_path(path)
    return path if buckets.is_url(path) else path.absolute()


def require_plain_name(name: str) -> str:
    """Returns `name` after checking that it is a plain name of a file or directory.

    Use it for names that were read from a file: a name with slashes or '..' could lead to any place
    of the disk. Raises RunDirectoryError if the name is empty, '.' or '..', contains a slash or a
    null character, or has PART_END = 256 bytes or more.
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
    """Returns the path of a run's directory inside the directory of its study.

    Args:
      study: the directory of the study.
      directory: the directory of the run as the study's plan names it, such as 'runs/NAME'.

    Raises RunDirectoryError if `directory` leads out of the study. Plans may come from anybody.
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

    Call it before writing or deleting there: a directory from somebody else may have links to any
    file of this user. `directory` itself may be a link, since the user names it. Buckets have no
    links. Raises RunDirectoryError if one of `names` is a link or is not a plain name.
    """
    link = first_link(directory, *names)
    if link is not None:
        raise _link_error(link)
    return directory.joinpath(*names)


def first_link(directory: Path, *names: str) -> Path | None:
    """Returns the first link on the path directory/names[0]/names[1]/..., or None.

    Raises RunDirectoryError if one of `names` is not a plain name. Buckets have no links.
    """
    path = directory
    for name in names:
        path = path / require_plain_name(name)
        if not buckets.is_url(path) and path.is_symlink():
            return path
    return None


def in_place(path: str, flags: int) -> int:
    """Opens a file that is changed in place, for use as the `opener` of the function open().

    Returns the file descriptor. Raises RunDirectoryError if the path is a link, or not a regular
    file.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a reader. A pipe is refused below.
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
    """Returns the error for a link at a path where the program would write or delete."""
    return RunDirectoryError(
        f'{path} is a link, and nothing is written or deleted through one; put what it links to '
        'in its place, or give another directory'
    )


def read_whole(path: Readable, most: int | None = LARGEST) -> bytes:
    """Reads a regular file, an object in a bucket, or a file in an archive.

    Raises UnsuitableFileError for a pipe or a device, which may have no end, and for a file of more
    than `most` bytes. Raises OSError if the file cannot be read.
    """
    if isinstance(path, Path) and not buckets.is_url(path):
        return read_regular(path, most)
    return path.read_bytes()


def without_directories(text: str) -> str:
    """Removes the directories of this machine from an argument or setting.

    An absolute path below the working directory becomes relative to it. Other absolute paths are
    cut to their last component. In /home/ann, `--workdir=/home/ann/runs/a` becomes
    `--workdir=runs/a`; elsewhere it becomes `--workdir=a`.
    """

    def shorten(match: re.Match[str]) -> str:
        """Returns the character before an absolute path, and the short path."""
        before, absolute_path = match.groups()
        path = Path(os.path.normpath(absolute_path))
        if path.is_relative_to(Path.cwd()):
            short_path = str(path.relative_to(Path.cwd()))
        else:
            short_path = path.name or '/'
        return before + short_path

    return _ABSOLUTE.sub(shorten, text)


def check_directory(
    path: str | os.PathLike[str], *, name: str = 'workdir', create: bool = False
) -> Path:
    """Returns the absolute path of a directory, after checking that files can be written there.

    Args:
      path: the directory that a user names.
      name: the setting that names it, for the error.
      create: whether to create a directory that does not exist. Otherwise the nearest parent that
        exists is checked.

    Raises RunDirectoryError if files cannot be written.
    """
    if buckets.is_url(path):
        directory = as_path(path)
        buckets.check_writable(directory)
        return directory
    # abspath keeps two leading slashes, as POSIX allows, but orbax cannot write below them.
    without_slashes = os.path.abspath(as_path(path)).lstrip('/')
    directory = Path(f'/{without_slashes}')
    try:
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        existing = directory
        while not existing.exists():
            existing = existing.parent
        # Permissions do not tell whether the file system is writable, so a file is written.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunDirectoryError(
            f'{name}={directory} cannot be used ({error.strerror}); '
            'give a directory that this user can write to'
        ) from error
    return directory


def make_directory(path: str | os.PathLike[str], *, name: str = 'workdir') -> Path:
    """Creates the directory if it does not exist; otherwise as `check_directory`."""
    return check_directory(path, name=name, create=True)


def remove_tree(path: Path) -> None:
    """Deletes a directory if it exists, or a link itself; what cannot be deleted stays."""
    if not buckets.is_url(path):
        if path.is_symlink():
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        cast(epath.Path, path).rmtree(missing_ok=True)


def require_room(directory: Path, size: int) -> None:
    """Raises DiskError unless the disk of `directory` has `size` free bytes.

    A bucket always has room.
    """
    if buckets.is_url(directory):
        return
    # The temporary file shows that the directory exists and takes files.
    with disk_errors(directory), tempfile.TemporaryFile(dir=directory):
        free = shutil.disk_usage(directory).free
        if free < size:
            raise DiskError(
                f'{directory} cannot be written: its disk has {free:,} of the {size:,} bytes that '
                f'are needed; make room {_RESUME}'
            )


def require_same(path: Path, before: os.stat_result) -> None:
    """Raises DiskError if the file or directory at `path` was replaced since `before`.

    `before` is its status at that time.
    """
    with disk_errors(path):
        if not os.path.samestat(path.stat(), before):
            raise _gone_error(path)


def version_of(path: Path) -> tuple[int, int]:
    """Returns the size of a file and the time of its last change, to notice when it changes."""
    status: Any = path.stat()
    if buckets.is_url(path):
        return status.length, status.mtime
    return status.st_size, status.st_mtime_ns


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes a file as a whole, and returns its path.

    Text is written as UTF-8, and the directory is created if needed. Readers see either the old
    file or the whole new one, also after a crash. When the function returns, the new file is on the
    disk. Several processes may write the same path.
    """
    data = content.encode() if isinstance(content, str) else content
    path = as_path(path)
    if buckets.is_url(path):
        with no_interrupt:
            buckets.write(path, data)
        return path
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    name = _TEMPORARY.format(path.name, uuid.uuid4().hex)
    # tempfile would make a file that only its owner may read. The umask decides for this one.
    with no_interrupt, _replacing(path, name) as temporary:
        temporary.write_bytes(data)
    return path


def remove_unfinished(directory: Path) -> None:
    """Deletes the temporary files that a killed process left in `write_atomic`.

    Only for a process that is the only writer of the directory.
    """
    if buckets.is_url(directory):
        return
    any_uuid = '[0-9a-f]' * 32
    for path in directory.glob(_TEMPORARY.format('*', any_uuid)):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces `path` if the block succeeds.

    On a file system, the temporary file is PATH.tmp, so it also replaces the temporary file of an
    earlier writer that was killed. Two writers of the same path need a lock. For a path in a
    bucket, the temporary file is on a local disk.
    """
    if buckets.is_url(path):
        with tempfile.TemporaryDirectory() as directory:
            temporary = Path(directory, path.name)
            yield temporary
            buckets.write(path, temporary.read_bytes())
        return

    with _replacing(path, f'{path.name}.tmp') as temporary:
        # Create an empty file. This fails if somebody has just put a link there.
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        # The caller may replace the file by one that only its owner can read, as safetensors does.
        # The empty file has the permissions that the user's umask gives. They are restored.
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)


@contextlib.contextmanager
def _replacing(path: Path, name: str) -> Iterator[Path]:
    """Yields the path of the temporary file `name`, which replaces `path` if the block succeeds.

    Afterwards the file and its entry in the directory are on the disk.
    """
    if path.is_dir():
        raise RunDirectoryError(f'{path} is a directory where a file is expected; move it away')
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
    """Writes what the system has buffered of a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yields the path of a file on a local disk: `path` itself, or a copy if it is in a bucket.

    The copy has the same name. Raises UnsuitableFileError for a pipe or a device.
    """
    if not buckets.is_url(path):
        require_regular(path, most=None)  # a file of any size
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        local = Path(directory, path.name)
        local.write_bytes(buckets.read(path).content)
        yield local


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A block that writes at or below `path`: raises DiskError if the disk fails or `path` is gone.

    Other errors of the block are raised as they are.
    """
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        # If something was not found, a directory may be gone. Name the outermost one.
        if _is_system_error(error, errno.ENOENT) and not buckets.is_url(path):
            from_root = (*reversed(path.parents), path)  # '/', '/runs', '/runs/a' for /runs/a
            for directory in from_root:
                if not os.path.lexists(directory):
                    raise _gone_error(directory) from error

        # If the disk has failed, say how.
        directory = path if os.path.isdir(path) else path.parent
        for error_number, reason in _WRITE_FAILURES.items():
            if _is_system_error(error, error_number):
                raise DiskError(f'{directory} cannot be written: {reason} {_RESUME}') from error
        raise


def _is_system_error(error: Exception, number: int) -> bool:
    """Whether an error is the system's error of this number, such as errno.ENOSPC.

    Libraries raise errors of many classes, which only have the text of the system's error.
    """
    if isinstance(error, OSError) and error.errno:
        return error.errno == number
    return os.strerror(number) in str(error)


@contextlib.contextmanager
def read_errors(path: Readable) -> Iterator[None]:
    """A block that reads at or below `path`: raises ReadError if the system fails to read.

    The caller can then tell a failing disk or an unreachable bucket from a damaged file: errors
    about the content of a file are raised as they are.
    """
    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            reason = _reason_of_failure(cause)
            if reason is not None:
                raise ReadError(
                    f'{path} cannot be read ({reason}); nothing was changed: run the same command '
                    'again once it can be'
                ) from error
        raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, the error that caused it, the cause of that one, and so on.

    Libraries raise their own errors, and the system's error is the cause of theirs.
    """
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _reason_of_failure(error: BaseException) -> str | None:
    """Returns why the system failed to read, such as 'out of memory'.

    Returns None for another error, such as that of a missing or a damaged file.
    """
    if isinstance(error, MemoryError):
        return 'out of memory'
    if isinstance(error, FileNotFoundError | UnsuitableFileError):
        return None
    if isinstance(error, OSError):
        is_missing = error.errno in _MISSING_FILE
        return None if is_missing else error.strerror or str(error)

    # An error of a library may have the system's words only in its text.
    failure_numbers = [number for number in errno.errorcode if number not in _MISSING_FILE]
    system_texts = [os.strerror(number) for number in failure_numbers]
    for text in (*system_texts, *_TENSORSTORE_FAILURES):
        if text in str(error):
            return text
    return None


def _gone_error(path: Path) -> DiskError:
    """Returns the error for a directory that has vanished while a run wrote there."""
    return DiskError(f'{path} is gone: it was removed, renamed or unmounted; put it back {_RESUME}')

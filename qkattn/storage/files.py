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

from qkattn.config.paths import LARGEST, expanded, read_regular, require_regular
from qkattn.config.setting import PART_END
from qkattn.errors import DiskError, ReadError, RunDirectoryError, UnsuitableFileError
from qkattn.jobs.signals import no_interrupt
from qkattn.storage import buckets

# How writing fails, by the system's number of the error, and what a user can do about it.
_FAILED = {
    errno.ENOSPC: 'the disk is full; make room',
    errno.EDQUOT: 'the quota of this user is used up; make room',
    errno.EFBIG: 'a file is larger than this process may write; raise the limit',
    errno.EIO: 'the disk fails; repair it',
    errno.ESTALE: 'its file system is gone; mount it',
    errno.ENOTCONN: 'its file system is gone; mount it',
    errno.EROFS: 'its file system is read-only; make it writable',
    errno.EACCES: 'this user may not write there; make it writable',
}
# What the system reports of a path whose content is not as expected: nothing is there, or a file in
# the place of a directory, or the other way round. All other errors are failures of the system.
_CONTENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# Failures that tensorstore names by a word of its own, most of them of a bucket.
_STATUSES = (
    'ABORTED',
    'CANCELLED',
    'DEADLINE_EXCEEDED',
    'PERMISSION_DENIED',
    'RESOURCE_EXHAUSTED',
    'UNAUTHENTICATED',
    'UNAVAILABLE',
)
_RESUME = 'and run the same command again, which resumes from what is saved'
# An absolute path in text: all of it, what follows `--flag=`, or a string in a list or call. In
# 'wandb(dir="/home/ann/w")' it matches '"/home/ann/w'.
_ABSOLUTE = re.compile(r"""(^|[=,"'([])(/[^,"')\]]*)""")
# A temporary file of `write_atomic`: the name of the file that it replaces, and a UUID.
_TEMPORARY = '.{}.{}.tmp'


class Files(Protocol):
    """The files below a directory, which is on a disk, in a bucket or in an archive."""

    def __truediv__(self, name: str, /) -> 'Readable': ...


class Readable(Files, Protocol):
    """A path, as far as readers of a study need one."""

    def exists(self) -> bool: ...

    def is_file(self) -> bool: ...

    def read_bytes(self) -> bytes: ...


def as_readable(path: str | os.PathLike[str] | Readable) -> Readable:
    """`as_path`, or a file in an archive as it is."""
    return as_path(path) if isinstance(path, str | os.PathLike) else path


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path on a file system, ~ expanded, or in a bucket for a URL; as `buckets.to_path`.

    RunDirectoryError where ~ has no directory.
    """
    return buckets.to_path(path) if buckets.is_url(path) else expanded(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """`as_path`, absolute, as orbax needs it."""
    path = as_path(path)
    return path if buckets.is_url(path) else path.absolute()


def component(name: str) -> str:
    """`name`, which a file gives, where it names one entry of a directory and nothing else.

    RunDirectoryError where it is empty, '.' or '..', has a slash or a null character, or has 256
    bytes or more.
    """
    leads_elsewhere = name in ('', os.curdir, os.pardir) or '/' in name or '\0' in name
    if leads_elsewhere or len(os.fsencode(name)) >= PART_END:
        raise RunDirectoryError(
            f'{name!r:.80} is no name of a file or directory; valid is one component of a path, '
            f"below {PART_END} bytes of UTF-8, other than '.' and '..'"
        )
    return name


def run_path(study: Files, directory: str) -> Files:
    """The directory of a run, which a plan gives relative to its study, as in runs/NAME.

    RunDirectoryError where it is not inside the study: the plan may be from elsewhere.
    """
    try:
        names = [component(name) for name in directory.split('/')]
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f'{directory!r:.80} is no directory inside the study; valid is runs/NAME'
        ) from error
    path = study
    for name in names:
        path = path / name
    return path


def below(directory: Path, *names: str) -> Path:
    """directory/names[0]/names[1]/..., where the program is about to write or delete.

    `directory` may be a link, since a user names it. RunDirectoryError where one of `names`, each
    a `component`, is a link: a directory from elsewhere may link to anything. Buckets have none.
    """
    link = first_link(directory, *names)
    if link is not None:
        raise _linked(link)
    return directory.joinpath(*names)


def first_link(directory: Path, *names: str) -> Path | None:
    """The first link on the way from a directory to `names` in it; None without one.

    RunDirectoryError where one of `names` is no `component`. Buckets have no links.
    """
    path = directory
    for name in names:
        path = path / component(name)
        if not buckets.is_url(path) and path.is_symlink():
            return path
    return None


def in_place(path: str, flags: int) -> int:
    """An `opener` of the function open(), for a file that is changed in place and not replaced.

    RunDirectoryError where that is a link, or no regular file.
    """
    try:
        # O_NONBLOCK: a pipe is opened at once, and refused below.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise _linked(Path(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunDirectoryError(f'{path} is no regular file; remove it')
    return descriptor


def _linked(path: Path) -> RunDirectoryError:
    """The error that says that a path is a link where the program would write."""
    return RunDirectoryError(
        f'{path} is a link, and nothing is written or deleted through one; put what it links to '
        'in its place, or give another directory'
    )


def read_whole(path: Readable, most: int | None = LARGEST) -> bytes:
    """The content of a regular file, of an object in a bucket, or of a file in an archive.

    UnsuitableFileError for a pipe or a device, which may have no end, and for a file of more than
    `most` bytes; else OSError.
    """
    if isinstance(path, Path) and not buckets.is_url(path):
        return read_regular(path, most)
    return path.read_bytes()


def without_directories(text: str) -> str:
    """An argument or setting without the directories of the machine that it was given on.

    An absolute path below the working directory becomes relative to it; of another one, the last
    component is left: `--workdir=/home/ann/runs/a` becomes `--workdir=runs/a` or `--workdir=a`.
    """

    def shortened(match: re.Match[str]) -> str:
        before, absolute_path = match.groups()
        path = Path(os.path.normpath(absolute_path))
        if path.is_relative_to(Path.cwd()):
            return before + str(path.relative_to(Path.cwd()))
        return before + (path.name or '/')

    return _ABSOLUTE.sub(shortened, text)


def check_directory(
    path: str | os.PathLike[str], *, name: str = 'workdir', create: bool = False
) -> Path:
    """A directory that a user names, absolute; RunDirectoryError where no file can be written.

    A directory that does not exist is made with `create`; otherwise its nearest parent has to take
    files. `name` is the setting that names it, for the error.
    """
    if buckets.is_url(path):
        directory = as_path(path)
        buckets.check_writable(directory)
        return directory
    # POSIX keeps two leading slashes apart from one; orbax cannot write below them.
    directory = Path('/' + os.path.abspath(as_path(path)).lstrip('/'))
    try:
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        existing = directory
        while not existing.exists():
            existing = existing.parent
        # Permissions alone do not say whether a file system takes files.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunDirectoryError(
            f'{name}={directory} cannot be used ({error.strerror}); '
            'give a directory that this user can write to'
        ) from error
    return directory


def make_directory(path: str | os.PathLike[str], *, name: str = 'workdir') -> Path:
    """As `check_directory`; the directory is made where it does not exist."""
    return check_directory(path, name=name, create=True)


def remove_tree(path: Path) -> None:
    """Deletes a directory, if it is there, as far as that is possible; of a link, the link."""
    if not buckets.is_url(path):
        if path.is_symlink():
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        cast(epath.Path, path).rmtree(missing_ok=True)


def require_room(directory: Path, size: int) -> None:
    """Raises DiskError unless `directory` takes files of `size` bytes in all; a bucket does."""
    if buckets.is_url(directory):
        return
    # The file shows that the directory is there and takes files at all.
    with disk_errors(directory), tempfile.TemporaryFile(dir=directory):
        free = shutil.disk_usage(directory).free
        if free < size:
            raise DiskError(
                f'{directory} cannot be written: its disk has {free:,} of the {size:,} bytes that '
                f'are needed; make room {_RESUME}'
            )


def require_same(path: Path, before: os.stat_result) -> None:
    """Raises DiskError where a path is no longer the file or directory that had this status."""
    with disk_errors(path):
        if not os.path.samestat(path.stat(), before):
            raise _gone(path)


def version_of(path: Path) -> tuple[int, int]:
    """The size of a file and the time of its last change: another file has another pair."""
    status: Any = path.stat()
    if buckets.is_url(path):
        return status.length, status.mtime
    return status.st_size, status.st_mtime_ns


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes `content` (text as UTF-8) to `path`, whose directory is created, and returns `path`.

    A reader or crash sees the old file or the whole new one, synced on return; writers may compete.
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
    # Written by open(), not tempfile, so that the permissions are those that the umask allows.
    with no_interrupt, _replacing(path, name) as temporary:
        temporary.write_bytes(data)
    return path


def remove_unfinished(directory: Path) -> None:
    """Deletes what `write_atomic` of a killed process left; for the only writer of a directory."""
    if not buckets.is_url(directory):
        for path in directory.glob(_TEMPORARY.format('*', '[0-9a-f]' * 32)):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path, local for a bucket, that replaces `path` when the block succeeds.

    Its name is fixed, so that what a killed writer left is overwritten; two writers need a lock.
    """
    if buckets.is_url(path):
        with tempfile.TemporaryDirectory() as directory:
            temporary = Path(directory, path.name)
            yield temporary
            buckets.write(path, temporary.read_bytes())
        return
    with _replacing(path, f'{path.name}.tmp') as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)  # follows no link
        # The mode that the umask gives, since safetensors makes files that only their owner reads.
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)


@contextlib.contextmanager
def _replacing(path: Path, name: str) -> Iterator[Path]:
    """Yields the temporary path `name` beside `path`, which replaces it if the block succeeds.

    Both the file and its entry in the directory are on the disk afterwards.
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
    """Returns once a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yields `path`, or for one in a bucket a local file of the same name and content.

    UnsuitableFileError for a pipe or a device.
    """
    if not buckets.is_url(path):
        require_regular(path, most=None)
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        local = Path(directory, path.name)
        local.write_bytes(buckets.read(path).content)
        yield local


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A block that writes at or below `path`; DiskError where the disk fails or `path` is gone.

    Any other error of the block stays as it is.
    """
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        if _is_system_error(error, errno.ENOENT) and not buckets.is_url(path):
            for ancestor in (*reversed(path.parents), path):
                if not os.path.lexists(ancestor):
                    raise _gone(ancestor) from error
        directory = path if os.path.isdir(path) else path.parent
        for number, reason in _FAILED.items():
            if _is_system_error(error, number):
                raise DiskError(f'{directory} cannot be written: {reason} {_RESUME}') from error
        raise


def _is_system_error(error: Exception, number: int) -> bool:
    """Whether an error is the system's of this number, as errno.ENOSPC.

    Libraries raise many kinds of their own, which have only the text of the system's error.
    """
    if isinstance(error, OSError) and error.errno:
        return error.errno == number
    return os.strerror(number) in str(error)


@contextlib.contextmanager
def read_errors(path: Readable) -> Iterator[None]:
    """A block that reads at or below `path`; ReadError where the system fails, not the content.

    So a file on a disk that fails, or in a bucket out of reach, does not count as damaged.
    """
    try:
        yield
    except Exception as error:
        # Libraries raise errors of their own, from that of the system.
        cause: BaseException | None = error
        while cause is not None:
            reason = _failure(cause)
            if reason is not None:
                raise ReadError(
                    f'{path} cannot be read ({reason}); nothing was changed: run the same command '
                    'again once it can be'
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise


def _failure(error: BaseException) -> str | None:
    """How the system failed; None for an error that says that a file is missing or damaged."""
    if isinstance(error, MemoryError):
        return 'out of memory'
    if isinstance(error, OSError):
        if error.errno in _CONTENT or isinstance(error, FileNotFoundError | UnsuitableFileError):
            return None
        return error.strerror or str(error)
    # An error of a library, which names that of the system in its text.
    system_texts = [os.strerror(number) for number in errno.errorcode if number not in _CONTENT]
    for text in (*system_texts, *_STATUSES):
        if text in str(error):
            return text
    return None


def _gone(path: Path) -> DiskError:
    """The error that says that a directory has vanished while a run wrote there."""
    return DiskError(f'{path} is gone: it was removed, renamed or unmounted; put it back {_RESUME}')

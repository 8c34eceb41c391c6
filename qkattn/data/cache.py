"""Where data lives on disk, and how several processes share it: locks and atomic writes."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from qkattn.errors import ConfigError


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory for prepared data: `data_dir`, else $QKATTN_DATA, else ~/.cache/qkattn.

    Raises:
      ConfigError: for a bucket URL; token files are memory-mapped and have to be local.
    """
    chosen = os.fspath(data_dir) if data_dir is not None else os.environ.get('QKATTN_DATA')
    if chosen and '://' in chosen:
        raise ConfigError(
            f'data_dir={chosen!r} is a URL, but token files are memory-mapped; name a local or '
            'mounted directory.'
        )
    return Path(chosen or '~/.cache/qkattn').expanduser().absolute()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `path` (created if missing) among all processes.

    The operating system releases the lock when the holder dies, so a killed process blocks nobody.

    Raises:
      ConfigError: if the directory of `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open('a')
    except OSError as error:
        raise ConfigError(
            f'data_dir: {str(path.parent)!r} cannot be written ({error.strerror}); name a writable '
            'directory as data_dir or in QKATTN_DATA.'
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` that takes its place when the block succeeds.

    The temporary name is fixed, so what a killed writer leaves is overwritten by the next one; the
    caller holds a lock.
    """
    temporary = path.with_name(f'{path.name}.tmp')
    yield temporary
    os.replace(temporary, path)

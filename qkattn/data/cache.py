"""The directory of prepared data, and how it is filled: once, under a lock, checked when opened."""

import contextlib
import contextvars
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, below
from qkattn.storage.leases import locked

T = TypeVar('T')

log = logging.getLogger(__name__)


class DamagedData(ConfigError):
    """A file is not what its description states, or one of the two cannot be read."""


class NotPrepared(ConfigError):
    """Data that are not on this machine yet."""


_PREPARING: contextvars.ContextVar[bool] = contextvars.ContextVar('preparing', default=True)


@contextlib.contextmanager
def nothing_prepared() -> Iterator[None]:
    """Inside, data that would be downloaded or prepared raise NotPrepared, for dry runs."""
    token = _PREPARING.set(False)
    try:
        yield
    finally:
        _PREPARING.reset(token)


def require_preparing(name: str) -> None:
    """Raises NotPrepared, for the data of this name, inside of `nothing_prepared`."""
    if not _PREPARING.get():
        raise NotPrepared(f'{name} is prepared by the first start, or by prepare_data')


def local_directory(path: str | os.PathLike[str], field: str) -> Path:
    """The directory of token files, which are memory-mapped; ConfigError for a bucket URL."""
    if '://' in os.fspath(path):
        raise ConfigError(
            f'{field}={path} is a URL, but token files are memory-mapped; give a local or mounted '
            'directory'
        )
    return as_path(path)


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory for prepared data: `data_dir`, else $QKATTN_DATA, else ~/.cache/qkattn."""
    chosen = data_dir or os.environ.get('QKATTN_DATA') or '~/.cache/qkattn'
    return local_directory(chosen, 'data.data_dir').absolute()


def prepared_once(
    path: Path, read: Callable[[], T], prepare: Callable[[], object], *, root: Path
) -> T:
    """Reads data that one process prepares the first time.

    Any number of processes may call this at the same time; they wait for the one that holds the
    file `lock` beside `path`.

    Args:
      path: the file that is there once the data are prepared.
      read: reads the data. It raises DamagedData, which is logged as a warning, where they have to
        be prepared again.
      prepare: writes the data.
      root: the directory that the user has named; `path` is below it.

    Raises ConfigError if anything has to be prepared and the directory cannot be written, or is
    reached by a link below `root`; NotPrepared inside of `nothing_prepared`.
    """

    def read_if_there() -> T:
        # os.path, because Path.exists raises where a directory may not be entered.
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        return read()

    try:
        # Without the lock first, so that a finished cache may be on a read-only disk.
        return read_if_there()
    except (FileNotFoundError, DamagedData):
        require_preparing(str(path))
        below(root, *path.parent.relative_to(root).parts)
        with locked(path.with_name('lock')):
            try:
                return read_if_there()  # another process may have prepared it
            except FileNotFoundError:
                pass
            except DamagedData as error:
                log.warning('%s; preparing it again', error)
            prepare()
            return read()

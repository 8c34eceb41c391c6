"""The directory of prepared data. Data are prepared once, under a lock, and checked when opened."""

import contextlib
import contextvars
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, join_without_links
from qkattn.storage.leases import locked

T = TypeVar('T')

log = logging.getLogger(__name__)


class DamagedData(ConfigError):
    """A file differs from its description, or one of the two cannot be read."""


class NotPrepared(ConfigError):
    """Data that are not on this machine yet."""


_PREPARING: contextvars.ContextVar[bool] = contextvars.ContextVar('preparing', default=True)


@contextlib.contextmanager
def nothing_prepared() -> Iterator[None]:
    """Inside of this context, nothing is downloaded or prepared, for dry runs.

    Data that are not prepared yet raise NotPrepared.
    """
    token = _PREPARING.set(False)
    try:
        yield
    finally:
        _PREPARING.reset(token)


def require_preparing(name: str) -> None:
    """Raises NotPrepared for data with this name inside of the context `nothing_prepared`."""
    if not _PREPARING.get():
        raise NotPrepared(f'{name} is prepared by the first start, or by prepare_data')


def local_directory(path: str | os.PathLike[str], field: str) -> Path:
    """Returns the path of a directory of token files.

    Raises ConfigError for the URL of a bucket, because token files are memory-mapped. `field` names
    the setting that holds `path`, for the message.
    """
    if '://' in os.fspath(path):
        raise ConfigError(
            f'{field}={path} is a URL, but token files are memory-mapped; give a local or mounted '
            'directory'
        )
    return as_path(path)


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the directory for prepared data.

    It is `data_dir`, or else the environment variable QKATTN_DATA, or else ~/.cache/qkattn.
    """
    chosen = data_dir or os.environ.get('QKATTN_DATA') or '~/.cache/qkattn'
    return local_directory(chosen, 'data.data_dir').absolute()


def read_or_prepare(
    path: Path, read: Callable[[], T], prepare: Callable[[], object], *, root: Path
) -> T:
    """Reads data, and prepares them first if they are missing or damaged.

    Any number of processes may call this at the same time. One of them takes the file `lock` beside
    `path` and prepares the data. The others wait for it.

    Args:
      path: the file that exists once the data are prepared.
      read: reads the data. It raises DamagedData if they have to be prepared again. This is logged
        as a warning.
      prepare: writes the data.
      root: the directory that the user has named; `path` is below it.

    Raises:
      ConfigError: the data have to be prepared, but the directory cannot be written to, or is
        reached by a link below `root`.
      NotPrepared: the data have to be prepared, but a `nothing_prepared` block forbids it.
    """

    def read_if_there() -> T:
        # Path.exists would raise an error for a directory that may not be entered.
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        return read()

    # If the data are there, return them without the lock, so that they may be on a read-only disk.
    with contextlib.suppress(FileNotFoundError, DamagedData):
        return read_if_there()

    # They are missing or damaged. Refuse to prepare them in a dry run, or below a link.
    require_preparing(str(path))
    join_without_links(root, *path.parent.relative_to(root).parts)

    with locked(path.with_name('lock')):
        # Another process may have prepared the data before this one got the lock.
        try:
            return read_if_there()
        except FileNotFoundError:
            pass
        except DamagedData as error:
            log.warning('%s; preparing it again', error)
        prepare()
        return read()

"""The cache of prepared data. Data are prepared once, under a lock, and checked when opened."""

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


_MAY_PREPARE: contextvars.ContextVar[bool] = contextvars.ContextVar('may_prepare', default=True)


@contextlib.contextmanager
def nothing_prepared() -> Iterator[None]:
    """Makes missing data raise NotPrepared instead of being prepared, for dry runs."""
    earlier_value = _MAY_PREPARE.set(False)  # read by `require_preparing`
    try:
        yield
    finally:
        _MAY_PREPARE.reset(earlier_value)


def require_preparing(name: str) -> None:
    """Raises NotPrepared inside the context `nothing_prepared`; `name` is for the message."""
    if not _MAY_PREPARE.get():
        raise NotPrepared(f'{name} is prepared by the first start, or by prepare_data')


def local_directory(path: str | os.PathLike[str], field: str) -> Path:
    """Converts a setting to the path of a directory that can be memory-mapped.

    Args:
        path: The value of the setting.
        field: The name of the setting, for the error message.

    Raises:
        ConfigError: The path is the URL of a bucket.
    """
    if '://' in os.fspath(path):
        raise ConfigError(
            f'{field}={path} is a URL, but token files are memory-mapped; give a local or mounted '
            'directory'
        )
    return as_path(path)


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the cache directory: `data_dir`, else $QKATTN_DATA, else ~/.cache/qkattn."""
    chosen = data_dir or os.environ.get('QKATTN_DATA') or '~/.cache/qkattn'
    return local_directory(chosen, 'data.data_dir').absolute()


def read_or_prepare(
    path: Path, read: Callable[[], T], prepare: Callable[[], object], *, root: Path
) -> T:
    """Reads data, preparing them first if they are missing or damaged.

    Processes may call this concurrently. A file lock lets one of them prepare the data.

    Args:
        path: A file that exists once the data are prepared.
        read: Reads the data, or raises DamagedData to have the data prepared again.
        prepare: Writes the data.
        root: The directory named by the user, above `path`.

    Raises:
        ConfigError: The directory is not writable, or is below a symbolic link under `root`.
        NotPrepared: The data would have to be prepared in a dry run.
    """

    def read_if_there() -> T:
        # Unlike Path.exists, os.path.exists is False in a directory without access.
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        return read()

    # Intact data are read without a lock, because the disk may be read-only.
    with contextlib.suppress(FileNotFoundError, DamagedData):
        return read_if_there()

    require_preparing(str(path))  # raises NotPrepared in a dry run
    # Raise ConfigError for a symbolic link, which could lead outside of `root`.
    folder_names = path.parent.relative_to(root).parts
    join_without_links(root, *folder_names)

    lock_file = path.with_name('lock')
    with locked(lock_file):
        # Another process may have prepared the data in the meantime.
        try:
            return read_if_there()
        except FileNotFoundError:
            pass
        except DamagedData as error:
            log.warning('%s; preparing it again', error)
        prepare()
        return read()

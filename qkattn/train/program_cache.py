"""The cache of compiled programs on disk, from which later processes load them.

JAX keys them by program, options, versions and CPU. XLA also splits loops by the number of
cores, which changes the last bits of results, so each number of cores has a directory of its own.
"""

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, join_without_links

# The most bytes that the cache takes. Beyond them, the least recently used programs are deleted.
LIMIT = 4 * 2**30

# The environment variable of JAX that names another directory. LIMIT does not apply there.
_DIRECTORY_VARIABLE = 'JAX_COMPILATION_CACHE_DIR'
# Settings of JAX. An environment variable of the same name takes precedence.
_SETTINGS = {
    # By default, JAX does not keep programs that compile within a second.
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    # Most of the time of lowering goes into the source locations of operations.
    'jax_traceback_in_locations_limit': 0,
}

log = logging.getLogger(__name__)


def directory() -> Path:
    """Returns the directory of this machine's programs, such as ~/.cache/qkattn/compiled/8-cores.

    The parent directory is JAX_COMPILATION_CACHE_DIR if that is set.
    """
    parent = os.environ.get(_DIRECTORY_VARIABLE)
    if not parent:
        user_cache = os.environ.get('XDG_CACHE_HOME', '')
        # The XDG specification says that a relative path is to be ignored.
        if not os.path.isabs(user_cache):
            user_cache = '~/.cache'
        parent = f'{user_cache}/qkattn/compiled'

    # XLA also reads the number of cores from NPROC.
    num_cores = os.environ.get('NPROC')
    if not num_cores:
        if hasattr(os, 'sched_getaffinity'):
            num_cores = str(len(os.sched_getaffinity(0)))
        else:
            num_cores = str(os.cpu_count())
    return as_path(parent).absolute() / f'{num_cores}-cores'


def keep_programs() -> None:
    """Turns the cache of compiled programs on, for the rest of this process.

    If the directory cannot be used, or other users can write to it, this logs a warning and turns
    the cache off.
    """
    # Environment variables of the user take precedence.
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if '://' in os.environ.get(_DIRECTORY_VARIABLE, ''):
        return  # JAX itself writes to a bucket
    try:
        path = directory()
        _make_private(path)
        if not os.environ.get(_DIRECTORY_VARIABLE):
            # A directory that the user has named has no limit of size, and this one has. Another
            # process may delete the same files at the same time.
            with contextlib.suppress(FileNotFoundError):
                _delete_oldest(path.parent)
    except (OSError, ConfigError) as error:  # a user may have no home directory
        log.warning(
            'compiled programs are not kept (%s); set %s to a directory', error, _DIRECTORY_VARIABLE
        )
        jax.config.update('jax_enable_compilation_cache', False)
    else:
        jax.config.update('jax_compilation_cache_dir', str(path))
    # JAX reads these settings once; the reset makes it read them again.
    compilation_cache.reset_cache()


def _make_private(path: Path) -> None:
    """Makes a directory for programs that only this user can write to.

    Programs are code that is executed, so other users must not be able to place any there. Raises
    PermissionError if they can write to the directory, and RunDirectoryError if it is a link.
    """
    join_without_links(path.parent, path.name)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    if status.st_uid != os.geteuid() or status.st_mode & writable_by_others:
        raise PermissionError(f'{path} is not a directory that this user alone can write to')
    # This raises OSError if the file system is read-only.
    tempfile.TemporaryFile(dir=path).close()


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turns the cache off inside of a block.

    Programs are then always compiled: only compilation logs the warnings of XLA, and only it takes
    the time that is to be measured.
    """
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update('jax_enable_compilation_cache', False)
        # JAX reads this setting once; the reset makes it read it again.
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update('jax_enable_compilation_cache', enabled)
        compilation_cache.reset_cache()


def _delete_oldest(path: Path) -> None:
    """Deletes the least recently used programs below `path` until LIMIT bytes are left.

    `path` holds the directories N-cores.
    """
    status_by_file = {}
    for folder in path.glob('*-cores'):
        if folder.is_symlink():
            continue
        for file in folder.glob('*-cache'):
            status_by_file[file] = file.stat()

    def last_use(file: Path) -> float:
        status = status_by_file[file]
        return max(status.st_atime, status.st_mtime)

    total = sum(status.st_size for status in status_by_file.values())
    for file in sorted(status_by_file, key=last_use):
        if total <= LIMIT:
            break
        file.unlink(missing_ok=True)
        total -= status_by_file[file].st_size

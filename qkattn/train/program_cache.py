"""The cache of compiled programs on disk, JAX's persistent compilation cache.

XLA splits loops by the number of CPU cores, which changes the last bits of results. JAX's cache key
leaves out this number, so each number of cores has its own directory.
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

# The maximum size of the cache in bytes. The least recently used programs are deleted first.
LIMIT = 4 * 2**30

# JAX's environment variable for another directory, to which LIMIT does not apply.
_DIRECTORY_VARIABLE = 'JAX_COMPILATION_CACHE_DIR'
# Settings of JAX. An environment variable of the same name takes precedence.
_SETTINGS = {
    # By default, JAX does not cache programs that compile within a second.
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    # Source locations of operations take most of the time of lowering.
    'jax_traceback_in_locations_limit': 0,
}

log = logging.getLogger(__name__)


def directory() -> Path | str:
    """Returns the directory of this machine's programs, such as ~/.cache/qkattn/compiled/8-cores.

    If JAX_COMPILATION_CACHE_DIR is set, it takes the place of ~/.cache/qkattn/compiled. A directory
    in a bucket is returned as its URL.
    """
    parent = _named_parent()
    if parent is None:
        user_cache = os.environ.get('XDG_CACHE_HOME', '')
        # By the XDG specification, a relative path is ignored.
        if not os.path.isabs(user_cache):
            user_cache = '~/.cache'
        parent = f'{user_cache}/qkattn/compiled'
    if '://' in parent:
        return f'{parent.rstrip("/")}/{_name_of_subdirectory()}'
    return as_path(parent).absolute() / _name_of_subdirectory()


def _named_parent() -> str | None:
    """Returns the directory that the user names for all numbers of cores, or None."""
    return os.environ.get(_DIRECTORY_VARIABLE) or None


def _name_of_subdirectory() -> str:
    """Returns the name of the directory for this number of cores, such as '8-cores'."""
    # XLA reads the number of cores from NPROC first.
    num_cores = os.environ.get('NPROC')
    if not num_cores:
        if hasattr(os, 'sched_getaffinity'):
            num_cores = str(len(os.sched_getaffinity(0)))
        else:
            num_cores = str(os.cpu_count())
    return f'{num_cores}-cores'


def keep_programs() -> None:
    """Turns the cache of compiled programs on, for the rest of this process.

    If the directory cannot be used, or other users can write to it, logs a warning and turns the
    cache off.
    """
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:  # JAX reads such environment variables itself
            jax.config.update(name, value)
    try:
        path = directory()
        if isinstance(path, Path):  # JAX writes to a bucket itself
            _make_private(path)
            is_default = _named_parent() is None
            if is_default:  # a directory that the user names may grow without limit
                # Another process may delete the same files at the same time.
                with contextlib.suppress(FileNotFoundError):
                    _delete_oldest(path.parent)
    except (OSError, ConfigError) as error:  # for example, the user has no home directory
        log.warning(
            'compiled programs are not kept (%s); set %s to a directory', error, _DIRECTORY_VARIABLE
        )
        jax.config.update('jax_enable_compilation_cache', False)
    else:
        jax.config.update('jax_compilation_cache_dir', str(path))
    # Without a reset, JAX would not read the settings again.
    compilation_cache.reset_cache()


def _make_private(path: Path) -> None:
    """Makes a directory that only this user can write to, since its programs are executed.

    Raises:
        PermissionError: The directory exists, and other users can write to it.
        RunDirectoryError: The directory is a link.
        OSError: The directory cannot be made or written to.
    """
    join_without_links(path.parent, path.name)  # raises RunDirectoryError for a link
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    if status.st_uid != os.geteuid() or status.st_mode & writable_by_others:
        raise PermissionError(f'{path} is not a directory that this user alone can write to')
    tempfile.TemporaryFile(dir=path).close()  # raises OSError on a read-only file system


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turns the cache off in a `with` block, so that programs are always compiled."""
    was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update('jax_enable_compilation_cache', False)
        # Without a reset, JAX would not read the setting again.
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update('jax_enable_compilation_cache', was_enabled)
        compilation_cache.reset_cache()


def _delete_oldest(path: Path) -> None:
    """Deletes the least recently used programs in `path`/*-cores until LIMIT bytes are left."""
    stat_by_file = {}
    for folder in path.glob('*-cores'):
        if folder.is_symlink():
            continue
        for file in folder.glob('*-cache'):
            stat_by_file[file] = file.stat()

    def time_of_last_use(file: Path) -> float:
        return max(stat_by_file[file].st_atime, stat_by_file[file].st_mtime)

    total_bytes = sum(file_stat.st_size for file_stat in stat_by_file.values())
    for file in sorted(stat_by_file, key=time_of_last_use):
        if total_bytes <= LIMIT:
            break
        file.unlink(missing_ok=True)
        total_bytes -= stat_by_file[file].st_size

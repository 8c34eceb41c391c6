"""Compiled programs that are kept on disk, so that a later process loads them.

JAX keys them by program, options, versions and CPU. XLA also splits loops by the number of cores:
each number has a directory, so that a loaded program is that of this process to the last bit.
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
from qkattn.storage.files import as_path, below

# Bytes, beyond which programs are deleted, least recently used first.
LIMIT = 4 * 2**30

# The variable of JAX that names another directory, which then has no limit.
_NAMED = 'JAX_COMPILATION_CACHE_DIR'
# Settings of JAX, each unless the environment has the variable of its name.
_SETTINGS = {
    # By default, programs that compile within a second are not kept.
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    # Lines of source code in a program take most of the time of its lowering.
    'jax_traceback_in_locations_limit': 0,
}

log = logging.getLogger(__name__)


def directory() -> Path:
    """N-cores of JAX_COMPILATION_CACHE_DIR, else of qkattn/compiled in the user's cache."""
    named = os.environ.get(_NAMED)
    if not named:
        user_cache = os.environ.get('XDG_CACHE_HOME', '')
        if not os.path.isabs(user_cache):  # the standard of XDG ignores relative paths
            user_cache = '~/.cache'
        named = f'{user_cache}/qkattn/compiled'
    # XLA takes NPROC for the number of cores, too.
    num_cores = os.environ.get('NPROC')
    if not num_cores:
        has_affinity = hasattr(os, 'sched_getaffinity')
        num_cores = str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count())
    return as_path(named).absolute() / f'{num_cores}-cores'


def keep_programs() -> None:
    """Keeps and loads programs from here on; warns if the directory is not this user's alone."""
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if '://' in os.environ.get(_NAMED, ''):
        return  # a bucket, which JAX writes itself
    try:
        path = directory()
        _make_private(path)
        if not os.environ.get(_NAMED):
            with contextlib.suppress(FileNotFoundError):  # another start is deleting them
                _delete_oldest(path.parent)
    except (OSError, ConfigError) as error:  # a user may have no home directory
        log.warning('compiled programs are not kept (%s); set %s to a directory', error, _NAMED)
        jax.config.update('jax_enable_compilation_cache', False)
    else:
        jax.config.update('jax_compilation_cache_dir', str(path))
    compilation_cache.reset_cache()  # JAX decides once whether it uses one


def _make_private(path: Path) -> None:
    """Makes a directory for programs, which are code that is executed.

    PermissionError where other users can write to it; RunDirectoryError where it is a link.
    """
    below(path.parent, path.name)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    if status.st_uid != os.geteuid() or status.st_mode & writable_by_others:
        raise PermissionError(f'{path} is not a directory that this user alone can write to')
    tempfile.TemporaryFile(dir=path).close()  # the file system may be read-only


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compiles afresh: XLA warns while it compiles."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update('jax_enable_compilation_cache', False)
        compilation_cache.reset_cache()  # JAX decides once whether it uses the cache
        yield
    finally:
        jax.config.update('jax_enable_compilation_cache', enabled)
        compilation_cache.reset_cache()


def _delete_oldest(path: Path) -> None:
    """Deletes programs in the directories N-cores of `path`, down to LIMIT bytes in all."""
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

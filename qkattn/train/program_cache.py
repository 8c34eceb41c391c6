"""Compiled programs that are kept on disk, so that a later process loads them.

JAX keys them by program, options, versions and CPU. XLA also splits loops by the number of cores:
each number has a directory, so that a loaded program is that of this process to the last bit.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, below

LIMIT = 4 * 2**30  # bytes, beyond which programs are deleted, least recently used first

_NAMED = 'JAX_COMPILATION_CACHE_DIR'  # a directory without a limit
_SETTINGS = {  # JAX by default keeps no program that compiles within a second
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    'jax_traceback_in_locations_limit': 0,  # lines of source in a program: most of its lowering
}

log = logging.getLogger(__name__)


def directory() -> Path:
    """N-cores of JAX_COMPILATION_CACHE_DIR, else of qkattn/compiled in the user's cache."""
    cache = os.environ.get('XDG_CACHE_HOME', '')
    cache = cache if os.path.isabs(cache) else '~/.cache'  # the standard ignores relative ones
    path = as_path(os.environ.get(_NAMED) or f'{cache}/qkattn/compiled').absolute()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return path / f'{os.environ.get("NPROC") or cores}-cores'


def keep_programs() -> None:
    """Keeps and loads programs from now on; warns if the directory is not this user's alone."""
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if '://' in os.environ.get(_NAMED, ''):
        return  # a bucket, which JAX writes itself
    try:
        path = directory()
        below(path.parent, path.name)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f'{path} is not a directory that this user alone can write to')
        tempfile.TemporaryFile(dir=path).close()
        if not os.environ.get(_NAMED):
            with contextlib.suppress(FileNotFoundError):  # another start is deleting them
                _delete_oldest(path.parent)
    except (OSError, ConfigError) as error:  # a user may have no home directory
        log.warning('compiled programs are not kept (%s); set %s to a directory', error, _NAMED)
        jax.config.update('jax_enable_compilation_cache', False)
    else:
        jax.config.update('jax_compilation_cache_dir', str(path))
    compilation_cache.reset_cache()  # JAX decides once whether it uses one


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
    folders = [folder for folder in path.glob('*-cores') if not folder.is_symlink()]
    stats = {file: file.stat() for folder in folders for file in folder.glob('*-cache')}
    total = sum(stat.st_size for stat in stats.values())
    for file in sorted(stats, key=lambda file: max(stats[file].st_atime, stats[file].st_mtime)):
        if total > LIMIT:
            file.unlink(missing_ok=True)
            total -= stats[file].st_size

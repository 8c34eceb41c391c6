"""Compiled programs that are kept on disk, so that a later process loads them.

JAX keys them by program, options, versions and the features of the CPU. XLA also splits loops by
the number of cores, which that key lacks: it is added here, so that a program is that of the
process that runs it, to the last bit, whoever shares the directory.
"""

import logging
import os
import tempfile
from pathlib import Path

import jax
from jax._src import cache_key, compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from qkattn.run.files import write_atomic

LIMIT = 4 * 2**30
"""Bytes of the user's cache directory beyond which programs are deleted, least recently used first;
JAX_COMPILATION_CACHE_MAX_SIZE sets another limit."""

_SUFFIX = '-cache'  # as JAX names them
_SETTINGS = {  # JAX by default keeps no program that compiles within a second
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    'jax_traceback_in_locations_limit': 0,  # lines of source in a program: most of its lowering
}

log = logging.getLogger(__name__)


def directory() -> Path:
    """JAX_COMPILATION_CACHE_DIR, else qkattn/compiled in the user's cache.

    Not in QKATTN_DATA, which users may share: programs are machine code that is executed.
    """
    chosen = os.environ.get('JAX_COMPILATION_CACHE_DIR')
    cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(chosen or f'{cache}/qkattn/compiled').expanduser().absolute()


def keep_programs() -> None:
    """Keeps what this process compiles from now on, and loads what another one has kept.

    With JAX_ENABLE_COMPILATION_CACHE=false it compiles everything. A directory that cannot be
    written is a warning, and so is a program that cannot be read, which is compiled again.
    """
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return
    cache_key.custom_hook = _cores
    if '://' in os.environ.get('JAX_COMPILATION_CACHE_DIR', ''):
        return  # a bucket, which JAX writes itself
    try:
        path = directory()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        _delete_oldest(path, _limit())
    except (OSError, RuntimeError) as error:  # a user may have no home directory
        _keep_none(error)
        return
    compilation_cache.get_file_cache = lambda path: (_Programs(Path(path)), path)
    jax.config.update('jax_compilation_cache_dir', str(path))
    compilation_cache.reset_cache()  # JAX decides once whether it uses one


class _Programs(CacheInterface):
    """The files of compiled programs, each written whole; one that is damaged is deleted."""

    def __init__(self, path: Path):
        self._path = path

    def get(self, key: str) -> bytes | None:
        path = self._path / (key + _SUFFIX)
        try:
            content = path.read_bytes()
            compilation_cache.decompress_executable(content)  # which checks it
            os.utime(path)
            return content
        except FileNotFoundError:
            return None
        except Exception as error:
            log.warning('%s is damaged (%s) and is compiled again', path, error)
            path.unlink(missing_ok=True)
            return None

    def put(self, key: str, value: bytes) -> None:
        try:
            write_atomic(self._path / (key + _SUFFIX), value)
        except Exception as error:
            _keep_none(error)


def _cores() -> str:
    """The number of threads for which XLA compiles on a CPU."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return f'{own} {os.environ.get("NPROC")}'


def _limit() -> int | None:
    size = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined]
    if size != -1:
        return size
    return None if os.environ.get('JAX_COMPILATION_CACHE_DIR') else LIMIT


def _delete_oldest(path: Path, limit: int | None) -> None:
    """Deletes the programs used least recently, until what is left is within the limit."""
    if limit is None:
        return
    with os.scandir(path) as entries:
        files = [(entry.stat(), entry.path) for entry in entries if entry.name.endswith(_SUFFIX)]
    total = sum(stat.st_size for stat, _ in files)
    for stat, file in sorted(files, key=lambda found: found[0].st_mtime):
        if total <= limit:
            break
        Path(file).unlink(missing_ok=True)
        total -= stat.st_size


def _keep_none(error: Exception) -> None:
    log.warning(
        'compiled programs are not kept (%s); JAX_COMPILATION_CACHE_DIR names another directory',
        error,
    )
    jax.config.update('jax_enable_compilation_cache', False)
    compilation_cache.reset_cache()

"""How this process takes memory from the operating system."""

import ctypes
import functools
import os

# Parameters of mallopt (glibc's malloc.h), and their values: one arena for all threads, which keeps
# freed memory and takes large blocks too. The last is refused where it is above glibc's limit.
_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -8, -1, -3
_OPTIONS = ((_M_ARENA_MAX, 1), (_M_TRIM_THRESHOLD, 2**31 - 1))
_LARGE = (2**30, 2**25)


@functools.cache
def keep_freed_memory() -> None:
    """Memory that is freed stays with this process, which takes it again without page faults.

    By default glibc returns large blocks at once. XLA's CPU backend takes the temporaries of a
    program anew for every call, and the kernel clears every page of them again: as long as a small
    model computes. Nothing happens without glibc, or where its variables say something else.

    It is called before any thread starts: one that takes memory has an arena of its own, which
    keeps no block above 64 MiB, and later threads share out the arenas that there are.
    """
    named = [name for name in os.environ if name.startswith('MALLOC_') or name == 'GLIBC_TUNABLES']
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if named or mallopt is None:
        return
    for parameter, value in _OPTIONS:
        mallopt(parameter, value)
    any(mallopt(_M_MMAP_THRESHOLD, value) for value in _LARGE)

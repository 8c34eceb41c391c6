"""Freed memory that stays with the process."""

import ctypes
import subprocess
import sys

import pytest

from qkattn.jobs import memory

# Takes 64 MiB, writes and frees them twice; prints the page faults of the second time.
PROGRAM = """
import ctypes, resource
from qkattn.jobs.memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'mallopt'), reason='malloc is not of glibc')
@pytest.mark.parametrize(('variables', 'kept'), [({}, True), ({'MALLOC_ARENA_MAX': '4'}, False)])
def test_freed_memory_is_taken_again_without_faults_unless_the_user_says_otherwise(variables, kept):
    found = subprocess.run(
        [sys.executable, '-c', PROGRAM],
        env={'PYTHONPATH': ':'.join(sys.path)} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (int(found.stdout) < 100) is kept


def test_another_allocator_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.ctypes, 'CDLL', lambda name: object())
    memory.keep_freed_memory.__wrapped__()

"""The cores, accelerators and memory that a process may use, whatever limits them."""

import ctypes
import math
import os

import pytest

from qkattn.jobs import machine
from tests.processes import start_python, wait_for_results


@pytest.fixture
def control_group(tmp_path):
    """control_group(path, {file: text}) writes settings of the control group at `path`.

    This process is in the group outer/inner.
    """
    (tmp_path / 'membership').write_text('0::/outer/inner\n')

    def write(path: str, settings: dict[str, str]) -> None:
        directory = tmp_path / 'cgroup' / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in settings.items():
            (directory / name).write_text(text)

    return write


def test_the_narrowest_control_group_is_the_limit(control_group, tmp_path):
    groups, membership, meminfo = (tmp_path / name for name in ('cgroup', 'membership', 'meminfo'))

    def cores_and_memory() -> tuple[float, float]:
        """The number of cores and the bytes of memory that this process may use."""
        cores = machine.granted_cores(groups, membership)
        return cores, machine.free_memory(groups, membership, meminfo)

    assert cores_and_memory() == (math.inf, math.inf)
    meminfo.write_text('MemTotal: 9 kB\nMemAvailable: 4 kB\n')
    control_group('outer', {'cpu.max': '250000 100000'})
    control_group(
        'outer/inner', {'cpu.max': 'max 100000', 'memory.max': 'max', 'memory.current': '10'}
    )
    assert cores_and_memory() == (2.5, 4096)
    control_group('outer', {'memory.max': '5000', 'memory.current': '2000'})
    control_group('', {'cpu.max': '150000 100000'})
    assert cores_and_memory() == (1.5, 3000)
    control_group('outer/inner', {'memory.stat': 'anon 5'})
    # The kernel takes cached files out of memory where it is needed.
    control_group('outer', {'memory.stat': 'anon 7\ninactive_file 500'})
    assert cores_and_memory() == (1.5, 3500)


def test_a_quota_of_cores_takes_evenly_spaced_ones_of_the_affinity(monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {9, 3, 4, 5, 6, 7, 8, 2}, raising=False)
    every = [2, 3, 4, 5, 6, 7, 8, 9]
    for limit, left in ((math.inf, every), (4.9, [2, 4, 6, 8]), (0.5, [2]), (100.0, every)):
        monkeypatch.setattr(machine, 'granted_cores', lambda limit=limit: limit)
        assert machine.usable_cores() == left
    assert machine.split_evenly(range(5), 3) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize(
    ('devices', 'visible', 'platforms', 'names'),
    [
        ((), None, None, []),
        (('nvidia0', 'nvidia1', 'nvidiactl'), None, None, ['0', '1']),
        (('nvidia0', 'nvidia1'), '1', None, ['1']),
        (('nvidia0', 'nvidia1'), '', None, []),
        (('nvidia0', 'nvidia1'), '-1', None, []),
        (('nvidia0', 'accel0'), None, 'cpu', []),
        (('accel0', 'accel1'), None, None, None),
        (('vfio/0',), None, 'tpu', None),
    ],
)
def test_accelerators_are_counted_from_device_files_without_opening_them(
    devices, visible, platforms, names, tmp_path, monkeypatch
):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    monkeypatch.setattr(machine.importlib.util, 'find_spec', lambda name: name == 'jax_plugins')
    for name in devices:
        (tmp_path / 'dev' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'dev' / name).touch()
    assert machine.accelerators(platforms, tmp_path) == names


# Takes 64 MiB, writes and frees them twice; prints the page faults of the second time.
PRINT_PAGE_FAULTS = """
    import ctypes, resource
    from qkattn.jobs.machine import keep_freed_memory
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    keep_freed_memory()
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc(2**26)
        ctypes.memset(block, 1, 2**26)
        libc.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'mallopt'), reason='malloc is not of glibc')
def test_freed_memory_is_taken_again_without_faults_unless_the_user_says_otherwise():
    processes = [
        start_python(PRINT_PAGE_FAULTS),
        start_python(PRINT_PAGE_FAULTS, MALLOC_ARENA_MAX='4'),
    ]
    assert [int(faults) < 100 for _, faults, _ in wait_for_results(processes)] == [True, False]


@pytest.mark.parametrize(
    ('devices', 'visible', 'words'),
    [
        ((), None, 'no accelerator'),
        (('nvidia0', 'nvidiactl'), None, '1 NVIDIA GPU'),
        (('nvidia0', 'nvidia1'), '1', '2 NVIDIA GPUs'),
        (('nvidia0', 'nvidia1'), '', '2 NVIDIA GPUs, hidden by CUDA_VISIBLE_DEVICES='),
        (('nvidia0',), '-1', '1 NVIDIA GPU, hidden by CUDA_VISIBLE_DEVICES=-1'),
        (('accel0',), None, 'a TPU or a GPU of AMD'),
    ],
)
def test_the_accelerators_of_a_machine_in_words(devices, visible, words, monkeypatch, tmp_path):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    (tmp_path / 'dev').mkdir()
    for name in devices:
        (tmp_path / 'dev' / name).touch()
    assert machine.describe_accelerators(tmp_path) == words

"""The cores, accelerators and memory that a process may use, whatever limits them."""

import ctypes
import dataclasses
import math
import os
from pathlib import Path

import pytest

from qkattn.jobs import machine
from tests.processes import start_python, wait_for_results


@dataclasses.dataclass
class FakeLinux:
    """The files of Linux that limit a process of the control group outer/inner."""

    directory: Path

    @property
    def groups(self) -> Path:
        return self.directory / 'cgroup'

    @property
    def membership(self) -> Path:
        return self.directory / 'membership'

    @property
    def meminfo(self) -> Path:
        return self.directory / 'meminfo'

    def write_settings(self, group: str, settings: dict[str, str]) -> None:
        """Writes {file: text} of a control group, such as 'outer'."""
        directory = self.groups / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in settings.items():
            (directory / name).write_text(text)

    def granted_cores(self) -> float:
        return machine.granted_cores(self.groups, self.membership)

    def free_memory(self) -> float:
        return machine.free_memory(self.groups, self.membership, self.meminfo)


@pytest.fixture
def linux(tmp_path):
    (tmp_path / 'membership').write_text('0::/outer/inner\n')
    return FakeLinux(tmp_path)


def test_a_process_without_limits(linux):
    assert linux.granted_cores() == math.inf
    assert linux.free_memory() == math.inf


def test_the_narrowest_control_group_limits_the_cores(linux):
    # A quota of 250 ms per 100 ms is 2.5 cores.
    linux.write_settings('outer', {'cpu.max': '250000 100000'})
    linux.write_settings('outer/inner', {'cpu.max': 'max 100000'})
    assert linux.granted_cores() == 2.5

    root = ''
    linux.write_settings(root, {'cpu.max': '150000 100000'})
    assert linux.granted_cores() == 1.5


def test_the_narrowest_control_group_limits_the_memory(linux):
    """The machine and both groups of a process, outer and outer/inner, limit its memory.

    The fixture `linux` is a directory, in which the test writes the files of Linux.
    """
    # 'max' is no limit, so only the 4 kB of the machine count.
    linux.meminfo.write_text('MemTotal: 9 kB\nMemAvailable: 4 kB\n')
    linux.write_settings('outer/inner', {'memory.max': 'max', 'memory.current': '10'})
    assert linux.free_memory() == 4 * 1024

    # The outer group has taken 2000 of 5000 bytes, so less than 4 kB are left.
    linux.write_settings('outer', {'memory.max': '5000', 'memory.current': '2000'})
    assert linux.free_memory() == 5000 - 2000

    # The kernel frees the 500 bytes of inactive cached files when memory is needed.
    linux.write_settings('outer/inner', {'memory.stat': 'anon 5'})
    linux.write_settings('outer', {'memory.stat': 'anon 7\ninactive_file 500'})
    assert linux.free_memory() == 5000 - 2000 + 500


@pytest.mark.parametrize(
    ('quota', 'cores'),
    [
        (math.inf, [2, 3, 4, 5, 6, 7, 8, 9]),
        (4.9, [2, 4, 6, 8]),
        (0.5, [2]),
        (100.0, [2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_a_quota_of_cores_takes_evenly_spaced_cores(monkeypatch, quota, cores):
    # A quota is rounded down to whole cores, but is at least one core.
    affinity = {9, 3, 4, 5, 6, 7, 8, 2}
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: affinity, raising=False)
    monkeypatch.setattr(machine, 'granted_cores', lambda: quota)
    assert machine.usable_cores() == cores


def test_items_are_split_evenly():
    assert machine.split_evenly(range(5), 3) == [[0], [1, 2], [3, 4]]


def set_visible_devices(monkeypatch, visible):
    """Sets CUDA_VISIBLE_DEVICES, or removes the variable for None."""
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)


def make_device_files(root, names):
    """Makes empty files dev/NAME below `root`."""
    (root / 'dev').mkdir()
    for name in names:
        path = root / 'dev' / name
        path.parent.mkdir(exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ('device_files', 'cuda_visible_devices', 'jax_platforms', 'expected'),
    [
        ([], None, None, []),
        (['nvidia0', 'nvidia1', 'nvidiactl'], None, None, ['0', '1']),
        (['nvidia0', 'nvidia1'], '1', None, ['1']),
        (['nvidia0', 'nvidia1'], '', None, []),
        (['nvidia0', 'nvidia1'], '-1', None, []),
        # Slurm sets this value for a job without GPUs.
        (['nvidia0', 'nvidia1'], 'NoDevFiles', None, []),
        (['nvidia0', 'accel0'], None, 'cpu', []),
        # Accelerators of another kind cannot be counted.
        (['accel0', 'accel1'], None, None, None),
        (['vfio/0'], None, 'tpu', None),
    ],
)
def test_accelerators_are_counted_from_device_files(
    device_files, cuda_visible_devices, jax_platforms, expected, tmp_path, monkeypatch
):
    set_visible_devices(monkeypatch, cuda_visible_devices)
    monkeypatch.setattr(machine.importlib.util, 'find_spec', lambda name: name == 'jax_plugins')
    make_device_files(tmp_path, device_files)

    assert machine.accelerators(jax_platforms, tmp_path) == expected


# Twice takes 64 MiB, writes to them and frees them. Prints the page faults of the second time.
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
def test_freed_memory_is_reused_without_page_faults():
    [(_, page_faults, _)] = wait_for_results([start_python(PRINT_PAGE_FAULTS)])
    assert int(page_faults) < 100


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'mallopt'), reason='malloc is not of glibc')
def test_a_variable_of_malloc_that_the_user_sets_is_respected():
    """With any such variable, here MALLOC_ARENA_MAX, freed memory is not kept for reuse."""
    process = start_python(PRINT_PAGE_FAULTS, MALLOC_ARENA_MAX='4')
    [(_, page_faults, _)] = wait_for_results([process])
    assert int(page_faults) >= 100


@pytest.mark.parametrize(
    ('device_files', 'cuda_visible_devices', 'expected'),
    [
        ([], None, 'no accelerator'),
        (['nvidia0', 'nvidiactl'], None, '1 NVIDIA GPU'),
        (['nvidia0', 'nvidia1'], '1', '2 NVIDIA GPUs'),
        (['nvidia0', 'nvidia1'], '', '2 NVIDIA GPUs, hidden by CUDA_VISIBLE_DEVICES='),
        (['nvidia0'], '-1', '1 NVIDIA GPU, hidden by CUDA_VISIBLE_DEVICES=-1'),
        (['accel0'], None, 'a TPU or a GPU of AMD'),
    ],
)
def test_the_accelerators_of_a_machine_are_described_in_words(
    device_files, cuda_visible_devices, expected, monkeypatch, tmp_path
):
    set_visible_devices(monkeypatch, cuda_visible_devices)
    make_device_files(tmp_path, device_files)

    assert machine.describe_accelerators(tmp_path) == expected

"""The cores and the memory that a process may use, whatever limits them."""

import math
import os

import pytest

from qkattn.jobs import cores


@pytest.fixture
def groups(tmp_path):
    """groups(path, **settings) -> writes the settings of the control group at `path`."""
    (tmp_path / 'own').write_text('0::/outer/inner\n')

    def write(path: str, **settings: str) -> None:
        directory = tmp_path / 'cgroup' / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in settings.items():
            (directory / name.replace('_max', '.max').replace('_current', '.current')).write_text(
                text
            )

    write('outer/inner')
    return write


def quota(tmp_path) -> float:
    return cores.quota(tmp_path / 'cgroup', tmp_path / 'own')


def test_the_narrowest_control_group_around_the_process_limits_its_cores(groups, tmp_path):
    assert quota(tmp_path) == math.inf
    groups('outer', cpu_max='250000 100000')
    groups('outer/inner', cpu_max='max 100000')
    assert quota(tmp_path) == 2.5
    groups('', cpu_max='150000 100000')
    assert quota(tmp_path) == 1.5
    for granted, cores_worth in (('500000', 1.5), ('50000', 0.5)):
        for name, text in (('quota', granted), ('period', '100000')):
            groups('cpu', **{f'cpu.cfs_{name}_us': text})
        assert quota(tmp_path) == cores_worth


def test_a_quota_leaves_as_many_cores_of_the_affinity(monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {9, 3, 4, 5, 6, 7, 8, 2}, raising=False)
    monkeypatch.setattr(cores, 'quota', lambda: math.inf)
    assert cores.usable() == [2, 3, 4, 5, 6, 7, 8, 9]
    for limit, left in ((4.9, [2, 4, 6, 8]), (0.5, [2]), (100.0, [2, 3, 4, 5, 6, 7, 8, 9])):
        monkeypatch.setattr(cores, 'quota', lambda limit=limit: limit)
        assert cores.usable() == left


def test_memory_is_what_the_machine_and_the_control_groups_leave(groups, tmp_path):
    def free() -> float:
        return cores.free_memory(tmp_path / 'cgroup', tmp_path / 'own', tmp_path / 'meminfo')

    assert free() == math.inf
    (tmp_path / 'meminfo').write_text('MemTotal: 9 kB\nMemAvailable: 4 kB\n')
    assert free() == 4096
    groups('outer/inner', memory_max='max', memory_current='10')
    groups('outer', memory_max='5000', memory_current='2000')
    assert free() == 3000


def test_cores_are_shared_by_neighbours():
    assert cores.shares([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert cores.shares(range(5), 3) == [[0], [1, 2], [3, 4]]
    assert cores.shares([7], 1) == [[7]]


@pytest.mark.parametrize(
    ('devices', 'visible', 'platforms', 'found'),
    [
        ((), None, None, []),
        (('nvidia0', 'nvidia1', 'nvidiactl'), None, None, ['0', '1']),
        (('nvidia0', 'nvidia1'), '1', None, ['1']),
        (('nvidia0', 'nvidia1'), '', None, []),
        (('nvidia0', 'accel0'), None, 'cpu', []),
        (('accel0', 'accel1'), None, None, None),
        (('vfio/0',), None, 'tpu', None),
    ],
)
def test_accelerators_are_found_without_opening_them(
    devices, visible, platforms, found, tmp_path, monkeypatch
):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    monkeypatch.setattr(cores.importlib.util, 'find_spec', lambda name: name == 'jax_plugins')
    for name in devices:
        (tmp_path / 'dev' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'dev' / name).touch()
    assert cores.accelerators(platforms, tmp_path) == found

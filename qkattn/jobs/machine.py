"""The CPU cores, accelerators and memory that this process may use.

Their limits are the machine, CPU affinity, and control groups. Needs only the standard library.
"""

import ctypes
import functools
import importlib.util
import itertools
import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

# Linux's directory of control groups.
GROUPS = Path('/sys/fs/cgroup')
# The file that lists the control groups of this process.
MEMBERSHIP = Path('/proc/self/cgroup')
# Device files of TPUs, and of GPUs of AMD.
_ACCELERATORS = ('dev/accel[0-9]*', 'dev/vfio/[0-9]*', 'dev/kfd')
# Parameters of mallopt, as in glibc's malloc.h.
_M_ARENA_MAX = -8
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Values to try in turn, because the largest valid value depends on the machine.
_LARGEST_MMAP_THRESHOLDS = (2**30, 2**25)


def usable_cores() -> list[int]:
    """Returns the ids of the CPU cores to use, limited by affinity and cgroup CPU quota.

    For example, 4 allowed cores and a quota of 2 give [0, 2].
    """
    if hasattr(os, 'sched_getaffinity'):
        allowed_cores = sorted(os.sched_getaffinity(0))
    else:
        allowed_cores = list(range(os.cpu_count() or 1))
    num_allowed = len(allowed_cores)
    quota = granted_cores()  # CPU time in cores, such as 1.5; may be infinite
    num_used = max(1, math.floor(min(num_allowed, quota)))
    # Evenly spaced positions in `allowed_cores`, such as 0 and 2 for 2 of 4 cores.
    positions = [index * num_allowed // num_used for index in range(num_used)]
    return [allowed_cores[position] for position in positions]


def split_evenly(items: Sequence, number: int) -> list[list]:
    """Splits `items` into `number` consecutive groups, whose sizes differ by at most one."""
    groups = []
    for index in range(number):
        start = index * len(items) // number
        end = (index + 1) * len(items) // number
        groups.append(list(items[start:end]))
    return groups


def granted_cores(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns the CPU quota of the control groups, in cores; infinity if unlimited."""
    quotas = [math.inf]
    for text in _control_group_values('cpu.max', groups, membership):
        time_text, _, period_text = text.partition(' ')  # '150000 100000' is 1.5 cores
        if time_text != 'max':
            quotas.append(int(time_text) / int(period_text))
    return min(quotas)


def free_memory(
    groups: Path = GROUPS, membership: Path = MEMBERSHIP, memory: Path = Path('/proc/meminfo')
) -> float:
    """Returns the free memory in bytes; infinity if it is unknown.

    The free memory is the minimum over the machine and the control groups of this process.
    """
    free_bytes = [math.inf]
    available = re.search(r'^MemAvailable:\s*(\d+)', _read_text(memory), re.MULTILINE)  # in KiB
    if available:
        free_bytes.append(1024 * int(available[1]))

    # Values of each control group, from the innermost group outwards.
    limits = _control_group_values('memory.max', groups, membership)
    usages = _control_group_values('memory.current', groups, membership)
    statistics = _control_group_values('memory.stat', groups, membership)
    for limit, used, stat in itertools.zip_longest(limits, usages, statistics, fillvalue=''):
        has_limit = limit not in ('', 'max')
        if not has_limit:
            continue
        free_in_group = int(limit) - int(used)
        # The used bytes include cached files, which the kernel can free.
        cached = re.search(r'^inactive_file (\d+)', stat, re.MULTILINE)
        if cached:
            free_in_group += int(cached[1])
        free_bytes.append(free_in_group)
    return min(free_bytes)


def cpu() -> str:
    """Returns the model of the processor."""
    name = re.search(r'^model name\s*:(.*)', _read_text(Path('/proc/cpuinfo')), re.MULTILINE)
    if name:
        return name[1].strip()
    return platform.processor() or platform.machine()


def split_visible_gpus(visible: str) -> list[str]:
    """Splits a value of CUDA_VISIBLE_DEVICES: '0,1' gives ['0', '1'], '' and '-1' give [].

    'NoDevFiles', which Slurm sets for jobs without GPUs, also gives [].
    """
    return [gpu for gpu in visible.split(',') if gpu not in ('', '-1', 'NoDevFiles')]


def accelerators(platforms: str | None, root: Path = Path('/')) -> list[str] | None:
    """Returns the NVIDIA GPUs that JAX may use, as entries of CUDA_VISIBLE_DEVICES.

    Args:
        platforms: The value of JAX_PLATFORMS; None allows all platforms.
        root: The directory that contains dev/, with the device files.

    Returns:
        The GPUs, such as ['0', '1']; [] without accelerators; None for TPUs and AMD GPUs.
    """
    if platforms == 'cpu':
        return []
    num_gpus = len(list(root.glob('dev/nvidia[0-9]*')))  # /dev/nvidia0, /dev/nvidia1, ...
    # JAX needs a plugin for CUDA, which is installed into the package jax_plugins.
    has_cuda_in_jax = bool(importlib.util.find_spec('jax_plugins'))
    if num_gpus and has_cuda_in_jax:
        visible = os.environ.get('CUDA_VISIBLE_DEVICES')
        if visible is None:  # all GPUs are visible
            return [str(index) for index in range(num_gpus)]
        return split_visible_gpus(visible)
    return None if _has_other_accelerators(root) else []


def describe_accelerators(root: Path = Path('/')) -> str:
    """Returns the accelerators of this machine in words, even if JAX cannot use them."""
    num_gpus = len(list(root.glob('dev/nvidia[0-9]*')))
    if num_gpus == 0:
        return 'a TPU or a GPU of AMD' if _has_other_accelerators(root) else 'no accelerator'

    text = '1 NVIDIA GPU' if num_gpus == 1 else f'{num_gpus} NVIDIA GPUs'
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    are_hidden = visible is not None and not split_visible_gpus(visible)
    if are_hidden:
        text += f', hidden by CUDA_VISIBLE_DEVICES={visible}'
    return text


def _has_other_accelerators(root: Path) -> bool:
    """Whether the machine has a TPU or a GPU of AMD."""
    return any(list(root.glob(pattern)) for pattern in _ACCELERATORS)


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc's allocator keep freed memory for reuse, instead of returning it to the system.

    XLA's CPU backend allocates temporaries anew for every call. If the system provides the memory,
    it clears each page, which takes as long as the computation of a small model.

    Call this function before other threads start. It does nothing without glibc, or if the user has
    set environment variables of glibc.
    """
    has_malloc_variable = any(name.startswith('MALLOC_') for name in os.environ)
    is_set_by_user = has_malloc_variable or 'GLIBC_TUNABLES' in os.environ
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)  # None without glibc
    if mallopt is None or is_set_by_user:
        return
    # All threads share one arena, which keeps up to 2 GiB of free memory at its end.
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    # Only blocks below this threshold are in the arena.
    for threshold in _LARGEST_MMAP_THRESHOLDS:
        is_accepted = mallopt(_M_MMAP_THRESHOLD, threshold)
        if is_accepted:
            break


def _control_group_values(name: str, groups: Path, membership: Path) -> Iterator[str]:
    """Yields the values of a setting, such as 'cpu.max', in the control groups of this process.

    The order is from the innermost group outwards. Groups without the setting are skipped.
    """
    for line in _read_text(membership).splitlines():
        hierarchy, _, path = line.split(':', 2)  # '0::/user.slice/job'
        if hierarchy != '0':  # cgroup version 1
            continue
        innermost_group = groups / path.lstrip('/')
        for group in (innermost_group, *innermost_group.parents):
            if not group.is_relative_to(groups):
                break
            text = _read_text(group / name)
            if text:
                yield text


def _read_text(path: Path) -> str:
    """Returns the content of a file, or '' if it cannot be read."""
    try:
        return path.read_text(encoding='utf-8', errors='replace').strip()
    except OSError:
        return ''

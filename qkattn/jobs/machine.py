"""The cores, accelerators and memory that this process may use.

The machine, the process's affinity and its control groups limit them. Standard library only.
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

# The directory in which Linux shows the limits of control groups.
GROUPS = Path('/sys/fs/cgroup')
# The file that lists the control groups of this process.
MEMBERSHIP = Path('/proc/self/cgroup')
# Device files of TPUs, and of GPUs of AMD.
_ACCELERATORS = ('dev/accel[0-9]*', 'dev/vfio/[0-9]*', 'dev/kfd')
# Parameters of mallopt, as in glibc's malloc.h.
_M_ARENA_MAX = -8
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Thresholds to try in turn: glibc refuses one above its limit, which depends on the machine.
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
    evenly_spaced = [index * num_allowed // num_used for index in range(num_used)]
    return [allowed_cores[position] for position in evenly_spaced]


def split_evenly(items: Sequence, number: int) -> list[list]:
    """Splits `items` into `number` groups of neighbours, whose sizes differ by at most one."""
    groups = []
    for index in range(number):
        start = index * len(items) // number
        end = (index + 1) * len(items) // number
        groups.append(list(items[start:end]))
    return groups


def granted_cores(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns the processor time that the control groups grant, in cores; infinity if unlimited."""
    limits = [math.inf]
    for text in _control_group_values('cpu.max', groups, membership):
        granted, _, period = text.partition(' ')
        if granted != 'max':
            limits.append(int(granted) / int(period))
    return min(limits)


def free_memory(
    groups: Path = GROUPS, membership: Path = MEMBERSHIP, memory: Path = Path('/proc/meminfo')
) -> float:
    """Returns the bytes of memory that processes may still take; infinity if that is unknown.

    It is the least of what the machine and each control group have left.
    """
    candidates = [math.inf]
    # The machine has a line 'MemAvailable:   1234 kB'.
    available = re.search(r'^MemAvailable:\s*(\d+)', _read_text(memory), re.MULTILINE)
    if available:
        candidates.append(1024 * int(available[1]))

    # Each control group has three files: the limit in bytes, the bytes in use, and statistics.
    limits = _control_group_values('memory.max', groups, membership)
    usages = _control_group_values('memory.current', groups, membership)
    statistics = _control_group_values('memory.stat', groups, membership)
    for limit, used, stat in itertools.zip_longest(limits, usages, statistics, fillvalue=''):
        has_limit = limit not in ('', 'max')
        if not has_limit:
            continue
        left = int(limit) - int(used)
        # The bytes in use include cached files, which the kernel gives back. The statistics count
        # these bytes in a line 'inactive_file 1234'.
        cached = re.search(r'^inactive_file (\d+)', stat, re.MULTILINE)
        if cached:
            left += int(cached[1])
        candidates.append(left)
    return min(candidates)


def cpu() -> str:
    """Returns the model of the processor."""
    name = re.search(r'^model name\s*:(.*)', _read_text(Path('/proc/cpuinfo')), re.MULTILINE)
    if name:
        return name[1].strip()
    return platform.processor() or platform.machine()


def split_visible_gpus(visible: str) -> list[str]:
    """Splits a value of CUDA_VISIBLE_DEVICES into the GPUs that it names: '0,1' gives ['0', '1'].

    '' and '-1' name no GPU.
    """
    return [gpu for gpu in visible.split(',') if gpu not in ('', '-1')]


def accelerators(platforms: str | None, root: Path = Path('/')) -> list[str] | None:
    """Returns the NVIDIA GPUs that JAX may use, as entries of CUDA_VISIBLE_DEVICES: ['0', '1'].

    The list is empty without accelerators. None stands for accelerators of another kind: one
    process uses all of them.

    Args:
      platforms: the value of JAX_PLATFORMS; None allows all platforms.
      root: the root directory, below which the device files are.
    """
    if platforms == 'cpu':
        return []
    num_gpus = len(list(root.glob('dev/nvidia[0-9]*')))  # /dev/nvidia0, /dev/nvidia1, ...
    # CUDA support of jax is a plugin, which is installed into this package.
    has_cuda_in_jax = bool(importlib.util.find_spec('jax_plugins'))
    if num_gpus and has_cuda_in_jax:
        visible = os.environ.get('CUDA_VISIBLE_DEVICES')
        if visible is None:  # all GPUs are visible
            return [str(index) for index in range(num_gpus)]
        return split_visible_gpus(visible)
    return None if _has_other_accelerators(root) else []


def describe_accelerators(root: Path = Path('/')) -> str:
    """Returns the accelerators of this machine in words, whether or not JAX can use them."""
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
    """Makes glibc keep memory that is freed, so that the process can use it again at once.

    By default glibc returns large blocks to the system. XLA's CPU backend allocates temporaries
    anew for every call, and the system must then clear their pages. For a small model this takes as
    long as the computation.

    Call it before other threads start, since glibc gives each thread memory of its own, an arena.
    It does nothing without glibc, or if the user has set variables of glibc.
    """
    has_malloc_variable = any(name.startswith('MALLOC_') for name in os.environ)
    is_set_by_user = has_malloc_variable or 'GLIBC_TUNABLES' in os.environ
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)  # None without glibc
    if mallopt is None or is_set_by_user:
        return
    # All threads share one arena. It keeps up to 2 GiB of freed memory at its end.
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    # Blocks below this threshold lie in the arena. Set the largest one that glibc accepts.
    for threshold in _LARGEST_MMAP_THRESHOLDS:
        is_accepted = mallopt(_M_MMAP_THRESHOLD, threshold)
        if is_accepted:
            break


def _control_group_values(name: str, groups: Path, membership: Path) -> Iterator[str]:
    """Yields the values of a setting, such as 'cpu.max', in the control groups of this process.

    The process's own group comes first, then the groups around it. Groups without the setting are
    skipped.
    """
    for line in _read_text(membership).splitlines():
        number, _, path = line.split(':', 2)  # '0::/user.slice/job'
        if number != '0':  # a group of cgroup version 1
            continue
        group = groups / path.lstrip('/')
        for parent in (group, *group.parents):
            if not parent.is_relative_to(groups):
                break
            text = _read_text(parent / name)
            if text:
                yield text


def _read_text(path: Path) -> str:
    """Returns the content of a file, or '' if it cannot be read."""
    try:
        return path.read_text(encoding='utf-8', errors='replace').strip()
    except OSError:
        return ''

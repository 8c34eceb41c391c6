"""The cores, accelerators and memory that the machine, affinity and control groups leave.

Standard library only.
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

# Where Linux shows the limits of control groups, and the groups that this process is in.
GROUPS = Path('/sys/fs/cgroup')
MEMBERSHIP = Path('/proc/self/cgroup')
# Devices of TPUs, and of GPUs of AMD.
_ACCELERATORS = ('dev/accel[0-9]*', 'dev/vfio/[0-9]*', 'dev/kfd')
# Parameters of mallopt, as in glibc's malloc.h.
_M_ARENA_MAX = -8
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# glibc refuses a threshold above its limit, which depends on the machine.
_LARGEST_MMAP_THRESHOLDS = (2**30, 2**25)


def usable_cores() -> list[int]:
    """The cores by number: as many as the affinity and the quota of the control groups leave."""
    affinity = getattr(os, 'sched_getaffinity', lambda _: range(os.cpu_count() or 1))
    cores = sorted(affinity(0))
    number = max(1, math.floor(min(len(cores), quota())))
    return [cores[index * len(cores) // number] for index in range(number)]


def shares(items: Sequence, number: int) -> list[list]:
    """`items` in `number` groups of neighbours, as equal as they can be."""
    ends = [i * len(items) // number for i in range(number + 1)]
    return [list(items[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def quota(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float:
    """Cores' worth of time that the control groups grant; infinity without a limit."""
    limits = [math.inf]
    for text in _settings('cpu.max', groups, membership):
        granted, _, period = text.partition(' ')
        if granted != 'max':
            limits.append(int(granted) / int(period))
    return min(limits)


def free_memory(
    groups: Path = GROUPS, membership: Path = MEMBERSHIP, memory: Path = Path('/proc/meminfo')
) -> float:
    """Bytes that processes may still take; infinity where that is unknown."""
    free = [math.inf]
    available = re.search(r'^MemAvailable:\s*(\d+)', _text(memory), re.MULTILINE)
    if available:  # in KiB
        free.append(1024 * int(available[1]))
    limits = _settings('memory.max', groups, membership)
    usages = _settings('memory.current', groups, membership)
    statistics = _settings('memory.stat', groups, membership)
    for limit, used, stat in itertools.zip_longest(limits, usages, statistics, fillvalue=''):
        if limit not in ('', 'max'):
            group_free = int(limit) - int(used)
            cached = re.search(r'^inactive_file (\d+)', stat, re.MULTILINE)
            if cached:  # pages of files, which the kernel gives back
                group_free += int(cached[1])
            free.append(group_free)
    return min(free)


def cpu() -> str:
    """The model of the processor."""
    name = re.search(r'^model name\s*:(.*)', _text(Path('/proc/cpuinfo')), re.MULTILINE)
    if name:
        return name[1].strip()
    return platform.processor() or platform.machine()


def listed(visible: str) -> list[str]:
    """The GPUs that a CUDA_VISIBLE_DEVICES names; '' and '-1' hide all."""
    return [gpu for gpu in visible.split(',') if gpu not in ('', '-1')]


def accelerators(platforms: str | None, root: Path = Path('/')) -> list[str] | None:
    """The GPUs that CUDA may use; [] on a CPU; None for others, which one process drives together.

    `platforms` are those of JAX_PLATFORMS; None takes whatever there is.
    """
    if platforms == 'cpu':
        return []
    gpus = list(root.glob('dev/nvidia[0-9]*'))
    if gpus and importlib.util.find_spec('jax_plugins'):  # jax with CUDA
        visible = os.environ.get('CUDA_VISIBLE_DEVICES')
        if visible is None:
            return [str(index) for index in range(len(gpus))]
        return listed(visible)
    return None if _has_other_accelerators(root) else []


def described(root: Path = Path('/')) -> str:
    """The accelerators of this machine for people, whether or not JAX can use them."""
    gpus = len(list(root.glob('dev/nvidia[0-9]*')))
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if gpus:
        text = '1 NVIDIA GPU' if gpus == 1 else f'{gpus} NVIDIA GPUs'
        hidden = visible is not None and not listed(visible)
        return f'{text}, hidden by CUDA_VISIBLE_DEVICES={visible}' if hidden else text
    if _has_other_accelerators(root):
        return 'a TPU or a GPU of AMD'
    return 'no accelerator'


def _has_other_accelerators(root: Path) -> bool:
    """Whether there is a device of a TPU, or of a GPU of AMD."""
    return any(list(root.glob(pattern)) for pattern in _ACCELERATORS)


@functools.cache
def keep_freed_memory() -> None:
    """Memory that is freed stays with this process, which takes it again without page faults.

    By default glibc returns large blocks at once, and XLA's CPU backend takes temporaries anew for
    every call: clearing their pages takes as long as a small model computes. To be called before
    any thread has an arena of its own; does nothing without glibc, or if its variables are set.
    """
    is_set_by_user = 'GLIBC_TUNABLES' in os.environ or any(
        name.startswith('MALLOC_') for name in os.environ
    )
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is None or is_set_by_user:
        return
    # One arena for all threads, which keeps freed memory and takes large blocks, too.
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    for threshold in _LARGEST_MMAP_THRESHOLDS:
        if mallopt(_M_MMAP_THRESHOLD, threshold):
            break


def _settings(name: str, groups: Path, membership: Path) -> Iterator[str]:
    """The values of a setting in this process's control group and in those around it, inmost first.

    A group that does not have the setting is passed over.
    """
    for line in _text(membership).splitlines():
        number, _, path = line.split(':', 2)  # as in '0::/user.slice/job'
        if number == '0':
            group = groups / path.lstrip('/')
            for parent in (group, *group.parents):
                text = _text(parent / name) if parent.is_relative_to(groups) else ''
                if text:
                    yield text


def _text(path: Path) -> str:
    """The content of a file; '' where it cannot be read."""
    try:
        return path.read_text(encoding='utf-8', errors='replace').strip()
    except OSError:
        return ''

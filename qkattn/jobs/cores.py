"""The cores, accelerators and memory that this process may use. Standard library only.

Each limit is the narrowest of the machine's, of this process's affinity, and of the control groups
that it runs in.
"""

import importlib.util
import math
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

GROUPS = Path('/sys/fs/cgroup')
_ACCELERATORS = ('dev/accel[0-9]*', 'dev/vfio/[0-9]*', 'dev/kfd')  # TPUs, and GPUs of AMD


def usable() -> list[int]:
    """The cores by number: as many as the affinity and the quota of the control groups leave."""
    if hasattr(os, 'sched_getaffinity'):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    wanted = max(1, math.floor(min(len(cores), quota())))
    return [cores[place * len(cores) // wanted] for place in range(wanted)]


def shares(items: Sequence, number: int) -> list[list]:
    """`items` in `number` groups of neighbours, as equal as they can be."""
    ends = [place * len(items) // number for place in range(number + 1)]
    return [list(items[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def quota(groups: Path = GROUPS, own: Path = Path('/proc/self/cgroup')) -> float:
    """Cores' worth of time that the control groups grant; infinity without a limit."""
    limits = [math.inf]
    for text in _settings('cpu.max', groups, own):
        granted, _, period = text.partition(' ')
        if granted != 'max':
            limits.append(int(granted) / int(period))
    first = [_text(groups / 'cpu' / f'cpu.cfs_{name}_us') for name in ('quota', 'period')]
    if all(first) and int(first[0]) > 0:  # the first version of control groups
        limits.append(int(first[0]) / int(first[1]))
    return min(limits)


def free_memory(
    groups: Path = GROUPS,
    own: Path = Path('/proc/self/cgroup'),
    memory: Path = Path('/proc/meminfo'),
) -> float:
    """Bytes that processes may still take; infinity where that is unknown."""
    free = [math.inf]
    for line in _text(memory).splitlines():
        if line.startswith('MemAvailable:'):
            free.append(1024 * int(line.split()[1]))
    limits = _settings('memory.max', groups, own), _settings('memory.current', groups, own)
    for limit, used in zip(*limits, strict=False):
        if limit != 'max':
            free.append(int(limit) - int(used))
    return min(free)


def cpu() -> str:
    """The model of the processor."""
    for line in _text(Path('/proc/cpuinfo')).splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return platform.processor() or platform.machine()


def accelerators(platforms: str | None, root: Path = Path('/')) -> list[str] | None:
    """The GPUs that CUDA may use; [] on a CPU; None for others, which one process drives together.

    Args:
      platforms: of jax, as in JAX_PLATFORMS; None takes whatever there is.
    """
    if platforms == 'cpu':
        return []
    if importlib.util.find_spec('jax_plugins') and list(root.glob('dev/nvidia[0-9]*')):
        visible = os.environ.get('CUDA_VISIBLE_DEVICES')
        names = sorted((path.name for path in root.glob('dev/nvidia[0-9]*')), key=_number)
        every = [str(place) for place in range(len(names))]
        return every if visible is None else [name for name in visible.split(',') if name]
    return None if any(list(root.glob(pattern)) for pattern in _ACCELERATORS) else []


def _number(name: str) -> int:
    return int(name.removeprefix('nvidia'))


def _settings(name: str, groups: Path, own: Path) -> Iterator[str]:
    """A setting of this process's control group, and of those around it, where they have it."""
    for line in _text(own).splitlines():
        number, _, path = line.split(':', 2)
        if number == '0':
            here = groups / path.lstrip('/')
            for group in (here, *here.parents):
                if group.is_relative_to(groups) and (text := _text(group / name)):
                    yield text


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ''

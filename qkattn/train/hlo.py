"""What a compiled program does per device, read from its HLO: collectives, FLOPs, bytes of HBM.

Loops are counted as often as they run, which XLA's own cost analysis does not do.
"""

import collections
import dataclasses
import math
import re

import numpy as np
from jax._src.lib import _jax, hlo  # they have no public names
from jax.extend.backend import get_backend

KINDS = (
    *('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all'),
    *('collective-permute', 'collective-broadcast'),
)

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$')
_CALLED = re.compile(r'(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)')
_BRANCHES = re.compile(r'(?:branch_computations|called_computations)=\{([^}]*)\}')
_LOOP = re.compile(r'condition=%?([\w.-]+), body=%?([\w.-]+)')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r'\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]')
_MESH = re.compile(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*?)\}')
_IOTA = re.compile(r'\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one device.

    Attributes:
      kind: one of KINDS.
      groups: devices that take part together, one row per group.
      size: bytes of the array that a group reduces or exchanges: all of it, whole.
      times: how often it runs.
    """

    kind: str
    groups: np.ndarray
    size: int
    times: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What a program does on one device.

    Attributes:
      flops: of all operations.
      bytes_accessed: operands and results of every kernel, each moved once.
      unknown_loops: loops counted once, since their number of iterations is not known.
    """

    collectives: tuple[Collective, ...]
    flops: float
    bytes_accessed: float
    unknown_loops: int


@dataclasses.dataclass(frozen=True)
class _Loop:
    within: str
    body: str
    trips: int


def read(text: str, devices: int) -> Work:
    """Reads `Compiled.as_text()` of a program over so many devices."""
    computations, entry = _computations(text)
    # Callees stand before their callers.
    times: dict[str, int] = collections.Counter({entry: 1})
    loops, found, unknown = [], [], 0
    for name in reversed(computations):
        for line in computations[name] if times[name] else ():
            instruction = _INSTRUCTION.match(line)
            if instruction is None:
                continue
            opcode = instruction[3]
            if opcode == 'while':
                ((condition, body),) = _LOOP.findall(line)
                trips = _trips(line, computations[condition])
                unknown += trips is None
                loops.append(_Loop(name, body, trips or 1))
                times[body] += times[name] * (trips or 1)
            elif opcode.removesuffix('-start') in KINDS:
                if _runs_here(line, instruction[1], computations[name]):
                    found.append(_collective(line, instruction, name, times[name], devices))
            elif opcode not in ('async-update', 'async-done'):
                called = _CALLED.findall(line)
                for names in _BRANCHES.findall(line):
                    called += [n.strip().lstrip('%') for n in names.split(',')]
                for callee in called:
                    times[callee] += times[name]
    costs = np.array(_costs(text, entry))
    for loop in loops:
        costs += times[loop.within] * (loop.trips - 1) * np.array(_costs(text, loop.body))
    return Work(tuple(found), float(costs[0]), float(costs[1]), unknown)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by name in their order, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, lines = '', []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _trips(line: str, condition: list[str]) -> int | None:
    """Iterations of a loop: as XLA says, or the one bound of its counter, which starts at 0."""
    if known := _TRIPS.search(line):
        return int(known[1])
    bounds = set(re.findall(r' [su]\d+\[\][^ ]* constant\((\d+)\)', '\n'.join(condition)))
    return int(bounds.pop()) if len(bounds) == 1 else None


def _runs_here(line: str, name: str, computation: list[str]) -> bool:
    """Whether this is a collective's start; a TPU's that overlaps with others stands thrice."""
    if 'chain_id=' not in line:
        return True
    started = re.compile(rf'\(%?{re.escape(name)}\), custom_call_target="AsyncCollectiveStart"')
    return any(started.search(other) for other in computation)


def _collective(
    line: str, instruction: re.Match, computation: str, times: int, devices: int
) -> Collective:
    kind, started = instruction[3].removesuffix('-start'), instruction[3].endswith('-start')
    groups = _groups(line, devices)
    size = _bytes(instruction[2])
    n = groups.shape[1]
    if kind == 'reduce-scatter':
        size *= n
    elif started and kind == 'all-gather':  # its result is (operands, results)
        size = size * n // (n + 1)
    elif started and kind == 'collective-permute':
        size //= 2
    elif kind == 'all-reduce' and computation.startswith('all-reduce-scatter'):
        kind = 'reduce-scatter'  # TPUs fuse the sum with the slice that is kept
    return Collective(kind, groups, size, times)


def _bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(
        math.prod(map(int, filter(None, dimensions.split(',')))) * int(bits or 8) // 8
        for _, bits, dimensions in _ARRAY.findall(shape)
    )


def _groups(line: str, devices: int) -> np.ndarray:
    """The ids [groups, members] of a collective, in any of HLO's notations."""
    if pairs := re.search(r'source_target_pairs=\{(.*?\})\}', line):
        return _rows(pairs[1])
    if mesh := _MESH.search(line):
        return _groups_of_mesh(*mesh.groups())
    text = line.partition('replica_groups=')[2]
    if text.startswith('{{'):
        return _rows(text[1 : text.index('}}') + 1])
    if (iota := _IOTA.match(text)) and iota[2]:
        return _iota(iota[2], iota[3]).reshape(_ints(iota[1]))
    return np.arange(devices)[None]


def _groups_of_mesh(sizes: str, order: str | None, axes: str) -> np.ndarray:
    """Groups as axes of a mesh, as in mesh['a'=4,'b'=2] {'a'}; 'a':(2)2 is a part of an axis."""
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    dims, member = [], []
    parts = {name: (int(p), int(s)) for name, p, s in re.findall(r"'([^']+)':\((\d+)\)(\d+)", axes)}
    whole = re.findall(r"'([^']+)'(?!:)", axes)
    for name, size in mesh.items():
        before, own = parts.get(name, (1, size))
        dims += [before, own, size // before // own]
        member += [False, name in whole or name in parts, False]
    iota = _IOTA.match(order) if order else None
    if iota:
        ids = _iota(iota[1], iota[3])
    else:
        ids = np.array(_ints(order)) if order else np.arange(math.prod(dims))
    last = [axis for axis, inside in enumerate(member) if inside]
    first = [axis for axis, inside in enumerate(member) if not inside]
    size = math.prod(dims[axis] for axis in last)
    return ids.reshape(dims).transpose(first + last).reshape(-1, size)


def _iota(dimensions: str, permutation: str | None) -> np.ndarray:
    dims = _ints(dimensions)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(_ints(permutation)) if permutation else ids).reshape(-1)


def _rows(text: str) -> np.ndarray:
    return np.array([_ints(row) for row in re.findall(r'\{([\d,]+)\}', text)])


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', text)]


def _costs(text: str, entry: str) -> tuple[float, float]:
    """FLOPs and bytes accessed of one computation by XLA's cost analysis, loops counted once."""
    text = re.sub(r'^HloModule .*', 'HloModule part', text, count=1)
    text = re.sub(r'^ENTRY ', '', text, flags=re.MULTILINE)
    text = re.sub(rf'^(%?{re.escape(entry)} \()', r'ENTRY \1', text, count=1, flags=re.MULTILINE)
    module = hlo.hlo_module_from_text(text)
    costs = _jax.hlo_module_cost_analysis(get_backend('cpu'), module)
    return costs.get('flops', 0.0), costs.get('bytes accessed', 0.0)

"""Names of pods, and what their chips hold and compute, as their makers publish it."""

import dataclasses
import difflib
import functools
import math
import re

from qkattn.errors import ConfigError

GB, GIB = 10**9, 2**30
_TPU, _GPU = 'https://docs.cloud.google.com/tpu/docs/', 'https://www.nvidia.com/en-us/data-center/'


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator, and the pods that it comes in.

    Attributes:
      kind: a part of JAX's device kind.
      hbm: bytes.
      flops: dense bf16 FLOP/s.
      source: where this is published.
      sides: dimensions of the torus of TPUs; 0 for GPUs, whose pods are hosts x GPUs.
      most: chips in the largest slice of TPUs, or hosts of GPUs.
      devices: JAX devices per chip.
    """

    name: str
    kind: str
    hbm: int
    flops: float
    source: str
    sides: int = 0
    most: int = 4096
    devices: int = 1

    @property
    def cores(self) -> int:
        """What the name of a slice of TPUs counts per chip."""
        return 2 if self.sides == 3 else 1


V4 = Chip('v4', 'TPU v4', 32 * GIB, 275e12, f'{_TPU}v4', sides=3)
V5E = Chip('v5e', 'TPU v5 lite', 16 * GIB, 197e12, f'{_TPU}v5e', sides=2, most=256)
V5P = Chip('v5p', 'TPU v5', 95 * GIB, 459e12, f'{_TPU}v5p', sides=3, most=6144)
V6E = Chip('v6e', 'TPU v6 lite', 32 * GIB, 918e12, f'{_TPU}v6e', sides=2, most=256)
TPU7X = Chip('tpu7x', 'TPU7x', 192 * GIB, 2307e12, f'{_TPU}tpu7x', sides=3, most=9216, devices=2)
A100 = Chip('A100', 'A100-SXM4-40', 40 * GB, 312e12, f'{_GPU}a100')
A100_80 = Chip('A100 80GB', 'A100-SXM4-80', 80 * GB, 312e12, f'{_GPU}a100')
H100 = Chip('H100', 'H100', 80 * GB, 989e12, f'{_GPU}h100')
H200 = Chip('H200', 'H200', 141 * GB, 989e12, f'{_GPU}h200')
B200 = Chip('B200', 'B200', 180 * GB, 2250e12, f'{_GPU}dgx-b200')
_NAMES = {
    V4: ('v4',),
    V5E: ('v5e', 'v5litepod'),
    V5P: ('v5p',),
    V6E: ('v6e',),
    TPU7X: ('tpu7x',),
    A100: ('a2', 'p4d'),
    A100_80: ('a2ultra', 'p4de'),
    H100: ('a3', 'a3mega', 'p5', 'h100'),
    H200: ('a3ultra', 'p5en', 'h200'),
    B200: ('a4', 'p6', 'b200'),
}
CHIPS = {name: chip for chip, names in _NAMES.items() for name in names}
"""The chips by the first part of a pod's name."""

_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclasses.dataclass(frozen=True)
class Pod:
    """A named topology.

    Attributes:
      shape: chips along each side of the torus, or (hosts, GPUs per host).
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def per_host(self) -> int:
        """Chips of a host."""
        if not self.chip.sides:
            return self.shape[1]
        single = 8 if self.chip.sides == 2 else 4
        return self.chips if self.chips <= single else 4

    @property
    def hosts(self) -> int:
        return self.chips // self.per_host


def pod_of(name: str) -> Pod:
    """The pod of a name, such as v5p-64 (a slice of 64 TensorCores), v5p-2x4x4 or a3-16x8.

    Raises:
      ConfigError: an unknown name, or a size that does not exist.
    """
    kind, _, size = name.lower().partition('-')
    if kind not in CHIPS or not re.fullmatch(r'\d+(x\d+)*', size):
        near = difflib.get_close_matches(kind, CHIPS, n=1, cutoff=0.5)
        raise ConfigError(
            f'topology {name!r} is unknown{f", did you mean {near[0]}?" if near else ";"} known '
            'are slices of TPUs by number or shape, as in v5p-64 and v5p-2x4x4, and hosts x GPUs, '
            f'as in a3-16x8, of {", ".join(CHIPS)}'
        )
    chip, sizes = CHIPS[kind], tuple(map(int, size.split('x')))
    if not chip.sides:
        if len(sizes) != 2 or not 1 <= sizes[0] <= chip.most or sizes[1] not in (1, 2, 4, 8):
            raise ConfigError(
                f'topology {name!r} must be hosts x GPUs of a host, as in {kind}-16x8: '
                f'1 to {chip.most:,} hosts of 1, 2, 4 or 8 GPUs'
            )
        return Pod(name, chip, sizes)
    counts = {shape: math.prod(shape) * chip.cores for shape in _shapes(chip)}
    for shape, count in counts.items():
        if sizes == (count,) or sorted(sizes) == sorted(shape):
            return Pod(name, chip, shape)
    wanted = sizes[0] if len(sizes) == 1 else math.prod(sizes) * chip.cores
    near_count = min(counts.values(), key=lambda count: abs(count - wanted))
    raise ConfigError(
        f'topology {name!r} does not exist: names of {kind} count '
        f'{"TensorCores, 2 per chip" if chip.cores == 2 else "chips"}; the closest slice is '
        f'{kind}-{near_count}'
    )


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a JAX device kind; None for a CPU and what the table lacks."""
    fitting = [chip for chip in _NAMES if chip.kind in device_kind]
    return max(fitting, key=lambda chip: len(chip.kind), default=None)


@functools.cache
def _shapes(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """The shapes of slices of a TPU, by size; of those of equal size the compact ones first."""
    if chip.sides == 2:
        return _SQUARES
    cubes = chip.most // 64
    tori = [
        (4 * a, 4 * b, 4 * c)
        for a in range(1, cubes + 1)
        for b in range(a, cubes // a + 1)
        for c in range(b, cubes // (a * b) + 1)
    ]
    return (*_BELOW_A_CUBE, *sorted(tori, key=lambda shape: (math.prod(shape), sum(shape))))

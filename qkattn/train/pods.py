"""Chips, pods of them and the names that users know, with what their makers publish."""

import contextlib
import dataclasses
import difflib
import itertools
import math
import re

from qkattn.errors import ConfigError

GB, GIB = 10**9, 2**30
_TPU, _GPU = 'https://docs.cloud.google.com/tpu/docs/', 'https://www.nvidia.com/en-us/data-center/'
_GCE = 'https://docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth'
_EC2 = 'https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html'


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator.

    Attributes:
      name: as in names of pods, or of the GPU.
      kind: how JAX's device kind begins or what it contains.
      hbm: bytes.
      flops: dense bf16 FLOP/s.
      bandwidth: of HBM, bytes/s.
      link: bytes/s that the chip sends over all its links to other chips (ICI, NVLink), half of
        the published bidirectional figure.
      source: where this is published.
      devices: JAX devices per chip.
      float32: rate of float32 matrix products over `flops`, at JAX's default precision (bf16
        passes on TPUs, TF32 on GPUs).
    """

    name: str
    kind: str
    hbm: int
    flops: float
    bandwidth: float
    link: float
    source: str
    devices: int = 1
    float32: float = 1.0


@dataclasses.dataclass(frozen=True)
class Family:
    """Pods of one chip.

    Attributes:
      per_host: chips of a host; of TPUs, in slices of several hosts.
      network: bytes/s per chip between hosts; None where the links of the chip span the pod.
      sides: dimensions of the torus of TPUs; 0 for GPUs, whose names are hosts x GPUs.
      most: chips in the largest slice, or hosts.
      cores: what a TPU's name counts per chip.
      source: of the network, or of the shapes.
    """

    chip: Chip
    per_host: int
    network: float | None
    sides: int
    most: int
    cores: int
    source: str


V4 = Chip(
    'v4',
    'TPU v4',
    32 * GIB,
    275e12,
    1.2e12,
    300e9,
    f'{_TPU}v4; links: Jouppi et al. 2023, arXiv:2304.01433, table 4',
)
V5E = Chip('v5e', 'TPU v5 lite', 16 * GIB, 197e12, 819e9, 200e9, f'{_TPU}v5e')
V5P = Chip('v5p', 'TPU v5', 95 * GIB, 459e12, 2.765e12, 600e9, f'{_TPU}v5p')
V6E = Chip('v6e', 'TPU v6 lite', 32 * GIB, 918e12, 1.638e12, 400e9, f'{_TPU}v6e')
TPU7X = Chip('tpu7x', 'TPU7x', 192 * GIB, 2307e12, 7.38e12, 600e9, f'{_TPU}tpu7x', devices=2)
A100 = Chip('A100', 'A100-SXM4-40', 40 * GB, 312e12, 1.555e12, 300e9, f'{_GPU}a100', float32=0.5)
A100_80 = dataclasses.replace(
    A100, name='A100 80GB', kind='A100-SXM4-80', hbm=80 * GB, bandwidth=2.039e12
)
H100 = Chip('H100', 'H100', 80 * GB, 989e12, 3.35e12, 450e9, f'{_GPU}h100', float32=0.5)
H200 = Chip('H200', 'H200', 141 * GB, 989e12, 4.8e12, 450e9, f'{_GPU}h200', float32=0.5)
B200 = Chip('B200', 'B200', 180 * GB, 2250e12, 8e12, 900e9, f'{_GPU}dgx-b200', float32=0.5)
CHIPS = (V4, V5E, V5P, V6E, TPU7X, A100, A100_80, H100, H200, B200)


def _tpu(chip: Chip, sides: int, most: int) -> Family:
    cores = 2 if sides == 3 else 1
    return Family(chip, 4, None, sides, most, cores, chip.source)


def _gpu(chip: Chip, gigabits: float, source: str, per_host: int = 8) -> Family:
    """GPUs in hosts whose network cards for the GPUs have so many gigabits/s together."""
    return Family(chip, per_host, gigabits * 1e9 / 8 / per_host, 0, 4096, 1, source)


FAMILIES = {
    'v4': _tpu(V4, 3, 4096),
    'v5e': _tpu(V5E, 2, 256),
    'v5litepod': _tpu(V5E, 2, 256),
    'v5p': _tpu(V5P, 3, 6144),
    'v6e': _tpu(V6E, 2, 256),
    'tpu7x': _tpu(TPU7X, 3, 9216),
    'a2': _gpu(A100, 100, _GCE),
    'a2ultra': _gpu(A100_80, 100, _GCE),
    'a3': _gpu(H100, 800, _GCE),
    'a3mega': _gpu(H100, 1600, _GCE),
    'a3ultra': _gpu(H200, 3200, _GCE),
    'a4': _gpu(B200, 3200, _GCE),
    'p4d': _gpu(A100, 400, _EC2),
    'p4de': _gpu(A100_80, 400, _EC2),
    'p5': _gpu(H100, 3200, _EC2),
    'p5en': _gpu(H200, 3200, _EC2),
    'p6': _gpu(B200, 3200, _EC2),
    'h100': _gpu(H100, 3200, 'https://docs.nvidia.com/dgx-superpod/'),
    'h200': _gpu(H200, 3200, 'https://docs.nvidia.com/dgx-superpod/'),
    'b200': _gpu(B200, 3200, 'https://docs.nvidia.com/dgx-superpod/'),
}
_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_SIZE = r'\d+(?:x\d+)*'


@dataclasses.dataclass(frozen=True)
class Pod:
    """A named topology.

    Attributes:
      shape: chips along each side of the torus, or (hosts, GPUs per host).
    """

    name: str
    family: Family
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return self.family.chip

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def per_host(self) -> int:
        """Chips of a host."""
        if not self.family.sides:
            return self.shape[1]
        single = 8 if self.family.sides == 2 else 4
        return self.chips if self.chips <= single else self.family.per_host

    @property
    def hosts(self) -> int:
        return self.chips // self.per_host

    @property
    def library_name(self) -> str | None:
        """What `jax.experimental.topologies` calls a TPU slice; None for GPUs."""
        shape = 'x'.join(map(str, self.shape))
        return f'{self.chip.name}:{shape}' if self.family.sides else None


def pod_of(name: str) -> Pod:
    """The pod of a name, such as v5p-64 (a slice of 64 TensorCores), v5p-2x4x4 or a3-16x8.

    Raises:
      ConfigError: an unknown name, or a size that does not exist.
    """
    found = re.fullmatch(f'([a-z0-9]+)-({_SIZE})', name.lower())
    if not found or found[1] not in FAMILIES:
        raise ConfigError(_unknown(name))
    family, sizes = FAMILIES[found[1]], tuple(map(int, found[2].split('x')))
    if not family.sides:
        if len(sizes) != 2 or not 1 <= sizes[0] <= family.most or sizes[1] not in (1, 2, 4, 8):
            raise ConfigError(
                f'topology {name!r} must be hosts x GPUs of a host, as in {found[1]}-16x8: '
                f'1 to {family.most:,} hosts of 1, 2, 4 or 8 GPUs'
            )
        return Pod(name, family, sizes)
    shape = _shape(sizes[0], family) if len(sizes) == 1 else sizes
    if shape is None or not _exists(shape, family):
        raise ConfigError(_no_such_slice(name, found[1], family, sizes))
    return Pod(name, family, shape)


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a JAX device kind; None for a CPU and what the table lacks."""
    fitting = [chip for chip in CHIPS if chip.kind in device_kind]
    return max(fitting, key=lambda chip: len(chip.kind), default=None)


def _shape(count: int, family: Family) -> tuple[int, ...] | None:
    """The usual shape of a slice whose name counts `count`."""
    chips, rest = divmod(count, family.cores)
    if rest or chips > family.most:
        return None
    small = _SQUARES if family.sides == 2 else _BELOW_A_CUBE
    for shape in small:
        if math.prod(shape) == chips:
            return shape
    cubes, rest = divmod(chips, 64)
    if family.sides == 2 or rest or not cubes:
        return None
    splits = (
        (a, b, cubes // a // b)
        for a, b in itertools.product(range(1, math.isqrt(cubes) + 1), repeat=2)
        if a <= b and cubes % (a * b) == 0 and b <= cubes // a // b
    )
    return tuple(4 * side for side in min(splits, key=sum))


def _exists(shape: tuple[int, ...], family: Family) -> bool:
    if len(shape) != family.sides or math.prod(shape) > family.most:
        return False
    if family.sides == 2:
        return shape in _SQUARES
    return shape in _BELOW_A_CUBE or all(side and side % 4 == 0 for side in shape)


def _unknown(name: str) -> str:
    start, _, size = name.lower().partition('-')
    near = difflib.get_close_matches(start, FAMILIES, n=1, cutoff=0.5)
    meant = f'; did you mean {_sized(near[0], size)}?' if near else ''
    tpus, gpus = (
        ', '.join(n for n, f in FAMILIES.items() if bool(f.sides) == is_tpu)
        for is_tpu in (True, False)
    )
    return (
        f'topology {name!r} is unknown{meant} Names are {tpus} with a number or a shape, as in '
        f'v5p-64 and v5p-2x4x4, and {gpus} with hosts x GPUs, as in a3-16x8'
    ).replace('unknown Names', 'unknown; names')


def _sized(start: str, size: str) -> str:
    """A pod of a family that exists, of this size if possible."""
    for one in filter(re.compile(_SIZE).fullmatch, (size, '64')):
        with contextlib.suppress(ConfigError):
            return pod_of(f'{start}-{one}').name
    return f'{start}-16x8'


def _no_such_slice(name: str, start: str, family: Family, sizes: tuple[int, ...]) -> str:
    cores, unit = family.cores, 'TensorCores, 2 per chip' if family.cores == 2 else 'chips'
    if family.sides == 2:
        counts = [math.prod(shape) for shape in _SQUARES]
        valid = ', '.join(map(str, counts))
    else:
        counts = [math.prod(shape) * cores for shape in _BELOW_A_CUBE]
        counts += range(64 * cores, family.most * cores + 1, 64 * cores)
        valid = ', '.join(map(str, counts[:5])) + f' or a multiple of {64 * cores} up to '
        valid += f'{counts[-1]:,}'
    wanted = math.prod(sizes) * (cores if len(sizes) > 1 else 1)
    near = min(counts, key=lambda count: abs(count - wanted))
    return (
        f'topology {name!r} does not exist: slices of {start} have {valid} {unit}; the closest is '
        f'{start}-{near}'
    )

"""What a run would be on a pod, from a compilation ahead of time on any machine.

A TPU slice is compiled by XLA's TPU compiler where libtpu is installed. Other pods, and TPU slices
without it, are partitioned over as many fake CPU devices: shardings and collectives are those of
XLA's partitioner, while temporaries and fusions are those of its CPU compiler.
"""

import collections
import dataclasses
import importlib.util
import logging
import math
import os
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.model.sites import validate
from qkattn.train import hlo, program, sharding
from qkattn.train.compiling import messages, standard_error, without_cache
from qkattn.train.optimizer import check_optimizer
from qkattn.train.pods import Chip, Pod, chip_of

# What the CPU client of one process allows.
MOST_FAKE_DEVICES = 2048
# LLVM's optimizations take half the time and change nothing that is described.
UNOPTIMIZED: dict[str, str | bool] = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
REMEDIES = 'larger mesh.fsdp or mesh.tensor, train.accumulation and model.remat take less'

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind over the same axes of the mesh, per device and optimizer step.

    Attributes:
      axes: of the mesh, joined by '+'.
      group: devices that take part together.
      count: operations.
      size: bytes of the whole arrays that are reduced or exchanged.
      seconds: on the links of the chip; None where it is not known.
    """

    kind: str
    axes: str
    group: int
    count: float
    size: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Description:
    """A run on its devices; bytes and FLOPs are per device, times per optimizer step.

    Attributes:
      name: of the pod, or of the present devices.
      where: the same in words.
      compiler: what compiled the program.
      mesh: sizes of the axes.
      program: scan over layers, lifting, steps per dispatch; what computes attention.
      parameters: of one trial.
      memory: bytes by kind.
      capacity: bytes of a device's HBM; None where it is not known.
      model_flops: of the model's matrix products forward and backward, shared out evenly.
      flops, bytes_accessed: by XLA's cost analysis of the compiled program.
      collectives: by kind and axes.
      tokens: of all trials.
      seconds: lower bounds by what limits; empty where the chip is not known.
      warnings: sentences.
    """

    name: str
    where: str
    compiler: str
    mesh: dict[str, int]
    program: tuple[str, ...]
    trials: int
    parameters: int
    memory: dict[str, int]
    capacity: int | None
    model_flops: float
    flops: float
    bytes_accessed: float
    collectives: tuple[Row, ...]
    tokens: int
    seconds: dict[str, float]
    warnings: tuple[str, ...]


def describe(config: Config, pod: Pod | None = None) -> Description:
    """Compiles the train program for a pod, or for the present devices, and describes it.

    Raises:
      ConfigError: an invalid setting, a mesh that does not fit, or too many devices.
    """
    if pod is not None:
        _require_fit(config, pod)
    validate(config)
    check_optimizer(config.optimizer, config.train.num_steps)
    if pod is None:
        devices, kind = jax.devices(), jax.devices()[0].device_kind
        return _describe(
            config, None, chip_of(kind), devices, f'{len(devices)} devices ({kind})', kind
        )
    _start_jax(min(pod.devices, MOST_FAKE_DEVICES))
    shape, chip = 'x'.join(map(str, pod.shape)), pod.chip
    kind = 'TPU' if pod.family.sides else 'GPU'
    hosts = f'{pod.hosts:,} host{"s" * (pod.hosts > 1)}'
    where = f'{pod.name}: {pod.chips:,} {chip.name} {kind} chips on {hosts} ({shape})'
    fake = f'XLA for CPU, partitioned over {pod.devices:,} fake devices'
    if devices := _tpu_devices(pod):
        try:
            compiler = f'XLA for TPU {chip.name} (libtpu)'
            return _describe(config, pod, chip, devices, where, compiler)
        except jax.errors.JaxRuntimeError as error:
            if 'RESOURCE_EXHAUSTED' not in str(error):
                raise
            reason = ' '.join(str(error).split()).removeprefix('RESOURCE_EXHAUSTED: ')[:200]
            warning = f'the TPU compiler refuses the program: {reason}'
            if pod.devices > MOST_FAKE_DEVICES:
                raise ConfigError(f'{warning}; {REMEDIES}') from error
            present = jax.devices('cpu')[: pod.devices]
            description = _describe(config, pod, chip, present, where, fake)
            return dataclasses.replace(description, warnings=(warning, *description.warnings))
    if pod.devices > MOST_FAKE_DEVICES:
        raise ConfigError(
            f'topology {pod.name!r} has {pod.devices:,} devices, more than the '
            f'{MOST_FAKE_DEVICES:,} fake ones of a process; TPU slices of this size need libtpu: '
            "pip install -e '.[tpu]'"
        )
    return _describe(config, pod, chip, jax.devices('cpu')[: pod.devices], where, fake)


def _require_fit(config: Config, pod: Pod) -> None:
    """Raises ConfigError unless the mesh has exactly the devices of the pod."""
    mesh, used = config.mesh, math.prod(dataclasses.astuple(config.mesh))
    if used == pod.devices:
        return
    others = mesh.trial * mesh.fsdp * mesh.tensor
    rest = pod.devices // others
    if others * rest != pod.devices:
        others, rest = 1, pod.devices
    valid = f'--config.mesh.data={rest}'
    for axis in ('trial', 'fsdp', 'tensor'):
        if others == 1 and getattr(mesh, axis) > 1:
            valid += f' --config.mesh.{axis}=1'
    rows, train = rest * (1 if others == 1 else mesh.fsdp), config.train
    if train.batch_size // train.accumulation % rows:
        valid += f' --config.train.batch_size={rows * train.accumulation}'
    raise ConfigError(
        f'mesh {dataclasses.asdict(mesh)} has {used:,} device{"s" * (used > 1)}, but topology '
        f'{pod.name!r} has {pod.devices:,}; valid is, for example, {valid}'
    )


def _start_jax(devices: int) -> None:
    """Gives this process so many CPU devices, and no accelerator.

    Raises:
      ConfigError: JAX has started with fewer.
    """
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # libtpu asks no metadata server
    try:
        jax.config.update('jax_num_cpu_devices', devices)
        jax.config.update('jax_platforms', 'cpu')
    except RuntimeError as started:
        if len(jax.devices('cpu')) < devices:
            raise ConfigError(
                f'JAX has started with {len(jax.devices("cpu"))} CPU devices, but the dry run '
                f'needs {devices:,}; run it in a process of its own'
            ) from started


def _tpu_devices(pod: Pod) -> list[jax.Device]:
    """The devices of a TPU slice that libtpu can compile for; none without it."""
    if pod.library_name is None or importlib.util.find_spec('libtpu') is None:
        return []
    with standard_error():  # libtpu warns that this is no TPU host
        try:
            return topologies.get_topology_desc(pod.library_name, 'tpu').devices
        except jax.errors.JaxRuntimeError as error:
            log.warning('libtpu has no %s: %s', pod.library_name, error)
            return []


def _describe(
    config: Config, pod: Pod | None, chip: Chip | None, devices: list, where: str, compiler: str
) -> Description:
    mesh = sharding.make_mesh(config.mesh, devices if pod else None)
    trials, model = len(config.trials.trials()), config.model
    fake = pod is not None and devices[0].platform == 'cpu'
    lifting = 'vmap' if config.train.lifting == 'auto' else config.train.lifting
    sharding.say_once.cache_clear()
    choice.say_once.cache_clear()
    with messages(sharding.log) as fallbacks, messages(choice.log) as kernels:
        state, hyper, batch = program.abstract_inputs(config, mesh)
        lowered = program.lower(config, lifting, mesh, state, hyper, batch)
    with standard_error() as said, without_cache():
        compiled = lowered.compile(compiler_options=UNOPTIMIZED if fake else None)
        text = said()
    warnings = [f'replication or another axis: {message}' for message in fallbacks]
    involuntary = re.findall(r'Involuntary full rematerialization.*?HLO operation (%\S+)', text)
    if involuntary:
        names = ', '.join(dict.fromkeys(involuntary))
        counted = f'{len(involuntary)} array{"s" * (len(involuntary) > 1)}'
        warnings.append(
            f'XLA copies {counted} whole to every device on the way between two shardings '
            f'(involuntary full rematerialization): {names}'
        )
    work = hlo.read(compiled.as_text(), mesh.size)
    if work.unknown_loops:
        warnings.append(f'{work.unknown_loops} loops of unknown length are counted as one pass')
    memory = _memory(compiled, state, batch, hyper)
    stats = devices[0].memory_stats() if pod is None else None
    capacity = (stats or {}).get('bytes_limit') or (chip.hbm // chip.devices if chip else None)
    total = sum(memory.values())
    if capacity and total > 0.9 * capacity:
        much = 'DOES NOT FIT' if total > capacity else 'hardly fits'
        warnings.insert(
            0,
            f'the program {much}: {total / 2**30:,.2f} GiB for {capacity / 2**30:,.2f} GiB of HBM '
            f'per device; {REMEDIES}',
        )
    steps = config.train.steps_per_dispatch
    rows = _rows(work, mesh, steps, pod)
    tokens = trials * config.train.batch_size * model.context
    flops, accessed = work.flops / steps, work.bytes_accessed / steps
    scan = f'{model.num_layers} layers, {model.unroll} in an iteration of the scan'
    return Description(
        name=pod.name if pod else devices[0].device_kind,
        where=where,
        compiler=compiler,
        mesh=dict(mesh.shape),
        program=(f'{scan}; trials by {lifting}; {steps} steps per dispatch', *kernels),
        trials=trials,
        parameters=cost.count(model)['total'],
        memory=memory,
        capacity=capacity,
        model_flops=3 * cost.flops_per_token(model) * tokens / mesh.size,
        flops=flops,
        bytes_accessed=accessed,
        collectives=rows,
        tokens=tokens,
        seconds=_seconds(config, chip, flops, accessed, rows) if pod else {},
        warnings=tuple(warnings),
    )


def _memory(compiled: Any, state: dict, batch: dict, hyper: dict) -> dict[str, int]:
    """Bytes of a device by kind: arguments by their shardings, the rest by XLA."""

    def own(tree: Any) -> int:
        return sum(
            math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(tree)
        )

    stats, trials = compiled.memory_analysis(), state['trials']
    kinds = {
        'parameters': own(trials['params']),
        'optimizer state': own(trials['opt_state']),
        'batch': own(batch),
    }
    others = stats.argument_size_in_bytes - sum(kinds.values())
    return {
        **kinds,
        'step, hyperparameters, padding': others,
        'gradients and temporaries': stats.temp_size_in_bytes,
        'output': stats.output_size_in_bytes - stats.alias_size_in_bytes,
        'program': stats.generated_code_size_in_bytes,
    }


def _rows(work: hlo.Work, mesh: Any, steps: int, pod: Pod | None) -> tuple[Row, ...]:
    """The collectives of a step by kind and axes, largest first."""
    table: dict[tuple[str, str, int], np.ndarray] = collections.defaultdict(lambda: np.zeros(3))
    for one in work.collectives:
        key = one.kind, _axes(one.groups, mesh), one.groups.shape[1]
        spent = _link_seconds(one, pod) if pod else 0.0
        table[key] += one.times / steps * np.array([1, one.size, spent])
    rows = [
        Row(*key, float(count), float(size), float(spent) if pod else None)
        for key, (count, size, spent) in table.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.size))


def _axes(groups: np.ndarray, mesh: Any) -> str:
    """The axes of the mesh along which the members of a group differ."""
    places = np.unravel_index(groups, tuple(mesh.shape.values()))
    differ = [axis for axis, at in zip(mesh.shape, places, strict=True) if (at != at[:, :1]).any()]
    return '+'.join(differ)


def _link_seconds(one: hlo.Collective, pod: Pod) -> float:
    """A ring over the group: 2 (n - 1) / n of the array per chip for a sum, else (n - 1) / n."""
    n = one.groups.shape[1]
    factor = {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1.0}.get(one.kind, (n - 1) / n)
    seconds = factor * one.size / (pod.chip.link / pod.chip.devices)
    hosts = one.groups // (pod.per_host * pod.chip.devices)
    if pod.family.network is None or (hosts == hosts[:, :1]).all():
        return seconds
    # The members on a host share the load of the network.
    members = n / max(len(set(row)) for row in hosts.tolist())
    return max(seconds, factor * one.size / (members * pod.family.network))


def _seconds(
    config: Config, chip: Chip | None, flops: float, accessed: float, rows: tuple[Row, ...]
) -> dict[str, float]:
    if chip is None:
        return {}
    rate = 1.0 if config.model.compute_dtype == 'bfloat16' else chip.float32
    return {
        'compute': flops / (rate * chip.flops / chip.devices),
        'HBM': accessed / (chip.bandwidth / chip.devices),
        'links': sum(row.seconds or 0.0 for row in rows),
    }

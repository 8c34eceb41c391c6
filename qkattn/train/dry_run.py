"""What a run takes on a pod, from a compilation ahead of time on any machine.

A TPU slice is compiled by XLA's TPU compiler where libtpu is installed. Other pods, and TPU slices
without it, are partitioned over as many fake CPU devices: parameters, optimizer state and batch are
exact, temporaries are those of the CPU compiler.
"""

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.model.sites import validate
from qkattn.train import program, sharding
from qkattn.train.optimizer import check_optimizer
from qkattn.train.pods import Pod, chip_of
from qkattn.train.program_cache import without_cache

# What the CPU client of one process allows.
MOST_FAKE_DEVICES = 2048
# LLVM's optimizations take half the time and change nothing that is described.
UNOPTIMIZED: dict[str, str | bool] = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
REMEDIES = 'larger mesh.fsdp or mesh.tensor, train.accumulation and model.remat take less'
HEADER = 'run,compiler,devices,tokens,state_gb,memory_gb,model_tflop\n'  # of a log
WIDTH = 100

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Description:
    """A run on its devices; bytes and FLOPs are per device.

    Attributes:
      program: scan over layers, lifting, steps per dispatch; what computes attention.
      parameters: of one trial.
      tokens: of a step, all trials together.
      memory: bytes by kind.
      capacity: bytes of a device's HBM; None where it is not known.
      flops: of the model's matrix products in a step, forward and backward, shared out evenly.
      seconds: of these at the peak rate of the chip; None where it is not known.
    """

    name: str
    where: str
    compiler: str
    mesh: dict[str, int]
    program: tuple[str, ...]
    trials: int
    parameters: int
    tokens: int
    memory: dict[str, int]
    capacity: int | None
    flops: float
    seconds: float | None
    warnings: tuple[str, ...]


def describe(config: Config, pod: Pod | None = None) -> Description:
    """Compiles the train program for a pod, or for the present devices, and describes it.

    Raises:
      ConfigError: an invalid setting, a mesh that does not fit, too many devices, or a program that
        the compiler refuses for its memory.
    """
    if pod is not None:
        _require_fit(config, pod)
    validate(config)
    check_optimizer(config.optimizer, config.train.num_steps)
    model, train, trials = config.model, config.train, len(config.trials.trials())
    if pod is None:
        devices = jax.devices()
        name = compiler = devices[0].device_kind
        where, chip = f'{len(devices)} devices ({name})', chip_of(name)
    else:
        devices, compiler = _devices(pod)
        name, chip, shape = pod.name, pod.chip, 'x'.join(map(str, pod.shape))
        chips = f'{pod.chips:,} {chip.name} {"TPU" if chip.sides else "GPU"} chips'
        where = f'{name}: {chips} on {_counted(pod.hosts, "host")} ({shape})'
    mesh = sharding.make_mesh(config.mesh, devices if pod else None)
    lifting = 'vmap' if train.lifting == 'auto' else train.lifting
    sharding.say_once.cache_clear()
    choice.say_once.cache_clear()
    with _messages(sharding.log) as fallbacks, _messages(choice.log) as kernels:
        state, hyper, batch = program.abstract_inputs(config, mesh)
        lowered = program.lower(config, lifting, mesh, state, hyper, batch)
    with without_cache():
        try:
            compiled = lowered.compile(compiler_options=UNOPTIMIZED if 'fake' in compiler else None)
        except jax.errors.JaxRuntimeError as error:
            if 'RESOURCE_EXHAUSTED' not in str(error):
                raise
            reason = ' '.join(str(error).split()).removeprefix('RESOURCE_EXHAUSTED: ')[:200]
            raise ConfigError(f'the compiler refuses the program: {reason}; {REMEDIES}') from error
    memory = _memory(compiled, state, batch)
    stats = devices[0].memory_stats() if pod is None else None
    capacity = (stats or {}).get('bytes_limit') or (chip.hbm // chip.devices if chip else None)
    warnings = [f'replication or another axis: {message}' for message in fallbacks]
    if capacity and (total := sum(memory.values())) > 0.9 * capacity:
        much = 'DOES NOT FIT' if total > capacity else 'hardly fits'
        sizes = f'{_size_text(total)} for {_size_text(capacity)} of HBM per device'
        warnings.insert(0, f'the program {much}: {sizes}; {REMEDIES}')
    tokens = trials * train.batch_size * model.context
    flops = 3 * cost.flops_per_token(model) * tokens / mesh.size
    scan = f'{model.num_layers} layers, {model.unroll} in an iteration of the scan'
    dispatch = f'trials by {lifting}; {train.steps_per_dispatch} steps per dispatch'
    return Description(
        name=name,
        where=where,
        compiler=compiler,
        mesh=dict(mesh.shape),
        program=(f'{scan}; {dispatch}', *kernels),
        trials=trials,
        parameters=cost.count(model)['total'],
        memory=memory,
        capacity=capacity,
        flops=flops,
        seconds=flops * chip.devices / chip.flops if chip else None,
        tokens=tokens,
        warnings=tuple(warnings),
    )


@contextlib.contextmanager
def _messages(logger: logging.Logger) -> Iterator[list[str]]:
    """Keeps the messages of a logger, which are not printed."""
    lines, level = [], logger.level

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    logger.setLevel(logging.INFO)
    logger.addFilter(keep)
    try:
        yield lines
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)


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
        f'mesh {dataclasses.asdict(mesh)} has {_counted(used, "device")}, but topology '
        f'{pod.name!r} has {pod.devices:,}; valid is, for example, {valid}'
    )


def _devices(pod: Pod) -> tuple[list[jax.Device], str]:
    """The devices of a TPU slice, or as many fake ones of the CPU, and what compiles for them.

    Raises:
      ConfigError: more fake devices than one process has, or than JAX has started with.
    """
    wanted = min(pod.devices, MOST_FAKE_DEVICES)
    try:
        jax.config.update('jax_num_cpu_devices', wanted)
        jax.config.update('jax_platforms', 'cpu')
    except RuntimeError as started:
        if len(jax.devices('cpu')) < wanted:
            raise ConfigError(
                f'JAX has started with {len(jax.devices("cpu"))} CPU devices, but the dry run '
                f'needs {wanted:,}; run it in a process of its own'
            ) from started
    if pod.chip.sides and importlib.util.find_spec('libtpu') is not None:
        os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # libtpu asks no metadata server
        slice_name = f'{pod.chip.name}:{"x".join(map(str, pod.shape))}'
        try:
            devices = topologies.get_topology_desc(slice_name, 'tpu').devices
            return devices, f'XLA for TPU {pod.chip.name} (libtpu)'
        except jax.errors.JaxRuntimeError as error:
            log.warning('libtpu has no %s: %s', slice_name, error)
    if pod.devices > MOST_FAKE_DEVICES:
        raise ConfigError(
            f'topology {pod.name!r} has {pod.devices:,} devices, more than the '
            f'{MOST_FAKE_DEVICES:,} fake ones of a process; TPU slices of this size need libtpu: '
            "pip install -e '.[tpu]'"
        )
    fake = jax.devices('cpu')[: pod.devices]
    return fake, f'XLA for CPU, partitioned over {pod.devices:,} fake devices'


def _memory(compiled: jax.stages.Compiled, state: dict, batch: Any) -> dict[str, int]:
    """Bytes of a device by kind: arguments by their shardings, the rest by XLA."""

    def on_device(tree: Any) -> int:
        return sum(
            math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(tree)
        )

    stats, trials = compiled.memory_analysis(), state['trials']
    kinds = {
        'parameters': on_device(trials['params']),
        'optimizer state': on_device(trials['opt_state']),
        'batch': on_device(batch),
    }
    others = stats.argument_size_in_bytes - sum(kinds.values())
    return {
        **kinds,
        'step, hyperparameters, padding': others,
        'gradients and temporaries': stats.temp_size_in_bytes,
        'output': stats.output_size_in_bytes - stats.alias_size_in_bytes,
        'program': stats.generated_code_size_in_bytes,
    }


def text(run: Description) -> str:
    """The description as a page of at most 100 columns."""
    mesh = ' '.join(f'{axis}={size}' for axis, size in run.mesh.items())
    warnings = (f'WARNING {warning}' for warning in run.warnings)
    head = run.where, f'compiled by {run.compiler}', f'mesh {mesh}', *run.program, *warnings
    total, stack = sum(run.memory.values()), f'of {_counted(run.trials, "trial")} each'
    rows: list[tuple[str, float, str]] = [
        ('parameters', run.parameters, stack),
        ('tokens', run.tokens, 'per step'),
        *((kind, size, _size_text(size)) for kind, size in run.memory.items()),
        ('memory per device', total, _size_text(total)),
    ]
    if run.capacity:
        share = f'{_size_text(run.capacity)}, of which {total / run.capacity:.1%} are used'
        rows.append(('HBM per device', run.capacity, share))
    peak = '' if run.seconds is None else f'{1e3 * run.seconds:,.3g} ms at the peak bfloat16 rate'
    rows.append(('FLOPs per device and step', run.flops, peak))
    lines = [row for line in head for row in textwrap.wrap(line, WIDTH, subsequent_indent='  ')]
    return '\n'.join([*lines, '', *(f'{n:<31}{x:>23,.0f}  {note}'.rstrip() for n, x, note in rows)])


def check_log(path: str | Path) -> None:
    """Raises ConfigError where a path is no file, nor a name for one in a directory."""
    path = Path(path)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ConfigError(
            f'--dry_run_log={path} must be a CSV file, or a name for one in a directory that exists'
        )


def append_to_log(run: Description, path: str | Path) -> None:
    """Appends a row to a CSV file that `check_log` has accepted; 1 GB is 1e9 bytes.

    Raises:
      ConfigError: the file cannot be written.
    """
    mesh = ' '.join(f'{axis}={n}' for axis, n in run.mesh.items() if n > 1) or 'data=1'
    name, devices = (
        f'{run.name} {mesh} {run.trials} x {run.parameters}',
        math.prod(run.mesh.values()),
    )
    state = (run.memory['parameters'] + run.memory['optimizer state']) / 1e9
    sizes = f'{state:.6g},{sum(run.memory.values()) / 1e9:.6g},{run.flops / 1e12:.6g}'
    try:
        with open(path, 'a') as file:
            file.write('' if file.tell() else HEADER)
            file.write(f'{name},"{run.compiler}",{devices},{run.tokens},{sizes}\n')
    except OSError as error:
        raise ConfigError(f'--dry_run_log={path} cannot be written: {error.strerror}') from error


def _size_text(size: float) -> str:
    unit = min(int(math.log(max(size, 1), 1024)), 4)
    return f'{size / 1024**unit:,.{2 if unit else 0}f} {("B", "KiB", "MiB", "GiB", "TiB")[unit]}'


def _counted(count: int, noun: str) -> str:
    return f'{count:,} {noun}{"s" * (count != 1)}'

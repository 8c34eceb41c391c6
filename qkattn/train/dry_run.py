"""What a run takes on a pod, from a compilation ahead of time on any machine.

TPU slices are compiled by XLA for TPU where libtpu is installed. All else is partitioned over fake
CPU devices: parameters, optimizer state and batch are exact, temporaries the CPU compiler's.
"""

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.config.setting import check_section
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.model.sites import validate
from qkattn.storage.files import read_whole
from qkattn.train import sharding
from qkattn.train.checks import check_data_if_here, check_parts
from qkattn.train.chips import CHIPS, GB, flops_per_step, tokens_per_step
from qkattn.train.initial_parameters import InitialParameters
from qkattn.train.program import abstract_inputs, lower
from qkattn.train.program_cache import without_cache

# The CPU client of one process allows no more.
MOST_FAKE_DEVICES = 2048
LOG_COLUMNS = 'run,compiler,devices,tokens,state_gb,memory_gb,model_tflop'
# LLVM's optimizations take half the time and change nothing that is described.
UNOPTIMIZED: dict[str, str | bool] = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
# Characters of a line of a page.
PAGE_WIDTH = 100


class Pod:
    """Chips of a name: v5p-2x4x4, a slice of TPUs by its shape, or h100-16x8, hosts x GPUs."""

    def __init__(self, name: str):
        """ConfigError for an unknown chip or another number of sides."""
        kind, _, shape = name.lower().rpartition('-')
        is_shape = re.fullmatch(r'[1-9]\d{0,4}(x[1-9]\d{0,4})*', shape) is not None  # as 2x4x4
        sides = shape.split('x')
        if not is_shape or kind not in CHIPS or len(sides) != CHIPS[kind].sides:
            raise ConfigError(
                f'--dry_run={name} must be a chip and a shape, as in v5p-2x4x4 and v6e-16x16, or '
                f'hosts x GPUs, as in h100-16x8; chips are {", ".join(CHIPS)}'
            )
        self.name = name
        self.chip = CHIPS[kind]
        # As libtpu names a slice.
        self.slice = f'{kind}:{shape}'
        self.chips = math.prod(int(side) for side in sides)
        self.devices = self.chips * self.chip.devices


@dataclasses.dataclass(frozen=True)
class Description:
    """A run on its devices."""

    # Of the pod.
    name: str
    compiler: str
    # Devices by mesh axis.
    mesh: dict[str, int]
    # Sentences about the program, warnings last.
    notes: list[str]
    trials: int
    # Of one trial.
    parameters: int
    # Of a step, summed over trials.
    tokens: int
    # Bytes of one device by what they hold, and those that it has.
    memory: dict[str, int]
    capacity: int
    # FLOPs of a step on one device, and seconds that they take at its peak rate.
    flops: float
    seconds: float


def describe(config: Config, topology: str) -> Description:
    """Compiles the train program for the pod of a name and describes it.

    ConfigError for whatever `train` refuses before it compiles, but for devices and memory of this
    machine, and for data that are not prepared here, of which a note says so.
    """
    pod = Pod(topology)
    check_section('', config)
    _require_fit(config, pod)
    devices, compiler = _devices(pod)  # before any code from outside computes, which starts JAX
    validate(config)
    check_parts(config)
    InitialParameters(config).load()
    unchecked_data = check_data_if_here(config, 'dry run')

    mesh = sharding.make_mesh(config.mesh, devices)
    program = _compile(config, mesh)
    flops = flops_per_step(config) / mesh.size
    capacity = pod.chip.hbm // pod.chip.devices
    notes = [
        f'{pod.name}: {_counted(pod.chips, f"{pod.chip.kind} chip")}',
        f'compiled by {compiler}',
        f'mesh {_axes_text(mesh.shape)}',
        _program_text(config, program.lifting),
        *program.kernels,
    ]
    notes += _warnings(program, capacity, unchecked_data)
    return Description(
        name=pod.name,
        compiler=compiler,
        mesh=dict(mesh.shape),
        notes=notes,
        trials=len(config.trials.trials()),
        parameters=cost.count(config.model)['total'],
        tokens=tokens_per_step(config),
        memory=program.memory,
        capacity=capacity,
        flops=flops,
        seconds=flops * pod.chip.devices / pod.chip.flops,
    )


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """What is known of a program once it is compiled."""

    lifting: str
    # Bytes of one device by what they hold.
    memory: dict[str, int]
    # Messages about the choice of kernels, and about arrays that are not split as planned.
    kernels: list[str]
    fallbacks: list[str]


def _compile(config: Config, mesh: Mesh) -> _Compiled:
    """Compiles the train program for a mesh of a TPU slice or of fake devices of the CPU."""
    lifting = 'vmap' if config.train.lifting == 'auto' else config.train.lifting
    # The messages of this program are wanted even where an earlier one has given them.
    sharding.say_once.cache_clear()
    choice.say_once.cache_clear()
    with _messages(sharding.log) as fallbacks, _messages(choice.log) as kernels:
        state, hyper, batch = abstract_inputs(config, mesh)
        lowered = lower(config, lifting, mesh, state, hyper, batch)
    is_fake = mesh.devices.flat[0].platform == 'cpu'
    options = UNOPTIMIZED if is_fake else None
    with without_cache():
        compiled = lowered.compile(compiler_options=options)
    return _Compiled(lifting, _memory(compiled, state, batch), kernels, fallbacks)


@contextlib.contextmanager
def _messages(logger: logging.Logger) -> Iterator[list[str]]:
    """Keeps the messages of a logger, which are not printed."""
    lines = []
    level = logger.level

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
    mesh = dataclasses.asdict(config.mesh)
    num_devices = math.prod(mesh.values())
    if num_devices != pod.devices:
        raise ConfigError(
            f'mesh {mesh} has {_counted(num_devices, "device")}, but --dry_run={pod.name} has '
            f'{pod.devices:,}; set sizes of config.mesh that multiply to {pod.devices:,}'
        )


def _devices(pod: Pod) -> tuple[list[jax.Device], str]:
    """The devices of a TPU slice, or as many fake ones of the CPU, and what compiles for them."""
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update('jax_num_cpu_devices', min(pod.devices, MOST_FAKE_DEVICES))
        jax.config.update('jax_platforms', 'cpu')
    if pod.chip.kind == 'TPU' and importlib.util.find_spec('libtpu') is not None:
        os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # libtpu asks no metadata server
        try:
            devices = topologies.get_topology_desc(pod.slice, 'tpu').devices
        except Exception as error:  # of any kind where there is no such slice
            reason = str(error).partition('\n')[0]
            raise ConfigError(f'--dry_run={pod.name} is refused by libtpu: {reason}') from error
        return devices, f'XLA for TPU {pod.slice} (libtpu)'
    fake_devices = jax.devices('cpu')[: pod.devices]
    if len(fake_devices) < pod.devices:
        raise ConfigError(
            f'--dry_run={pod.name} has {pod.devices:,} devices, more than the '
            f'{len(fake_devices):,} fake ones of this process, which may have '
            f'{MOST_FAKE_DEVICES:,}; slices of more TPUs need libtpu: '
            "pip install -e '.[tpu]'"
        )
    counted = _counted(pod.devices, 'fake device')
    return fake_devices, f'XLA for CPU, partitioned over {counted}'


def _memory(compiled: jax.stages.Compiled, state: dict, batch: Any) -> dict[str, int]:
    """Bytes of a device by what they hold: arguments by their shardings, the rest by XLA."""

    def on_device(tree: Any) -> int:
        num_bytes = 0
        for leaf in jax.tree.leaves(tree):
            shape_on_device = leaf.sharding.shard_shape(leaf.shape)
            num_bytes += math.prod(shape_on_device) * leaf.dtype.itemsize
        return num_bytes

    statistics = compiled.memory_analysis()
    arguments = {
        'parameters': on_device(state['trials']['params']),
        'optimizer state': on_device(state['trials']['opt_state']),
        'batch': on_device(batch),
    }
    other_arguments = statistics.argument_size_in_bytes - sum(arguments.values())
    # Outputs that are written where an argument was take no memory of their own.
    outputs = statistics.output_size_in_bytes - statistics.alias_size_in_bytes
    return {
        **arguments,
        'step, hyperparameters, padding': other_arguments,
        'gradients and temporaries': statistics.temp_size_in_bytes,
        'output': outputs,
        'program': statistics.generated_code_size_in_bytes,
    }


def text(run: Description) -> str:
    """The description as a page of at most 100 columns: its notes, then a table of sizes."""
    lines = []
    for note in run.notes:
        lines += textwrap.wrap(note, PAGE_WIDTH, subsequent_indent='  ')
    lines.append('')
    total = sum(run.memory.values())
    used = f'{_size_text(run.capacity)}, of which {total / run.capacity:.1%} is used'
    peak = f'{1e3 * run.seconds:,.3g} ms at the peak bfloat16 rate'
    rows: list[tuple[str, float, str]] = [
        ('parameters', run.parameters, f'of {_counted(run.trials, "trial")} each'),
        ('tokens', run.tokens, 'per step'),
    ]
    for content, size in run.memory.items():
        rows.append((content, size, _size_text(size)))
    rows += [
        ('memory per device', total, _size_text(total)),
        ('HBM per device', run.capacity, used),
        ('FLOPs per device and step', run.flops, peak),
    ]
    for name, number, note in rows:
        lines.append(f'{name:<31}{number:>23,.0f}  {note}'.rstrip())
    return '\n'.join(lines)


def check_log(path: str | Path) -> None:
    """Raises ConfigError where a path is no file, nor a name for one in a directory."""
    file = Path(path)
    if not file.parent.is_dir() or (file.exists() and not file.is_file()):
        raise ConfigError(
            f'--dry_run_log={path} must be a CSV file, or a name for one in a directory that exists'
        )
    content = read_whole(file).decode(errors='replace') if file.exists() else ''
    columns = content.partition('\n')[0]
    if content and columns != LOG_COLUMNS:
        raise ConfigError(f'--dry_run_log={path} must have the columns {LOG_COLUMNS}')


def append_to_log(run: Description, path: str | Path) -> None:
    """Appends a row to a CSV file, which begins with LOG_COLUMNS; 1 GB is 1e9 bytes."""
    split_axes = {axis: size for axis, size in run.mesh.items() if size > 1}
    axes = _axes_text(split_axes or {'data': 1})
    state_gb = (run.memory['parameters'] + run.memory['optimizer state']) / GB
    memory_gb = sum(run.memory.values()) / GB
    fields = [
        f'{run.name} {axes} {run.trials} x {run.parameters}',
        f'"{run.compiler}"',
        f'{math.prod(run.mesh.values())}',
        f'{run.tokens}',
        f'{state_gb:.6g}',
        f'{memory_gb:.6g}',
        f'{run.flops / 1e12:.6g}',
    ]
    with open(path, 'a') as file:
        if file.tell() == 0:
            file.write(f'{LOG_COLUMNS}\n')
        file.write(f'{",".join(fields)}\n')


def _warnings(program: _Compiled, capacity: int, unchecked_data: str | None) -> list[str]:
    """What a user should know of a program on devices of `capacity` bytes, a sentence each."""
    warnings = []
    total = sum(program.memory.values())
    if total > capacity:
        warnings.append(
            f'WARNING the program DOES NOT FIT: {_size_text(total)} for {_size_text(capacity)} of '
            'HBM per device; a larger mesh.fsdp, mesh.tensor or train.accumulation, or '
            'model.remat, takes less'
        )
    for fallback in program.fallbacks:
        warnings.append(f'WARNING replication or another axis: {fallback}')
    if unchecked_data is not None:
        warnings.append(f'WARNING {unchecked_data}')
    return warnings


def _program_text(config: Config, lifting: str) -> str:
    """How the program runs over layers, trials and steps, in a line."""
    model = config.model
    layers = f'num_layers={model.num_layers}, {model.unroll} in an iteration of the scan'
    return f'{layers}; trials by {lifting}; {config.train.steps_per_dispatch} steps per dispatch'


def _axes_text(mesh: Mapping[str, int]) -> str:
    """'data=2 fsdp=4' of the sizes of mesh axes."""
    return ' '.join(f'{axis}={size}' for axis, size in mesh.items())


def _counted(number: int, noun: str) -> str:
    """'1 device' or '2,048 devices'."""
    return f'{number:,} {noun}' if number == 1 else f'{number:,} {noun}s'


def _size_text(num_bytes: float) -> str:
    """'512 B' or '1.50 MiB'."""
    if num_bytes < 1024:
        return f'{num_bytes:,.0f} B'
    units = ('KiB', 'MiB', 'GiB', 'TiB')
    size = num_bytes / 1024
    position = 0
    while size >= 1024 and position < len(units) - 1:
        size /= 1024
        position += 1
    return f'{size:,.2f} {units[position]}'

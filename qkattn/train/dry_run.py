"""Memory and FLOPs of a run on a pod, from ahead-of-time compilation on any machine.

With libtpu, XLA compiles for the TPU slice. Otherwise it compiles for fake CPU devices. The sizes
of parameters, optimizer state and batch are then exact, but temporaries are those of a CPU program.
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

# The largest number of CPU devices that JAX allows in one process.
MOST_FAKE_DEVICES = 2048
LOG_COLUMNS = 'run,compiler,devices,tokens,state_gb,memory_gb,model_tflop'
# Turns off LLVM's optimizations, which take half of the compile time and change no memory size.
UNOPTIMIZED: dict[str, str | bool] = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
# The number of characters in a line of a page.
PAGE_WIDTH = 100


class Pod:
    """A TPU slice such as 'v5p-2x4x4', or GPU hosts such as 'h100-16x8' (16 hosts of 8 GPUs)."""

    def __init__(self, name: str):
        """Raises ConfigError for an unknown chip, or a shape with the wrong number of sides."""
        kind, _, shape = name.lower().rpartition('-')  # 'v5p-2x4x4' -> 'v5p' and '2x4x4'
        is_shape = re.fullmatch(r'[1-9]\d{0,4}(x[1-9]\d{0,4})*', shape) is not None
        sides = shape.split('x')
        if not is_shape or kind not in CHIPS or len(sides) != CHIPS[kind].sides:
            raise ConfigError(
                f'--dry_run={name} must be a chip and a shape, as in v5p-2x4x4 and v6e-16x16, or '
                f'hosts x GPUs, as in h100-16x8; chips are {", ".join(CHIPS)}'
            )
        self.name = name
        self.chip = CHIPS[kind]
        # The slice's name in libtpu, such as 'v5p:2x4x4'.
        self.slice = f'{kind}:{shape}'
        self.chips = math.prod(int(side) for side in sides)
        self.devices = self.chips * self.chip.devices


@dataclasses.dataclass(frozen=True)
class Description:
    """The memory and FLOPs that a run needs on a pod."""

    # The name of the pod.
    name: str
    compiler: str
    # The size of each mesh axis.
    mesh: dict[str, int]
    # Sentences about the program, warnings last.
    notes: list[str]
    # The number of trials.
    trials: int
    # Parameters of one trial.
    parameters: int
    # Tokens of one step, summed over trials.
    tokens: int
    # Bytes that the program takes on one device, by content.
    memory: dict[str, int]
    # Bytes of memory of one device.
    capacity: int
    # FLOPs of one step on one device.
    flops: float
    # Seconds for these FLOPs at the peak rate of the device.
    seconds: float


def describe(config: Config, topology: str) -> Description:
    """Compiles the train program for a pod and describes its memory and FLOPs.

    Data that would need a download are not checked; a note says so.

    Args:
        config: The settings of the run.
        topology: The name of a `Pod`, such as 'v5p-2x4x4'.

    Raises:
        ConfigError: A setting is invalid or does not fit the pod.
    """
    pod = Pod(topology)
    check_section('', config)
    _require_fit(config, pod)
    # Get the devices first. Later checks may import code that starts JAX with other devices.
    devices, compiler = _devices(pod)
    unchecked_data = _check_all_but_devices(config)

    mesh = sharding.make_mesh(config.mesh, devices)
    program = _compile(config, mesh)
    flops = flops_per_step(config) / mesh.size
    capacity = pod.chip.hbm // pod.chip.devices
    peak_flops = pod.chip.flops / pod.chip.devices

    notes = [
        f'{pod.name}: {_counted(pod.chips, f"{pod.chip.kind} chip")}',
        f'compiled by {compiler}',
        f'mesh {_axes_text(mesh.shape)}',
        _program_text(config, program.lifting),
        *program.kernels,
        *_warnings(program, capacity, unchecked_data),
    ]
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
        seconds=flops / peak_flops,
    )


def counts(config: Config) -> str:
    """Returns a page with the numbers of parameters, tokens and FLOPs, without compiling.

    Raises:
        ConfigError: A setting is invalid.
    """
    check_section('', config)
    unchecked_data = _check_all_but_devices(config)
    num_steps = config.train.num_steps
    num_trials = len(config.trials.trials())
    num_parameters_by_group = cost.count(config.model)

    lines = []
    for group, num_parameters in num_parameters_by_group.items():
        name = 'parameters' if group == 'total' else f'parameters of {group}'
        lines.append(_row(name, num_parameters, 'of each trial'))
    lines.append(_row('trials', num_trials))
    lines.append(_row('tokens per step', tokens_per_step(config), 'of all trials'))
    lines.append(_row('steps', num_steps))
    lines.append(_row('tokens', num_steps * tokens_per_step(config), 'of all trials and steps'))
    flops = num_steps * flops_per_step(config)
    lines.append(_row('FLOPs', flops, f'of all trials and steps: {flops:.3g}'))
    if unchecked_data is not None:
        lines.append(f'WARNING {unchecked_data}')
    return '\n'.join(lines)


def _check_all_but_devices(config: Config) -> str | None:
    """Raises ConfigError for invalid settings or data of a run.

    Returns why the data were not checked; None if they were.
    """
    validate(config)
    check_parts(config)
    InitialParameters(config).load()
    return check_data_if_here(config, 'dry run')


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """Properties of a compiled train program."""

    # 'vmap' computes trials side by side, 'map' one after another.
    lifting: str
    # Bytes on one device, by content.
    memory: dict[str, int]
    # Messages about the choice of attention kernels.
    kernels: list[str]
    # Messages about arrays that are not split over the preferred axis.
    fallbacks: list[str]


def _compile(config: Config, mesh: Mesh) -> _Compiled:
    """Compiles the train program for a mesh of a TPU slice or of fake CPU devices."""
    # 'auto' would measure the program on the real devices.
    lifting = 'vmap' if config.train.lifting == 'auto' else config.train.lifting

    # Forget the messages of earlier programs, which would not be logged again.
    sharding.say_once.cache_clear()
    choice.say_once.cache_clear()
    with _collect_messages(sharding.log) as fallbacks, _collect_messages(choice.log) as kernels:
        state, hyper, batch = abstract_inputs(config, mesh)
        lowered = lower(config, lifting, mesh, state, hyper, batch)

    is_fake = mesh.devices.flat[0].platform == 'cpu'
    options = UNOPTIMIZED if is_fake else None
    with without_cache():
        compiled = lowered.compile(compiler_options=options)
    return _Compiled(
        lifting=lifting,
        memory=_memory(compiled, state, batch),
        kernels=kernels,
        fallbacks=fallbacks,
    )


@contextlib.contextmanager
def _collect_messages(logger: logging.Logger) -> Iterator[list[str]]:
    """Collects the messages of a logger in a list instead of printing them."""
    messages: list[str] = []
    previous_level = logger.level

    def collect(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False  # do not print the message

    logger.setLevel(logging.INFO)
    logger.addFilter(collect)
    try:
        yield messages
    finally:
        logger.removeFilter(collect)
        logger.setLevel(previous_level)


def _require_fit(config: Config, pod: Pod) -> None:
    """Raises ConfigError if the mesh and the pod have different numbers of devices."""
    mesh = dataclasses.asdict(config.mesh)
    num_devices = math.prod(mesh.values())
    if num_devices != pod.devices:
        raise ConfigError(
            f'mesh {mesh} has {_counted(num_devices, "device")}, but --dry_run={pod.name} has '
            f'{pod.devices:,}; set sizes of config.mesh that multiply to {pod.devices:,}'
        )


def _devices(pod: Pod) -> tuple[list[jax.Device], str]:
    """Returns the devices to compile for, and the name of their compiler.

    These are TPUs if the pod has TPUs and libtpu is installed, and fake CPU devices otherwise.

    Raises:
        ConfigError: Libtpu refuses the slice, or there are too few fake devices.
    """
    # JAX must run on the CPU in both cases. If it has started already, it raises RuntimeError and
    # keeps its devices.
    with contextlib.suppress(RuntimeError):
        jax.config.update('jax_num_cpu_devices', min(pod.devices, MOST_FAKE_DEVICES))
        jax.config.update('jax_platforms', 'cpu')

    if pod.chip.kind == 'TPU' and importlib.util.find_spec('libtpu') is not None:
        # Without this, libtpu waits for a metadata server that only cloud machines have.
        os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
        try:
            devices = topologies.get_topology_desc(pod.slice, 'tpu').devices
        except Exception as error:  # libtpu raises various types for an unknown slice
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
    """Returns the bytes that a program takes on one device, by content."""

    def bytes_on_device(tree: Any) -> int:
        num_bytes = 0
        for leaf in jax.tree.leaves(tree):
            shape_on_device = leaf.sharding.shard_shape(leaf.shape)
            num_bytes += math.prod(shape_on_device) * leaf.dtype.itemsize
        return num_bytes

    parameters = bytes_on_device(state['trials']['params'])
    optimizer_state = bytes_on_device(state['trials']['opt_state'])
    batch_bytes = bytes_on_device(batch)

    statistics = compiled.memory_analysis()
    # XLA reports only the total of all arguments, padding included.
    all_arguments = statistics.argument_size_in_bytes
    step_hyperparameters_padding = all_arguments - parameters - optimizer_state - batch_bytes
    # Outputs that are written in place of an argument take no memory of their own.
    outputs = statistics.output_size_in_bytes - statistics.alias_size_in_bytes
    return {
        'parameters': parameters,
        'optimizer state': optimizer_state,
        'batch': batch_bytes,
        'step, hyperparameters, padding': step_hyperparameters_padding,
        'gradients and temporaries': statistics.temp_size_in_bytes,
        'output': outputs,
        'program': statistics.generated_code_size_in_bytes,
    }


def text(run: Description) -> str:
    """Formats a description as a page of PAGE_WIDTH columns: the notes, then a table."""
    lines = []
    for note in run.notes:
        lines += textwrap.wrap(note, PAGE_WIDTH, subsequent_indent='  ')
    lines.append('')

    lines.append(_row('parameters', run.parameters, f'of {_counted(run.trials, "trial")} each'))
    lines.append(_row('tokens', run.tokens, 'per step'))

    for content, num_bytes in run.memory.items():
        lines.append(_row(content, num_bytes, _size_text(num_bytes)))
    total_bytes = sum(run.memory.values())
    lines.append(_row('memory per device', total_bytes, _size_text(total_bytes)))
    fraction_used = total_bytes / run.capacity
    capacity_text = f'{_size_text(run.capacity)}, of which {fraction_used:.1%} is used'
    lines.append(_row('HBM per device', run.capacity, capacity_text))

    milliseconds = 1e3 * run.seconds
    time_text = f'{milliseconds:,.3g} ms at the peak bfloat16 rate'
    lines.append(_row('FLOPs per device and step', run.flops, time_text))
    return '\n'.join(lines)


def _row(name: str, value: float, remark: str = '') -> str:
    """Formats a row of a table: the name of a quantity, its value, and a remark."""
    return f'{name:<31}{value:>23,.0f}  {remark}'.rstrip()


def check_log(path: str | Path) -> None:
    """Raises ConfigError if `append_to_log` cannot append to a path.

    The path must be a CSV file with LOG_COLUMNS and complete lines, an empty file, or a new file in
    an existing directory.
    """
    file = Path(path)
    is_no_file = file.exists() and not file.is_file()  # a directory, for example
    if is_no_file or not file.parent.is_dir():
        raise ConfigError(
            f'--dry_run_log={path} must be a CSV file, or a name for one in a directory that exists'
        )
    if not file.exists():
        return
    content = read_whole(file).decode(errors='replace')
    columns = content.partition('\n')[0]
    if content and columns != LOG_COLUMNS:
        raise ConfigError(f'--dry_run_log={path} must have the columns {LOG_COLUMNS}')
    if content and not content.endswith('\n'):
        raise ConfigError(f'--dry_run_log={path} must end with a line break; add one')


def append_to_log(run: Description, path: str | Path) -> None:
    """Appends a description as a row to a CSV file; writes LOG_COLUMNS first if it is empty."""
    # Axes of size 1 are left out, unless all are.
    split_axes = {axis: size for axis, size in run.mesh.items() if size > 1}
    if not split_axes:
        split_axes = {'data': 1}
    axes = _axes_text(split_axes)  # such as 'data=2 fsdp=4'
    state_gb = (run.memory['parameters'] + run.memory['optimizer state']) / GB
    memory_gb = sum(run.memory.values()) / GB
    # In the order of LOG_COLUMNS: run, compiler, devices, tokens, state_gb, memory_gb, model_tflop.
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
        is_empty = file.tell() == 0
        if is_empty:
            file.write(f'{LOG_COLUMNS}\n')
        file.write(f'{",".join(fields)}\n')


def _warnings(program: _Compiled, capacity: int, unchecked_data: str | None) -> list[str]:
    """Returns warnings about a program, a sentence each.

    Args:
        program: The compiled program.
        capacity: The bytes of memory of one device.
        unchecked_data: Why the data were not checked; None if they were.
    """
    warnings = []
    total_bytes = sum(program.memory.values())
    if total_bytes > capacity:
        warnings.append(
            f'WARNING the program DOES NOT FIT: {_size_text(total_bytes)} for '
            f'{_size_text(capacity)} of HBM per device; a larger mesh.fsdp, mesh.tensor or '
            'train.accumulation, or model.remat, takes less'
        )
    for fallback in program.fallbacks:
        warnings.append(f'WARNING replication or another axis: {fallback}')
    if unchecked_data is not None:
        warnings.append(f'WARNING {unchecked_data}')
    return warnings


def _program_text(config: Config, lifting: str) -> str:
    """Describes how the program runs over layers, trials and steps, in one line."""
    model = config.model
    layers = f'num_layers={model.num_layers}, {model.unroll} in an iteration of the scan'
    return f'{layers}; trials by {lifting}; {config.train.steps_per_dispatch} steps per dispatch'


def _axes_text(mesh: Mapping[str, int]) -> str:
    """Formats the sizes of mesh axes, as in 'data=2 fsdp=4'."""
    return ' '.join(f'{axis}={size}' for axis, size in mesh.items())


def _counted(number: int, noun: str) -> str:
    """Formats a number of things, as in '1 device' or '2,048 devices'."""
    return f'{number:,} {noun}' if number == 1 else f'{number:,} {noun}s'


def _size_text(num_bytes: float) -> str:
    """Formats a number of bytes in the largest fitting unit, as in '512 B' or '1.50 MiB'."""
    if num_bytes < 1024:
        return f'{num_bytes:,.0f} B'
    size = num_bytes / 1024
    for unit in ('KiB', 'MiB', 'GiB'):
        if size < 1024:
            return f'{size:,.2f} {unit}'
        size /= 1024
    return f'{size:,.2f} TiB'

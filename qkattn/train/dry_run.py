"""Memory and FLOPs of a run on a pod, from a compilation ahead of time on any machine.

`counts` gives parameters, tokens and FLOPs without a pod or a compilation.

If libtpu is installed, XLA for TPU compiles the program for a TPU slice. Otherwise XLA for CPU
partitions it over fake devices. The sizes of parameters, optimizer state and batch are then exact;
the size of temporaries is that of the CPU program.
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

# The CPU client of JAX allows no more devices in one process.
MOST_FAKE_DEVICES = 2048
LOG_COLUMNS = 'run,compiler,devices,tokens,state_gb,memory_gb,model_tflop'
# LLVM's optimizations take half of the time to compile and do not change the description.
UNOPTIMIZED: dict[str, str | bool] = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
# Characters of a line of a page.
PAGE_WIDTH = 100


class Pod:
    """The chips that a name describes.

    v5p-2x4x4 is a slice of TPUs with three sides; h100-16x8 is 16 hosts with 8 GPUs each.
    """

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
        # The name of the slice in libtpu, as 'v5p:2x4x4'.
        self.slice = f'{kind}:{shape}'
        self.chips = math.prod(int(side) for side in sides)
        self.devices = self.chips * self.chip.devices


@dataclasses.dataclass(frozen=True)
class Description:
    """What a run takes of its devices."""

    # The name of the pod.
    name: str
    compiler: str
    # The number of devices along each mesh axis.
    mesh: dict[str, int]
    # Sentences about the program, warnings last.
    notes: list[str]
    trials: int
    # Parameters of one trial.
    parameters: int
    # Tokens of one step, summed over trials.
    tokens: int
    # Bytes that the program takes on one device, by what they hold.
    memory: dict[str, int]
    # Bytes of memory of one device.
    capacity: int
    # FLOPs of one step on one device.
    flops: float
    # Seconds that these FLOPs take at the peak rate of the device.
    seconds: float


def describe(config: Config, topology: str) -> Description:
    """Compiles the train program for a pod and describes its memory and FLOPs.

    Checks the settings as `train` does, except for the devices and the memory of this machine, and
    raises ConfigError for invalid ones. Data that are not prepared on this machine are not checked;
    a note says so.

    Args:
      config: the settings of the run.
      topology: the name of the pod, such as 'v5p-2x4x4'; see `Pod`.
    """
    pod = Pod(topology)
    check_section('', config)
    _require_fit(config, pod)
    # Before the other checks: they may import code that starts JAX, which fixes its devices.
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
    """Counts parameters, tokens and FLOPs of a run, without compiling; returns a page of them.

    Checks the settings as `describe` does, and raises ConfigError for invalid ones.
    """
    check_section('', config)
    unchecked_data = _check_all_but_devices(config)
    num_steps = config.train.num_steps
    num_trials = len(config.trials.trials())
    parameters = cost.count(config.model)

    lines = []
    for group, number in parameters.items():
        name = 'parameters' if group == 'total' else f'parameters of {group}'
        lines.append(_row(name, number, 'of each trial'))
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
    """Checks a run as its start does, except for devices and memory.

    Returns why its data were not checked; None if they were. Raises ConfigError.
    """
    validate(config)
    check_parts(config)
    InitialParameters(config).load()
    return check_data_if_here(config, 'dry run')


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """The properties of a compiled program that a description needs."""

    lifting: str
    # Bytes on one device by what they hold.
    memory: dict[str, int]
    # Messages about the choice of attention kernels.
    kernels: list[str]
    # Messages about arrays that are not split as planned.
    fallbacks: list[str]


def _compile(config: Config, mesh: Mesh) -> _Compiled:
    """Compiles the train program for a mesh of a TPU slice or of fake devices of the CPU."""
    # The lifting says whether trials run side by side ('vmap') or one after another ('map'). A run
    # with 'auto' would measure both, which needs the real devices.
    lifting = 'vmap' if config.train.lifting == 'auto' else config.train.lifting

    # Collect the messages that lowering logs. `say_once` leaves out messages that this process has
    # logged for an earlier program, unless its cache is cleared.
    sharding.say_once.cache_clear()
    choice.say_once.cache_clear()
    with _collect_messages(sharding.log) as fallbacks, _collect_messages(choice.log) as kernels:
        state, hyper, batch = abstract_inputs(config, mesh)
        lowered = lower(config, lifting, mesh, state, hyper, batch)

    is_fake = mesh.devices.flat[0].platform == 'cpu'
    options = UNOPTIMIZED if is_fake else None
    with without_cache():
        compiled = lowered.compile(compiler_options=options)
    return _Compiled(lifting, _memory(compiled, state, batch), kernels, fallbacks)


@contextlib.contextmanager
def _collect_messages(logger: logging.Logger) -> Iterator[list[str]]:
    """Collects the messages of a logger in a list instead of printing them."""
    lines: list[str] = []
    level = logger.level

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False  # the logger does not print the message

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
    """Returns the devices of a pod, and the name of the compiler for them.

    These are the devices of a TPU slice if the pod has TPUs and libtpu, their compiler, is
    installed. Otherwise they are fake devices, into which JAX divides the CPU. Raises ConfigError
    if libtpu refuses the slice, or if this process has fewer fake devices than the pod.
    """
    # Run JAX on the CPU, even if libtpu compiles for TPUs below. Ask it for as many fake devices as
    # the pod has. If JAX has started already, it raises RuntimeError and keeps the devices that it
    # has. Whether these are enough is checked at the end.
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
    """Formats a description as a page of at most PAGE_WIDTH columns.

    The page lists the notes, and then a table: a quantity, its value, and the value in a larger
    unit or a remark.
    """
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
    """Formats a line of a page: a quantity, its value, and a remark."""
    return f'{name:<31}{value:>23,.0f}  {remark}'.rstrip()


def check_log(path: str | Path) -> None:
    """Raises ConfigError unless `append_to_log` can append to a path.

    The path has to be a CSV file with LOG_COLUMNS, an empty file, or the name of a new file in a
    directory that exists.
    """
    file = Path(path)
    is_other_kind = file.exists() and not file.is_file()  # a directory, for example
    if is_other_kind or not file.parent.is_dir():
        raise ConfigError(
            f'--dry_run_log={path} must be a CSV file, or a name for one in a directory that exists'
        )
    if not file.exists():
        return
    content = read_whole(file).decode(errors='replace')
    columns = content.partition('\n')[0]
    if content and columns != LOG_COLUMNS:
        raise ConfigError(f'--dry_run_log={path} must have the columns {LOG_COLUMNS}')


def append_to_log(run: Description, path: str | Path) -> None:
    """Appends a description as a row to a CSV file; writes LOG_COLUMNS first if it is empty."""
    split_axes = {axis: size for axis, size in run.mesh.items() if size > 1}
    axes = _axes_text(split_axes or {'data': 1})
    # 1 GB is 1e9 bytes.
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
    """Returns warnings about a program on devices with `capacity` bytes, a sentence each.

    `unchecked_data` says why the data were not checked; None if they were.
    """
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
    """Describes in a line how the program runs over layers, trials and steps."""
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
    units = ('KiB', 'MiB', 'GiB', 'TiB')
    size = num_bytes / 1024
    position = 0
    while size >= 1024 and position < len(units) - 1:
        size /= 1024
        position += 1
    return f'{size:,.2f} {units[position]}'

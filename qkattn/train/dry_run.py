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
from typing import Any, Literal

import jax
from jax.experimental import topologies

from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.config.setting import check_section
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.model.sites import validate
from qkattn.storage.files import read_whole
from qkattn.train import program, sharding
from qkattn.train.checks import check_data_if_here, check_parts
from qkattn.train.loop import given_params
from qkattn.train.program_cache import without_cache

MOST_FAKE_DEVICES = 2048  # that the CPU client of one process allows
LOG_COLUMNS = 'run,compiler,devices,tokens,state_gb,memory_gb,model_tflop'
# LLVM's optimizations take half the time and change nothing that is described.
UNOPTIMIZED: dict[str, str | bool] = {
    'xla_backend_optimization_level': '0',
    'xla_llvm_disable_expensive_passes': True,
}
GB = 10**9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator."""

    kind: Literal['TPU', 'GPU']
    hbm: int  # bytes
    flops: float  # dense bf16 FLOP/s
    sides: int = 2  # of a slice of TPUs; of GPUs hosts x GPUs of a host
    devices: int = 1  # of JAX per chip


# Figures from docs.cloud.google.com/tpu/docs/NAME, nvidia.com/en-us/data-center/NAME.
CHIPS = {
    'v4': Chip('TPU', 32 * GIB, 275e12, sides=3),
    'v5e': Chip('TPU', 16 * GIB, 197e12),
    'v5p': Chip('TPU', 95 * GIB, 459e12, sides=3),
    'v6e': Chip('TPU', 32 * GIB, 918e12),
    'tpu7x': Chip('TPU', 192 * GIB, 2307e12, sides=3, devices=2),
    'a100': Chip('GPU', 40 * GB, 312e12),
    'a100_80gb': Chip('GPU', 80 * GB, 312e12),
    'h100': Chip('GPU', 80 * GB, 989e12),
    'h200': Chip('GPU', 141 * GB, 989e12),
    'b200': Chip('GPU', 180 * GB, 2250e12),
}


class Pod:
    """Chips of a name: v5p-2x4x4, a slice of TPUs by its shape, or h100-16x8, hosts x GPUs."""

    def __init__(self, name: str):
        """ConfigError for an unknown chip or another number of sides."""
        kind, _, shape = name.lower().rpartition('-')
        sides = shape.count('x') + 1
        if (
            kind not in CHIPS
            or sides != CHIPS[kind].sides
            or not re.fullmatch(r'[1-9]\d{0,4}(x[1-9]\d{0,4})*', shape)
        ):
            raise ConfigError(
                f'--dry_run={name} must be a chip and a shape, as in v5p-2x4x4 and v6e-16x16, or '
                f'hosts x GPUs, as in h100-16x8; chips are {", ".join(CHIPS)}'
            )
        self.name = name
        self.chip = CHIPS[kind]
        self.slice = f'{kind}:{shape}'
        self.chips = math.prod(map(int, shape.split('x')))
        self.devices = self.chips * self.chip.devices


@dataclasses.dataclass(frozen=True)
class Description:
    """A run on its devices; bytes, FLOPs and seconds at the peak rate are those of one device."""

    name: str
    compiler: str
    mesh: dict[str, int]
    notes: list[str]
    trials: int
    parameters: int
    tokens: int
    memory: dict[str, int]
    capacity: int
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
    given_params(config)
    unchecked = check_data_if_here(config, 'dry run')
    model = config.model
    train = config.train
    trials = len(config.trials.trials())
    capacity = pod.chip.hbm // pod.chip.devices
    mesh = sharding.make_mesh(config.mesh, devices)
    lifting = 'vmap' if train.lifting == 'auto' else train.lifting
    sharding.say_once.cache_clear()
    choice.say_once.cache_clear()
    with _messages(sharding.log) as fallbacks, _messages(choice.log) as kernels:
        state, hyper, batch = program.abstract_inputs(config, mesh)
        lowered = program.lower(config, lifting, mesh, state, hyper, batch)
    with without_cache():
        compiled = lowered.compile(compiler_options=UNOPTIMIZED if 'fake' in compiler else None)
    memory = _memory(compiled, state, batch)
    tokens = trials * train.batch_size * model.context
    flops = 3 * cost.flops_per_token(model) * tokens / mesh.size
    scan = f'num_layers={model.num_layers}, {model.unroll} in an iteration of the scan'
    dispatch = f'trials by {lifting}; {train.steps_per_dispatch} steps per dispatch'
    notes = [
        f'{pod.name}: {pod.chips:,} {pod.chip.kind} chip{"s" * (pod.chips > 1)}',
        f'compiled by {compiler}',
    ]
    notes += [f'mesh {_axes(mesh.shape)}', f'{scan}; {dispatch}', *kernels]
    if (total := sum(memory.values())) > capacity:
        sizes = f'{_size_text(total)} for {_size_text(capacity)} of HBM per device'
        remedies = (
            'a larger mesh.fsdp, mesh.tensor or train.accumulation, or model.remat, takes less'
        )
        notes.append(f'WARNING the program DOES NOT FIT: {sizes}; {remedies}')
    notes += [f'WARNING replication or another axis: {message}' for message in fallbacks]
    if unchecked is not None:
        notes.append(f'WARNING {unchecked}')
    seconds = flops * pod.chip.devices / pod.chip.flops
    about = pod.name, compiler, dict(mesh.shape), notes, trials, cost.count(model)['total']
    return Description(*about, tokens, memory, capacity, flops, seconds)


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
    used = math.prod(dataclasses.astuple(config.mesh))
    if used != pod.devices:
        raise ConfigError(
            f'mesh {mesh} has {used:,} device{"s" * (used != 1)}, but --dry_run={pod.name} has '
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
    fake = jax.devices('cpu')[: pod.devices]
    if len(fake) < pod.devices:
        raise ConfigError(
            f'--dry_run={pod.name} has {pod.devices:,} devices, more than the {len(fake):,} fake '
            f'ones of this process, which may have {MOST_FAKE_DEVICES:,}; slices of more TPUs need '
            "libtpu: pip install -e '.[tpu]'"
        )
    fakes = f'{pod.devices:,} fake device{"s" * (pod.devices > 1)}'
    return fake, f'XLA for CPU, partitioned over {fakes}'


def _memory(compiled: jax.stages.Compiled, state: dict, batch: Any) -> dict[str, int]:
    """Bytes of a device by kind: arguments by their shardings, the rest by XLA."""

    def on_device(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)

    stats = compiled.memory_analysis()
    kinds = {
        'parameters': on_device(state['trials']['params']),
        'optimizer state': on_device(state['trials']['opt_state']),
        'batch': on_device(batch),
    }
    return {
        **kinds,
        'step, hyperparameters, padding': stats.argument_size_in_bytes - sum(kinds.values()),
        'gradients and temporaries': stats.temp_size_in_bytes,
        'output': stats.output_size_in_bytes - stats.alias_size_in_bytes,
        'program': stats.generated_code_size_in_bytes,
    }


def text(run: Description) -> str:
    """The description as a page of at most 100 columns."""
    total = sum(run.memory.values())
    share = f'{_size_text(run.capacity)}, of which {total / run.capacity:.1%} is used'
    peak = f'{1e3 * run.seconds:,.3g} ms at the peak bfloat16 rate'
    rows: list[tuple[str, float, str]] = [
        ('parameters', run.parameters, f'of {run.trials} trial{"s" * (run.trials > 1)} each'),
        ('tokens', run.tokens, 'per step'),
        *((kind, size, _size_text(size)) for kind, size in run.memory.items()),
        ('memory per device', total, _size_text(total)),
        ('HBM per device', run.capacity, share),
        ('FLOPs per device and step', run.flops, peak),
    ]
    lines = [row for note in run.notes for row in textwrap.wrap(note, 100, subsequent_indent='  ')]
    return '\n'.join([*lines, '', *(f'{n:<31}{x:>23,.0f}  {note}'.rstrip() for n, x, note in rows)])


def check_log(path: str | Path) -> None:
    """Raises ConfigError where a path is no file, nor a name for one in a directory."""
    if not Path(path).parent.is_dir() or (Path(path).exists() and not Path(path).is_file()):
        valid = 'a CSV file, or a name for one in a directory that exists'
        raise ConfigError(f'--dry_run_log={path} must be {valid}')
    known = read_whole(Path(path)).decode(errors='replace') if Path(path).exists() else ''
    if known and known.partition('\n')[0] != LOG_COLUMNS:
        raise ConfigError(f'--dry_run_log={path} must have the columns {LOG_COLUMNS}')


def append_to_log(run: Description, path: str | Path) -> None:
    """Appends a row to a CSV file; 1 GB is 1e9 bytes."""
    axes = {axis: size for axis, size in run.mesh.items() if size > 1} or {'data': 1}
    name = f'{run.name} {_axes(axes)} {run.trials} x {run.parameters}'
    state = (run.memory['parameters'] + run.memory['optimizer state']) / 1e9
    sizes = f'{state:.6g},{sum(run.memory.values()) / 1e9:.6g},{run.flops / 1e12:.6g}'
    with open(path, 'a') as file:
        if not file.tell():
            file.write(f'{LOG_COLUMNS}\n')
        devices = math.prod(run.mesh.values())
        file.write(f'{name},"{run.compiler}",{devices},{run.tokens},{sizes}\n')


def _axes(mesh: Mapping[str, int]) -> str:
    return ' '.join(f'{axis}={size}' for axis, size in mesh.items())


def _size_text(size: float) -> str:
    unit = min(int(math.log(max(size, 1), 1024)), 4)
    return f'{size / 1024**unit:,.{2 if unit else 0}f} {("B", "KiB", "MiB", "GiB", "TiB")[unit]}'

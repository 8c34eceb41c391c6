"""From one trial to a stack: the compiled programs of a run, on its mesh."""

import dataclasses
import functools
import logging
import operator
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.data.tasks.task_registry import task_of
from qkattn.jobs import agreement
from qkattn.jobs.machine import keep_freed_memory
from qkattn.model.sites import check_kernel
from qkattn.model.stack import placing
from qkattn.train import sharding
from qkattn.train.program_cache import without_cache
from qkattn.train.sharding import leading_shape
from qkattn.train.step import init_stack, train_trial

HYPER = {'seed': np.uint32, 'learning_rate': np.float32, 'weight_decay': np.float32}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's train program on its mesh."""

    mesh: Mesh
    lifting: str
    abstract_state: dict  # ShapeDtypeStructs with shardings, the target of a restore
    train: Callable[[dict, dict], tuple[dict, dict]]  # batch [C, X, A, B, ...], metrics [C, X]
    init: Callable[[], dict]  # the state before step 0
    compile_seconds: float
    measured: dict[str, float]  # seconds per step by lifting, where that was chosen by measurement


def lift(one: Callable, lifting: str, mesh: Mesh) -> Callable:
    """`one` over the leading axis X of all its arguments; no trial reads another.

    'vmap': side by side. 'map': in turn on each slice of the mesh's trial axis. One trial: neither.
    """
    slices = mesh.shape['trial']
    side_by_side = jax.vmap(one, spmd_axis_name='trial')

    def lifted(*stacked: Any) -> Any:
        if len(jax.tree.leaves(stacked)[0]) == 1:
            alone = one(*jax.tree.map(operator.itemgetter(0), stacked))
            return jax.tree.map(lambda a: a[None], alone)
        if lifting == 'vmap':
            return side_by_side(*stacked)
        if slices == 1:
            return jax.lax.map(lambda turn: one(*turn), stacked)
        # Slice i of the mesh holds X / slices trials in a row; a turn takes one of each slice.
        turns = jax.tree.map(
            lambda a: jnp.swapaxes(a.reshape(slices, -1, *a.shape[1:]), 0, 1), stacked
        )
        done = jax.lax.map(lambda turn: side_by_side(*turn), turns)
        return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:]), done)

    return lifted


def train_steps(
    config: Config, lifting: str, mesh: Mesh
) -> Callable[[dict, dict, dict], tuple[dict, dict]]:
    """The program (state, hyper, batch [C, X, A, B, ...]) -> (state, metrics [C, X]) of C steps.

    With 'map' a trial takes all C steps before the next one: its state stays near the processor.
    """

    def steps_of_trial(step: jax.Array, trial: dict, hyper: dict, batches: dict) -> tuple:
        def one(trial: dict, inputs: tuple) -> tuple[dict, dict]:
            return train_trial(config, inputs[0], trial, hyper, inputs[1])

        steps_C = step + jnp.arange(batches['targets_BT'].shape[0])
        return jax.lax.scan(one, trial, (steps_C, batches))

    def many_steps(state: dict, hyper: dict, batches: dict) -> tuple[dict, dict]:
        swap = functools.partial(jax.tree.map, lambda a: jnp.swapaxes(a, 0, 1))  # C and X
        run = lift(functools.partial(steps_of_trial, state['step']), lifting, mesh)
        with placing(sharding.place_activations(mesh)), choice.on(mesh):
            trials, metrics = run(state['trials'], hyper, swap(batches))
        step = state['step'] + batches['targets_BT'].shape[0]
        return {'step': step, 'trials': trials}, swap(metrics)

    return many_steps


@functools.lru_cache(maxsize=16)  # those of a run are few, and those of runs before it are freed
def stack_program(
    config: Config, lifting: str, mesh: Mesh, measure: Callable[[Config, dict, dict], dict]
) -> Callable[[dict, dict], dict[str, jax.Array]]:
    """The program (params of X trials, one batch [B, ...]) -> `measure` of each, stacked."""

    def measured(params: dict, batch: dict) -> dict[str, jax.Array]:
        batch = jax.lax.with_sharding_constraint(batch, sharding.row_sharding(mesh))
        with placing(sharding.place_activations(mesh)), choice.on(mesh):
            return lift(lambda params: measure(config, params, batch), lifting, mesh)(params)

    return jax.jit(measured, out_shardings=NamedSharding(mesh, P()))


def abstract_inputs(config: Config, mesh: Mesh) -> tuple[dict, dict, Any]:
    """ShapeDtypeStructs with shardings of the train program's state, hyper and batch."""
    leading, shapes = leading_shape(config), task_of(config).array_shapes(config.model)
    over_trials, placed = NamedSharding(mesh, P('trial')), sharding.batch_sharding(mesh)
    struct = jax.ShapeDtypeStruct
    hyper = {n: struct(leading[1:2], dtype, sharding=over_trials) for n, dtype in HYPER.items()}
    state = jax.eval_shape(functools.partial(init_stack, config), hyper['seed'])
    shardings = sharding.state_shardings(state, mesh)
    state = jax.tree.map(lambda a, s: struct(a.shape, a.dtype, sharding=s), state, shardings)
    batch = {n: struct((*leading, size), d, sharding=placed) for n, (size, d) in shapes.items()}
    return state, hyper, batch


def lower(
    config: Config, lifting: str, mesh: Mesh, state: dict, hyper: dict, batch: Any
) -> jax.stages.Lowered:
    """The train program on abstract inputs; raises ConfigError if model.kernel cannot serve it."""
    check_kernel(config.model, mesh)
    shardings = jax.tree.map(lambda a: a.sharding, state), NamedSharding(mesh, P())
    steps = jax.jit(train_steps(config, lifting, mesh), donate_argnums=0, out_shardings=shardings)
    return steps.lower(state, hyper, batch)


def build(
    config: Config, lifting: str | None = None, given: Callable[[], dict | None] = lambda: None
) -> Program:
    """Compiles the run's train program.

    `lifting` is what an earlier start has chosen, None follows config.train.lifting; `given` makes
    the initial parameters of all trials where they are initialized, None draws them from the seeds.
    """
    keep_freed_memory()
    mesh = sharding.make_mesh(config.mesh)
    trials = config.trials.trials()
    abstract, abstract_hyper, batch = abstract_inputs(config, mesh)
    hyper: dict[str, jax.Array] = {
        name: _placed(np.array([trial[name] for trial in trials]), wanted)
        for name, wanted in abstract_hyper.items()
    }
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    initial = jax.jit(
        functools.partial(init_stack, config),
        out_shardings=shardings,
        compiler_options=_quick_to_compile(mesh),
    )

    def init() -> dict:
        state = initial(hyper['seed'])
        if (params := given()) is not None:
            drawn = state['trials'].pop('params')
            state['trials']['params'] = jax.tree.map(_placed, params, drawn)
        return state

    def compiled(kind: str) -> tuple[Callable, float]:
        start = time.perf_counter()
        steps = lower(config, kind, mesh, abstract, abstract_hyper, batch).compile()
        return steps, time.perf_counter() - start

    chosen = lifting or config.train.lifting
    auto = ('map', 'vmap') if len(trials) > 1 else ('vmap',)
    programs = {kind: compiled(kind) for kind in (auto if chosen == 'auto' else (chosen,))}
    measured: dict[str, float] = {}
    if len(programs) > 1:
        scratch = constant_batch(config, mesh)
        for kind, (run, _) in programs.items():
            seconds = seconds_per_dispatch(run, lambda: (init(), hyper, scratch))
            measured[kind] = seconds / config.train.steps_per_dispatch
        measured = agreement.on_owner(lambda: measured)
        each = ', '.join(f'{kind} {seconds:.3g}' for kind, seconds in measured.items())
        log.info('seconds per step by lifting: %s', each)
    chosen = min(programs, key=lambda kind: measured.get(kind, 0.0))
    steps, compile_seconds = programs[chosen]

    def train(state: dict, batch: dict) -> tuple[dict, dict]:
        return steps(state, hyper, batch)

    return Program(mesh, chosen, abstract, train, init, compile_seconds, measured)


def _placed(value: np.ndarray, like: Any) -> jax.Array:
    """An array of the shape, dtype and sharding of `like`, to which `value` is broadcast."""
    whole = np.broadcast_to(np.asarray(value, like.dtype), like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def constant_batch(config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """A global batch of ones, for timing."""
    held = sharding.local_share(config, mesh)
    leading = (config.train.steps_per_dispatch, *map(len, held))
    shapes = task_of(config).array_shapes(config.model)
    local = {name: np.ones((*leading, length), dtype) for name, (length, dtype) in shapes.items()}
    return sharding.place_batch(config, mesh, local)


def seconds_per_dispatch(steps: Callable, inputs: Callable[[], tuple]) -> float:
    """The faster of two timed calls of steps(state, *others) -> (state, metrics)."""
    state, *others = jax.block_until_ready(inputs())
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(steps(state, *others))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def warm_up(config: Config) -> tuple[float, float]:
    """Seconds per step of the whole stack, timed on constant rows, and seconds to compile."""
    sharding.require_memory(config)
    with without_cache():
        program = build(config)
    per_step = program.measured.get(program.lifting)
    if per_step is None:
        batch = constant_batch(config, program.mesh)
        seconds = seconds_per_dispatch(program.train, lambda: (program.init(), batch))
        per_step = seconds / config.train.steps_per_dispatch
    return agreement.on_owner(lambda: (per_step, program.compile_seconds))


def _quick_to_compile(mesh: Mesh) -> dict[str, int] | None:
    """Options of a program that runs once: on a CPU it costs its compilation. Bits are the same."""
    options = {'xla_backend_optimization_level': 1, 'xla_cpu_parallel_codegen_split_count': 1}
    if mesh.devices.flat[0].platform != 'cpu':
        return None
    chosen = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in options.items() if name not in chosen}

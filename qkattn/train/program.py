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

# What differs between trials as arrays: names of scalars and their types.
HYPER = {'seed': np.uint32, 'learning_rate': np.float32, 'weight_decay': np.float32}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's train program on its mesh."""

    mesh: Mesh
    # 'vmap' or 'map', as in `lift`.
    lifting: str
    # ShapeDtypeStructs with shardings, the target of a restore.
    abstract_state: dict
    # (state, batch [C, X, A, B, ...]) -> (state, metrics [C, X]).
    train: Callable[[dict, dict], tuple[dict, dict]]
    # Makes the state before step 0. All trials start from the given parameters of one model
    # (numpy); for None each draws its own from its seed.
    init: Callable[[dict | None], dict]
    compile_seconds: float
    # Seconds per step by lifting, where it was chosen by measurement; else empty.
    measured: dict[str, float]


def lift(of_trial: Callable, lifting: str, mesh: Mesh) -> Callable:
    """A function of one trial as a function of X trials, the leading axis of all its arguments.

    With 'vmap' all trials are computed side by side, with 'map' one after another on each slice of
    the mesh's trial axis. A single trial needs neither. No trial reads another.
    """
    num_slices = mesh.shape['trial']
    side_by_side = jax.vmap(of_trial, spmd_axis_name='trial')

    def lifted(*stacked: Any) -> Any:
        num_trials = len(jax.tree.leaves(stacked)[0])
        if num_trials == 1:
            results = of_trial(*jax.tree.map(operator.itemgetter(0), stacked))
            return jax.tree.map(lambda a: a[None], results)
        if lifting == 'vmap':
            return side_by_side(*stacked)
        if num_slices == 1:
            return jax.lax.map(lambda arguments: of_trial(*arguments), stacked)
        # Slice i of the mesh holds X / num_slices trials in a row; a turn takes one of each slice.
        turns = jax.tree.map(
            lambda a: jnp.swapaxes(a.reshape(num_slices, -1, *a.shape[1:]), 0, 1), stacked
        )
        results = jax.lax.map(lambda arguments: side_by_side(*arguments), turns)
        return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:]), results)

    return lifted


def train_steps(
    config: Config, lifting: str, mesh: Mesh
) -> Callable[[dict, dict, dict], tuple[dict, dict]]:
    """The program (state, hyper, batch [C, X, A, B, ...]) -> (state, metrics [C, X]) of C steps.

    With 'map' a trial takes all C steps before the next one: its state stays near the processor.
    """

    def steps_of_trial(first_step: jax.Array, trial: dict, hyper: dict, batches: dict) -> tuple:
        def one_step(trial: dict, inputs: tuple) -> tuple[dict, dict]:
            step, batch = inputs
            return train_trial(config, step, trial, hyper, batch)

        steps_C = first_step + jnp.arange(batches['targets_BT'].shape[0])
        return jax.lax.scan(one_step, trial, (steps_C, batches))

    def many_steps(state: dict, hyper: dict, batches: dict) -> tuple[dict, dict]:
        steps_of_stack = lift(functools.partial(steps_of_trial, state['step']), lifting, mesh)
        batches_XC = _swap_leading_axes(batches)
        with placing(sharding.place_activations(mesh)), choice.on(mesh):
            trials, metrics_XC = steps_of_stack(state['trials'], hyper, batches_XC)
        step = state['step'] + batches['targets_BT'].shape[0]
        return {'step': step, 'trials': trials}, _swap_leading_axes(metrics_XC)

    return many_steps


def _swap_leading_axes(tree: dict) -> dict:
    """[C, X, ...] of steps and trials as [X, C, ...], or back, in every array of a tree."""
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)


# A run has few such programs; the cache frees those of the runs before it.
@functools.lru_cache(maxsize=16)
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
    leading = leading_shape(config)
    _, X, _, _ = leading
    over_trials = NamedSharding(mesh, P('trial'))
    hyper = {
        name: jax.ShapeDtypeStruct((X,), dtype, sharding=over_trials)
        for name, dtype in HYPER.items()
    }
    state = jax.eval_shape(functools.partial(init_stack, config), hyper['seed'])
    state = jax.tree.map(
        lambda a, placed: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed),
        state,
        sharding.state_shardings(state, mesh),
    )
    arrays = task_of(config).array_shapes(config.model)
    batch = {
        name: jax.ShapeDtypeStruct(
            (*leading, length), dtype, sharding=sharding.batch_sharding(mesh)
        )
        for name, (length, dtype) in arrays.items()
    }
    return state, hyper, batch


def lower(
    config: Config, lifting: str, mesh: Mesh, state: dict, hyper: dict, batch: Any
) -> jax.stages.Lowered:
    """The train program on abstract inputs; raises ConfigError if model.kernel cannot serve it."""
    check_kernel(config, mesh)
    of_state = jax.tree.map(lambda a: a.sharding, state)
    of_metrics = NamedSharding(mesh, P())
    steps = jax.jit(
        train_steps(config, lifting, mesh),
        donate_argnums=0,
        out_shardings=(of_state, of_metrics),
    )
    return steps.lower(state, hyper, batch)


def build(config: Config, lifting: str | None = None) -> Program:
    """Compiles the run's train program.

    `lifting` is what an earlier start of the run has chosen; None follows config.train.lifting,
    where 'auto' is the faster one, by measurement.
    """
    keep_freed_memory()
    mesh = sharding.make_mesh(config.mesh)
    trials = config.trials.trials()
    abstract_state, abstract_hyper, abstract_batch = abstract_inputs(config, mesh)
    hyper: dict[str, jax.Array] = {
        name: _placed(np.array([trial[name] for trial in trials]), abstract)
        for name, abstract in abstract_hyper.items()
    }
    draw_initial_state = jax.jit(
        functools.partial(init_stack, config),
        out_shardings=jax.tree.map(lambda a: a.sharding, abstract_state),
        compiler_options=_quick_to_compile(mesh),
    )

    def init(params: dict | None) -> dict:
        state = draw_initial_state(hyper['seed'])
        if params is not None:
            drawn = state['trials'].pop('params')
            state['trials']['params'] = jax.tree.map(_placed, params, drawn)
        return state

    def compiled(lifting: str) -> tuple[Callable, float]:
        start = time.perf_counter()
        lowered = lower(config, lifting, mesh, abstract_state, abstract_hyper, abstract_batch)
        steps = lowered.compile()
        return steps, time.perf_counter() - start

    candidates = _liftings(lifting or config.train.lifting, len(trials))
    programs = {candidate: compiled(candidate) for candidate in candidates}
    chosen = candidates[0]
    measured: dict[str, float] = {}
    if len(candidates) > 1:
        batch = constant_batch(config, mesh)
        for candidate, (steps, _) in programs.items():
            seconds = seconds_per_dispatch(steps, lambda: (init(None), hyper, batch))
            measured[candidate] = seconds / config.train.steps_per_dispatch
        chosen, measured = _fastest(measured)
    chosen_steps, compile_seconds = programs[chosen]

    def train(state: dict, batch: dict) -> tuple[dict, dict]:
        return chosen_steps(state, hyper, batch)

    return Program(mesh, chosen, abstract_state, train, init, compile_seconds, measured)


def _fastest(measured: dict[str, float]) -> tuple[str, dict[str, float]]:
    """The fastest lifting by its seconds per step, and the seconds, as process 0 measured them."""
    # All processes of a job choose by the times of one of them.
    seconds_by_lifting = agreement.on_owner(lambda: measured)
    times = [f'{lifting} {seconds:.3g}' for lifting, seconds in seconds_by_lifting.items()]
    log.info('seconds per step by lifting: %s', ', '.join(times))
    fastest = min(seconds_by_lifting, key=lambda lifting: seconds_by_lifting[lifting])
    return fastest, seconds_by_lifting


def _liftings(setting: str, num_trials: int) -> tuple[str, ...]:
    """The liftings to compile: the one that is set, or those that 'auto' chooses from."""
    if setting != 'auto':
        return (setting,)
    if num_trials == 1:
        return ('vmap',)
    return ('map', 'vmap')


def _placed(value: np.ndarray, like: Any) -> jax.Array:
    """An array of the shape, dtype and sharding of `like`, to which `value` is broadcast."""
    whole = np.broadcast_to(np.asarray(value, like.dtype), like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def constant_batch(config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """A global batch of ones, for timing."""
    local_trials, local_rows = sharding.local_share(config, mesh)
    leading = (config.train.steps_per_dispatch, len(local_trials), len(local_rows))
    arrays = task_of(config).array_shapes(config.model)
    local = {name: np.ones((*leading, length), dtype) for name, (length, dtype) in arrays.items()}
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
        seconds = seconds_per_dispatch(program.train, lambda: (program.init(None), batch))
        per_step = seconds / config.train.steps_per_dispatch
    return agreement.on_owner(lambda: (per_step, program.compile_seconds))


def _quick_to_compile(mesh: Mesh) -> dict[str, int] | None:
    """Options of a program that runs once: on a CPU it costs its compilation. Bits are the same."""
    if mesh.devices.flat[0].platform != 'cpu':
        return None
    options = {'xla_backend_optimization_level': 1, 'xla_cpu_parallel_codegen_split_count': 1}
    flags_of_user = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in options.items() if name not in flags_of_user}

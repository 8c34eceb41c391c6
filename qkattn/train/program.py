"""The compiled programs of a run, which compute X trials on a mesh."""

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.data.tasks.task_registry import task_of
from qkattn.jobs import agreement
from qkattn.jobs.machine import keep_freed_memory
from qkattn.model.sites import check_kernel
from qkattn.model.stack import use_placement
from qkattn.train import sharding
from qkattn.train.program_cache import without_cache
from qkattn.train.sharding import leading_shape
from qkattn.train.step import init_stack, stack_before_step_0, train_trial

# The scalars that may differ between the trials of a run, with their types.
HYPER = {'seed': np.uint32, 'learning_rate': np.float32, 'weight_decay': np.float32}
# Log levels of XLA. JAX sets _WARNINGS when it is imported.
_WARNINGS = 1
_FATAL = 3
# How each lifting computes the trials.
_LIFTING_IN_WORDS = {'map': 'one after another', 'vmap': 'side by side'}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's compiled train program on its mesh."""

    mesh: Mesh
    # 'vmap' or 'map', as in `map_over_trials`.
    lifting: str
    # The state as ShapeDtypeStructs with shardings.
    abstract_state: dict
    # (state, batch [C, X, A, B, ...]) -> (state, metrics [C, X]): takes C steps of X trials, each
    # on A microbatches of B rows.
    train: Callable[[dict, dict], tuple[dict, dict]]
    # Makes the state before step 0 from the parameters of one model (numpy), which all trials
    # share. With None, each trial draws its own parameters from its seed.
    init: Callable[[dict | None], dict]
    compile_seconds: float
    # Seconds per step by lifting; empty if the lifting was chosen without a measurement.
    measured: dict[str, float]


def map_over_trials(of_trial: Callable, lifting: str, mesh: Mesh) -> Callable:
    """Turns a function of one trial into a function of X independent trials.

    The returned function takes and returns arrays with a leading axis [X].

    Args:
        of_trial: The function of one trial.
        lifting: 'vmap' computes trials side by side. 'map' computes one trial after another on each
            slice of the mesh along its axis 'trial'. With a single trial, it makes no difference.
        mesh: The mesh of the run.
    """
    num_slices = mesh.shape['trial']
    side_by_side = jax.vmap(of_trial, spmd_axis_name='trial')

    def of_trials(*arguments_X: Any) -> Any:
        num_trials = len(jax.tree.leaves(arguments_X)[0])
        if num_trials == 1:
            arguments = jax.tree.map(lambda array_X: array_X[0], arguments_X)
            results = of_trial(*arguments)
            return jax.tree.map(lambda array: array[None], results)
        if lifting == 'vmap':
            return side_by_side(*arguments_X)
        if num_slices == 1:
            return jax.lax.map(lambda arguments: of_trial(*arguments), arguments_X)
        # In each turn, every slice of the mesh computes one of its trials.
        turns = jax.tree.map(lambda array_X: _split_into_turns(array_X, num_slices), arguments_X)
        results = jax.lax.map(lambda arguments: side_by_side(*arguments), turns)
        return jax.tree.map(_join_turns, results)

    return of_trials


def _split_into_turns(array_X: jax.Array, num_slices: int) -> jax.Array:
    """Turns an array [X, ...] into [turns, slices, ...], with one trial per slice in each turn.

    With 6 trials on 2 slices, the turns are the trials [0, 3], [1, 4] and [2, 5].
    """
    by_slice = array_X.reshape(num_slices, -1, *array_X.shape[1:])
    return jnp.swapaxes(by_slice, 0, 1)


def _join_turns(by_turn: jax.Array) -> jax.Array:
    """Turns an array [turns, slices, ...] into [X, ...], the inverse of `_split_into_turns`."""
    by_slice = jnp.swapaxes(by_turn, 0, 1)
    return by_slice.reshape(-1, *by_slice.shape[2:])


def train_steps(
    config: Config, lifting: str, mesh: Mesh
) -> Callable[[dict, dict, dict], tuple[dict, dict]]:
    """Returns a function that takes C training steps of X trials.

    The function maps (state, hyper, batches) to (state, metrics):

        state     as `init_stack` returns it
        hyper     the scalars HYPER of all trials, [X]
        batches   [C, X, A, B, ...]: steps, trials, microbatches, rows
        metrics   [C, X]
    """

    def take_steps_of_trial(
        first_step: jax.Array, trial: dict, hyper: dict, batches: dict
    ) -> tuple[dict, dict]:
        """Takes C steps of one trial, on batches [C, A, B, ...]."""

        def take_step(trial: dict, step_and_batch: tuple) -> tuple[dict, dict]:
            step, batch = step_and_batch
            return train_trial(config, step, trial, hyper, batch)

        num_steps = batches['targets_BT'].shape[0]
        step_C = first_step + jnp.arange(num_steps)
        return jax.lax.scan(take_step, trial, (step_C, batches))

    def take_steps(state: dict, hyper: dict, batches: dict) -> tuple[dict, dict]:
        first_step = state['step']  # the same for all trials
        num_steps = batches['targets_BT'].shape[0]
        take_steps_of_trials = map_over_trials(
            functools.partial(take_steps_of_trial, first_step), lifting, mesh
        )
        batches_XC = _swap_leading_axes(batches)
        with use_placement(sharding.place_activations(mesh)), choice.tracing_for_mesh(mesh):
            trials, metrics_XC = take_steps_of_trials(state['trials'], hyper, batches_XC)

        next_state = {'step': first_step + num_steps, 'trials': trials}
        return next_state, _swap_leading_axes(metrics_XC)

    return take_steps


def _swap_leading_axes(tree: dict) -> dict:
    """Swaps the first two axes of every array of a pytree."""
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)


# The size limit frees the programs of earlier runs in the same process.
@functools.lru_cache(maxsize=16)
def stack_program(
    config: Config, lifting: str, mesh: Mesh, measure: Callable[[Config, dict, dict], dict]
) -> Callable[[dict, dict], dict[str, jax.Array]]:
    """Returns a jitted function that evaluates X trials on the same batch.

    Args:
        config: The settings of the run.
        lifting: 'vmap' evaluates trials side by side, 'map' one after another.
        mesh: The mesh of the run.
        measure: Maps (config, params, batch) of one trial to a dict of arrays, such as the losses
            {'loss': [B]} on B rows.

    Returns:
        A function that maps (params [X, ...], batch [B, ...]) to a dict of arrays such as {'loss':
        [X, B]}. The arrays are replicated over the mesh.
    """

    def measure_trials(params_X: dict, batch: dict) -> dict[str, jax.Array]:
        batch_over_devices = jax.lax.with_sharding_constraint(batch, sharding.row_sharding(mesh))

        def measure_trial(params: dict) -> dict[str, jax.Array]:
            return measure(config, params, batch_over_devices)

        measure_each = map_over_trials(measure_trial, lifting, mesh)
        # Tell the model how to split activations and which devices attention runs on.
        with use_placement(sharding.place_activations(mesh)), choice.tracing_for_mesh(mesh):
            return measure_each(params_X)

    replicated = NamedSharding(mesh, P())
    return jax.jit(measure_trials, out_shardings=replicated)


def abstract_inputs(config: Config, mesh: Mesh) -> tuple[dict, dict, Any]:
    """Returns abstract arguments (state, hyper, batch) for the function of `train_steps`.

    They are dicts of ShapeDtypeStructs with shardings over the mesh.
    """
    C, X, A, B = leading_shape(config)  # steps, trials, microbatches, rows

    over_trials = NamedSharding(mesh, P('trial'))
    hyper = {}
    for name, dtype in HYPER.items():  # such as 'learning_rate', float32
        hyper[name] = jax.ShapeDtypeStruct((X,), dtype, sharding=over_trials)

    def with_sharding(
        leaf: jax.ShapeDtypeStruct, leaf_sharding: NamedSharding
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding)

    unsharded_state = jax.eval_shape(functools.partial(init_stack, config), hyper['seed'])
    shardings = sharding.state_shardings(unsharded_state, mesh)
    state = jax.tree.map(with_sharding, unsharded_state, shardings)

    over_rows = sharding.batch_sharding(mesh)
    batch = {}
    for name, (length, array_dtype) in task_of(config).array_shapes(config.model).items():
        shape = (C, X, A, B, length)
        batch[name] = jax.ShapeDtypeStruct(shape, array_dtype, sharding=over_rows)
    return state, hyper, batch


def lower(
    config: Config, lifting: str, mesh: Mesh, state: dict, hyper: dict, batch: Any
) -> jax.stages.Lowered:
    """Lowers the train program for compilation.

    Args:
        config: The settings of the run.
        lifting: 'vmap' computes trials side by side, 'map' one after another.
        mesh: The mesh of the run.
        state, hyper, batch: Abstract arguments, as `abstract_inputs` returns them.

    Raises:
        ConfigError: model.kernel cannot compute the attention of the model.
    """
    check_kernel(config, mesh)
    state_shardings = jax.tree.map(lambda a: a.sharding, state)
    replicated = NamedSharding(mesh, P())
    steps = jax.jit(
        train_steps(config, lifting, mesh),
        donate_argnums=0,  # the state, which the next state replaces in memory
        out_shardings=(state_shardings, replicated),
    )
    return steps.lower(state, hyper, batch)


def build(config: Config, lifting: str | None = None) -> Program:
    """Compiles the run's train program.

    Args:
        config: The settings of the run.
        lifting: 'vmap' computes trials side by side, 'map' one after another, 'auto' the faster
            way, which is measured. None means config.train.lifting.
    """
    keep_freed_memory()
    mesh = sharding.make_mesh(config.mesh)
    trials = config.trials.trials()
    abstract_state, abstract_hyper, abstract_batch = abstract_inputs(config, mesh)

    # The scalars of all trials, {'seed': [X], ...}, on the mesh.
    hyper: dict[str, jax.Array] = {}
    for name, abstract in abstract_hyper.items():
        value_X = np.array([trial[name] for trial in trials])
        hyper[name] = _broadcast_like(value_X, abstract)
    init = _initializer(config, mesh, abstract_state, hyper['seed'])

    if lifting is None:
        lifting = config.train.lifting
    candidates = _liftings(lifting, len(trials))
    steps_by_lifting: dict[str, Callable] = {}
    compile_seconds: dict[str, float] = {}
    for candidate in candidates:
        steps_by_lifting[candidate], compile_seconds[candidate] = _compile_steps(
            config, candidate, mesh, abstract_state, abstract_hyper, abstract_batch
        )

    fastest = candidates[0]
    seconds_per_step: dict[str, float] = {}
    if len(candidates) > 1:
        batch = constant_batch(config, mesh)
        for candidate, steps in steps_by_lifting.items():
            seconds = seconds_per_dispatch(steps, init(None), hyper, batch)
            seconds_per_step[candidate] = seconds / config.train.steps_per_dispatch
        fastest, seconds_per_step = _fastest(seconds_per_step)
    take_steps = steps_by_lifting[fastest]

    def train(state: dict, batch: dict) -> tuple[dict, dict]:
        return take_steps(state, hyper, batch)

    return Program(
        mesh=mesh,
        lifting=fastest,
        abstract_state=abstract_state,
        train=train,
        init=init,
        compile_seconds=compile_seconds[fastest],
        measured=seconds_per_step,
    )


def _compile_steps(
    config: Config, lifting: str, mesh: Mesh, state: dict, hyper: dict, batch: Any
) -> tuple[Callable, float]:
    """Compiles the train program; returns (compiled function, compile seconds).

    The arguments are those of `lower`; `state`, `hyper` and `batch` are shapes without data.
    """
    start = time.perf_counter()
    lowered = lower(config, lifting, mesh, state, hyper, batch)
    with _without_slow_compile_notice(mesh):
        steps = lowered.compile()
    return steps, time.perf_counter() - start


def _initializer(
    config: Config, mesh: Mesh, abstract_state: dict, seed_X: jax.Array
) -> Callable[[dict | None], dict]:
    """Returns a function that makes the state of all trials before step 0, as `Program.init`."""
    # Both functions below return the state with the shardings of `abstract_state`.
    jit_to_state = functools.partial(
        jax.jit,
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state),
        compiler_options=_quick_to_compile(mesh),
    )
    draw_initial_state = jit_to_state(functools.partial(init_stack, config))
    # An optimizer may keep the parameters that it starts from, so it must see the given ones.
    start_from = jit_to_state(functools.partial(stack_before_step_0, config), donate_argnums=0)

    def init(params: dict | None) -> dict:
        if params is None:
            return draw_initial_state(seed_X)
        # Give every trial a copy: parameters [...] become [X, ...].
        params_X = jax.tree.map(_broadcast_like, params, abstract_state['trials']['params'])
        return start_from(params_X)

    return init


def _fastest(measured: dict[str, float]) -> tuple[str, dict[str, float]]:
    """Returns the fastest lifting, and the seconds per step by lifting.

    Both are from the measurements of process 0, so that all processes choose alike.

    Args:
        measured: The seconds per step that this process measured, as {'map': 0.2, 'vmap': 0.1}.
    """
    seconds_by_lifting = agreement.call_in_process_0(lambda: measured)
    times = []
    for lifting, seconds in seconds_by_lifting.items():
        times.append(f'{seconds:.3g} s with the trials {_LIFTING_IN_WORDS[lifting]}')
    log.info('a step takes %s; the faster way is kept', ', '.join(times))
    fastest = min(seconds_by_lifting, key=lambda lifting: seconds_by_lifting[lifting])
    return fastest, seconds_by_lifting


def _liftings(setting: str, num_trials: int) -> tuple[str, ...]:
    """Returns the liftings to compile for a setting of train.lifting."""
    if setting != 'auto':
        return (setting,)
    if num_trials == 1:
        return ('vmap',)
    return ('map', 'vmap')


def _broadcast_like(value: np.ndarray, like: Any) -> jax.Array:
    """Broadcasts `value` to an array with the shape, dtype and sharding of `like`."""
    broadcast = np.broadcast_to(np.asarray(value, like.dtype), like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: broadcast[index])


def constant_batch(config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """Returns a global batch of ones, for timing."""
    num_steps = config.train.steps_per_dispatch
    local_trials, local_rows = sharding.local_share(config, mesh)
    local_batch = {}
    for name, (length, dtype) in task_of(config).array_shapes(config.model).items():
        shape = (num_steps, len(local_trials), len(local_rows), length)
        local_batch[name] = np.ones(shape, dtype)
    return sharding.place_batch(config, mesh, local_batch)


def seconds_per_dispatch(steps: Callable, state: dict, *arguments: dict) -> float:
    """Calls a train program twice and returns the seconds of the faster call.

    Args:
        steps: Maps (state, *arguments) to (next state, metrics).
        state: The state before the first call, which frees its memory.
        *arguments: The arguments of both calls.
    """
    jax.block_until_ready((state, arguments))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(steps(state, *arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def warm_up(config: Config) -> tuple[float, float]:
    """Compiles a run's train program and times it on a batch of ones.

    Returns:
        (seconds of a step of all trials, seconds of the compilation), as measured by process 0.
    """
    sharding.require_memory(config)
    with without_cache():  # a program from the cache would have no compilation to time
        program = build(config)
    # `build` has timed the program already if it had to choose between two liftings.
    seconds_per_step = program.measured.get(program.lifting)
    if seconds_per_step is None:
        batch = constant_batch(config, program.mesh)
        seconds = seconds_per_dispatch(program.train, program.init(None), batch)
        seconds_per_step = seconds / config.train.steps_per_dispatch
    return agreement.call_in_process_0(lambda: (seconds_per_step, program.compile_seconds))


@contextlib.contextmanager
def _without_slow_compile_notice(mesh: Mesh) -> Iterator[None]:
    """Hides XLA's notice of a slow compilation inside a `with` block, on a single CPU device.

    On several devices or an accelerator, nothing is hidden.
    """
    if mesh.size > 1 or mesh.devices.flat[0].platform != 'cpu':
        yield  # XLA may warn of slow programs here
        return
    # XLA cannot hide this notice alone. Failed compilations still raise errors.
    utils.absl_set_min_log_level(_FATAL)
    try:
        yield
    finally:
        level_of_user = os.environ.get('TF_CPP_MIN_LOG_LEVEL', '')
        level = int(level_of_user) if level_of_user.isdecimal() else _WARNINGS
        utils.absl_set_min_log_level(level)


def _quick_to_compile(mesh: Mesh) -> dict[str, int] | None:
    """Returns XLA options for quick compilation on a CPU; None on other devices.

    Results stay bitwise equal. Options that the user has set in XLA_FLAGS are left out.
    """
    if mesh.devices.flat[0].platform != 'cpu':
        return None
    options = {'xla_backend_optimization_level': 1, 'xla_cpu_parallel_codegen_split_count': 1}
    flags_of_user = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in options.items() if name not in flags_of_user}

"""The compiled programs of a run: functions of one trial, lifted to X trials on a mesh."""

import contextlib
import dataclasses
import functools
import logging
import operator
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
from qkattn.train.step import init_stack, train_trial

# The scalars that may differ between the trials of a run, with their types.
HYPER = {'seed': np.uint32, 'learning_rate': np.float32, 'weight_decay': np.float32}
# Levels of XLA's messages: the one that JAX sets at its import, and that of fatal errors alone.
_WARNINGS = 1
_FATAL = 3
# How trials are trained under each lifting.
_LIFTING_IN_WORDS = {'map': 'one after another', 'vmap': 'side by side'}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's train program on its mesh."""

    mesh: Mesh
    # 'vmap' or 'map', as in `map_over_trials`.
    lifting: str
    # ShapeDtypeStructs with shardings; checkpoints are restored like these.
    abstract_state: dict
    # (state, batch [C, X, A, B, ...]) -> (state, metrics [C, X]): C steps of X trials, each with A
    # microbatches of B rows.
    train: Callable[[dict, dict], tuple[dict, dict]]
    # Makes the state before step 0. All trials start from the given parameters (numpy, of one
    # model). If these are None, each trial draws its own from its seed.
    init: Callable[[dict | None], dict]
    compile_seconds: float
    # Seconds per step by lifting. Empty if no measurement was needed to choose the lifting.
    measured: dict[str, float]


def map_over_trials(of_trial: Callable, lifting: str, mesh: Mesh) -> Callable:
    """Turns a function of one trial into a function of X trials.

    All arrays that the returned function takes and returns have a leading axis [X]. The trials do
    not depend on each other.

    Args:
      of_trial: the function of one trial.
      lifting: 'vmap' computes all trials side by side. 'map' computes one trial after another on
        each slice of the mesh's axis `trial`. A single trial needs neither.
      mesh: the mesh of the run.
    """
    num_slices = mesh.shape['trial']
    side_by_side = jax.vmap(of_trial, spmd_axis_name='trial')

    def lifted(*stacked: Any) -> Any:
        """Calls `of_trial` for each of X trials; arguments and results are stacked, [X, ...]."""
        num_trials = len(jax.tree.leaves(stacked)[0])
        if num_trials == 1:
            arguments_of_trial = jax.tree.map(operator.itemgetter(0), stacked)
            results = of_trial(*arguments_of_trial)
            return jax.tree.map(lambda a: a[None], results)
        if lifting == 'vmap':
            return side_by_side(*stacked)
        if num_slices == 1:
            return jax.lax.map(lambda arguments: of_trial(*arguments), stacked)
        # In each turn, every slice of the mesh computes one of its trials. With 6 trials on 2
        # slices, the three turns compute the trials 0 and 3, then 1 and 4, then 2 and 5.
        turns = jax.tree.map(lambda array_X: _split_into_turns(array_X, num_slices), stacked)
        results = jax.lax.map(lambda arguments: side_by_side(*arguments), turns)
        return jax.tree.map(_join_turns, results)

    return lifted


def _split_into_turns(array_X: jax.Array, num_slices: int) -> jax.Array:
    """Turns an array [X, ...] into [turns, slices, ...], one trial for each slice in a turn.

    Each slice of the mesh holds a block of trials. For example, of 6 trials on 2 slices, the first
    slice holds the trials 0, 1, 2 and the second one 3, 4, 5. The turns are [0, 3], [1, 4], [2, 5].
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
    """Returns a function that takes C training steps of X trials; one call of it is a dispatch.

    It maps (state, hyper, batches) to (state, metrics):

        state     as `init_stack` returns it
        hyper     the scalars HYPER of all trials, [X]
        batches   [C, X, A, B, ...]: steps, trials, microbatches, rows
        metrics   [C, X]

    With the lifting 'map', a trial takes all C steps before the next trial begins, so that its
    state stays in fast memory.
    """

    # First the C steps of one trial. `map_over_trials` below makes them a function of X trials.
    def steps_of_trial(first_step: jax.Array, trial: dict, hyper: dict, batches: dict) -> tuple:
        """C steps of one trial, on batches [C, A, B, ...]."""

        def one_step(trial: dict, step_and_batch: tuple) -> tuple[dict, dict]:
            step, batch = step_and_batch
            return train_trial(config, step, trial, hyper, batch)

        num_steps = batches['targets_BT'].shape[0]
        steps_C = first_step + jnp.arange(num_steps)
        return jax.lax.scan(one_step, trial, (steps_C, batches))

    def many_steps(state: dict, hyper: dict, batches: dict) -> tuple[dict, dict]:
        """C steps of all trials, on batches [C, X, A, B, ...]."""
        first_step = state['step']
        num_steps = batches['targets_BT'].shape[0]

        # All trials are at the same step, so `first_step` is the only argument of `steps_of_trial`
        # without an axis of trials.
        steps_of_all_trials = map_over_trials(
            functools.partial(steps_of_trial, first_step), lifting, mesh
        )
        batches_XC = _swap_leading_axes(batches)
        with use_placement(sharding.place_activations(mesh)), choice.tracing_for_mesh(mesh):
            trials, metrics_XC = steps_of_all_trials(state['trials'], hyper, batches_XC)

        next_state = {'step': first_step + num_steps, 'trials': trials}
        return next_state, _swap_leading_axes(metrics_XC)

    return many_steps


def _swap_leading_axes(tree: dict) -> dict:
    """Swaps the axes of steps and trials of every array: [C, X, ...] to [X, C, ...], and back."""
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)


# A run has few such programs. The size limit frees those of earlier runs in the same process.
@functools.lru_cache(maxsize=16)
def stack_program(
    config: Config, lifting: str, mesh: Mesh, measure: Callable[[Config, dict, dict], dict]
) -> Callable[[dict, dict], dict[str, jax.Array]]:
    """Returns a compiled function that evaluates the models of X trials on the same batch.

    For example, `measure` computes the losses of one model on B rows, {'loss': [B]}. The compiled
    function takes the parameters of 6 trials, each array with a leading axis of 6, and the rows. It
    returns the losses of all trials, {'loss': [6, B]}.

    Args:
      config: the settings of the run.
      lifting: 'vmap' evaluates the trials side by side, 'map' one after another, as in
        `map_over_trials`.
      mesh: the mesh of the run.
      measure: maps (config, params, batch) of one trial to a dict of arrays.

    Returns:
      A function that maps (params [X, ...], batch [B, ...]) to a dict of arrays [X, ...]. Every
      device gets these arrays in full.
    """

    def measure_trials(params_of_trials: dict, batch: dict) -> dict[str, jax.Array]:
        batch_over_devices = jax.lax.with_sharding_constraint(batch, sharding.row_sharding(mesh))

        def measure_trial(params: dict) -> dict[str, jax.Array]:
            return measure(config, params, batch_over_devices)

        measure_each = map_over_trials(measure_trial, lifting, mesh)
        # Inside of these blocks, a model splits its activations over the mesh, and chooses an
        # attention kernel that runs on the devices of the mesh.
        with use_placement(sharding.place_activations(mesh)), choice.tracing_for_mesh(mesh):
            return measure_each(params_of_trials)

    on_every_device = NamedSharding(mesh, P())
    return jax.jit(measure_trials, out_shardings=on_every_device)


def abstract_inputs(config: Config, mesh: Mesh) -> tuple[dict, dict, Any]:
    """Returns the arguments (state, hyper, batch) of `train_steps`, without their values.

    In place of arrays they have ShapeDtypeStructs, with a sharding over the mesh.
    """
    leading = leading_shape(config)  # of the batch: steps, trials, microbatches, rows
    _, X, _, _ = leading

    over_trials = NamedSharding(mesh, P('trial'))
    hyper = {}
    for name, dtype in HYPER.items():
        hyper[name] = jax.ShapeDtypeStruct((X,), dtype, sharding=over_trials)

    def with_sharding(
        leaf: jax.ShapeDtypeStruct, sharding_of_leaf: NamedSharding
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of_leaf)

    shapes = jax.eval_shape(functools.partial(init_stack, config), hyper['seed'])
    state = jax.tree.map(with_sharding, shapes, sharding.state_shardings(shapes, mesh))

    over_rows = sharding.batch_sharding(mesh)
    batch = {}
    for name, (length, array_dtype) in task_of(config).array_shapes(config.model).items():
        batch[name] = jax.ShapeDtypeStruct((*leading, length), array_dtype, sharding=over_rows)
    return state, hyper, batch


def lower(
    config: Config, lifting: str, mesh: Mesh, state: dict, hyper: dict, batch: Any
) -> jax.stages.Lowered:
    """Lowers the train program, so that it can be compiled.

    Args:
      config: the settings of the run.
      lifting: 'vmap' computes the trials side by side, 'map' one after another.
      mesh: the mesh of the run.
      state, hyper, batch: the shapes of the program's arguments, as `abstract_inputs` returns them.

    Raises ConfigError if model.kernel cannot compute the attention of the model.
    """
    check_kernel(config, mesh)
    state_shardings = jax.tree.map(lambda a: a.sharding, state)
    replicated = NamedSharding(mesh, P())
    steps = jax.jit(
        train_steps(config, lifting, mesh),
        donate_argnums=0,
        out_shardings=(state_shardings, replicated),
    )
    return steps.lower(state, hyper, batch)


def build(config: Config, lifting: str | None = None) -> Program:
    """Compiles the run's train program.

    Args:
      config: the settings of the run.
      lifting: how trials are computed: 'vmap', side by side, or 'map', one after another. An
        earlier start of the run has chosen it. None takes config.train.lifting. If that is 'auto',
        both programs are compiled, and the faster one is taken.
    """
    keep_freed_memory()
    mesh = sharding.make_mesh(config.mesh)
    trials = config.trials.trials()
    abstract_state, abstract_hyper, abstract_batch = abstract_inputs(config, mesh)

    # The hyperparameters of all trials, {'seed': [X], ...}, on the devices of the mesh.
    hyper: dict[str, jax.Array] = {}
    for name, abstract in abstract_hyper.items():
        value_X = np.array([trial[name] for trial in trials])
        hyper[name] = _broadcast_like(value_X, abstract)
    init = _initializer(config, mesh, abstract_state, hyper['seed'])

    # Compile the program for each lifting that may be chosen.
    candidates = _liftings(lifting or config.train.lifting, len(trials))
    programs: dict[str, tuple[Callable, float]] = {}
    for candidate in candidates:
        programs[candidate] = _compile_steps(
            config, candidate, mesh, abstract_state, abstract_hyper, abstract_batch
        )

    # If there are several, take the one with the faster steps.
    chosen = candidates[0]
    seconds_per_step: dict[str, float] = {}
    if len(candidates) > 1:
        batch = constant_batch(config, mesh)
        for candidate, (steps, _) in programs.items():
            seconds = seconds_per_dispatch(steps, lambda: (init(None), hyper, batch))
            seconds_per_step[candidate] = seconds / config.train.steps_per_dispatch
        chosen, seconds_per_step = _fastest(seconds_per_step)
    chosen_steps, compile_seconds = programs[chosen]

    def train(state: dict, batch: dict) -> tuple[dict, dict]:
        return chosen_steps(state, hyper, batch)

    return Program(mesh, chosen, abstract_state, train, init, compile_seconds, seconds_per_step)


def _compile_steps(
    config: Config, lifting: str, mesh: Mesh, state: dict, hyper: dict, batch: Any
) -> tuple[Callable, float]:
    """Compiles `train_steps` for the arguments of `lower`.

    Returns the compiled function, and the seconds that this took.
    """
    start = time.perf_counter()
    lowered = lower(config, lifting, mesh, state, hyper, batch)
    with _without_slow_compile_notice(mesh):
        steps = lowered.compile()
    return steps, time.perf_counter() - start


def _initializer(
    config: Config, mesh: Mesh, abstract_state: dict, seed_X: jax.Array
) -> Callable[[dict | None], dict]:
    """Returns the function `Program.init`, which makes the state of all trials before step 0."""
    draw_initial_state = jax.jit(
        functools.partial(init_stack, config),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state),
        compiler_options=_quick_to_compile(mesh),
    )

    def init(params: dict | None) -> dict:
        state = draw_initial_state(seed_X)
        # Given parameters replace the drawn ones, and are copied to every trial.
        if params is not None:
            drawn_params = state['trials'].pop('params')
            state['trials']['params'] = jax.tree.map(_broadcast_like, params, drawn_params)
        return state

    return init


def _fastest(measured: dict[str, float]) -> tuple[str, dict[str, float]]:
    """Returns the fastest lifting, and the seconds per step that process 0 has measured.

    `measured` holds what this process has measured, such as {'map': 0.2, 'vmap': 0.1}.
    """
    # All processes of a job have to choose the same lifting, so they use the times of process 0.
    seconds_by_lifting = agreement.call_in_process_0(lambda: measured)
    times = []
    for lifting, seconds in seconds_by_lifting.items():
        times.append(f'{seconds:.3g} s with the trials {_LIFTING_IN_WORDS[lifting]}')
    log.info('a step takes %s; the faster way is kept', ', '.join(times))
    fastest = min(seconds_by_lifting, key=lambda lifting: seconds_by_lifting[lifting])
    return fastest, seconds_by_lifting


def _liftings(setting: str, num_trials: int) -> tuple[str, ...]:
    """Returns the liftings to compile: the one that is set, or all that 'auto' chooses from."""
    if setting != 'auto':
        return (setting,)
    if num_trials == 1:
        return ('vmap',)
    return ('map', 'vmap')


def _broadcast_like(value: np.ndarray, like: Any) -> jax.Array:
    """Broadcasts `value` to an array with the shape, dtype and sharding of `like`."""
    whole = np.broadcast_to(np.asarray(value, like.dtype), like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def constant_batch(config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """Returns a global batch of ones, for timing."""
    local_trials, local_rows = sharding.local_share(config, mesh)
    leading = (config.train.steps_per_dispatch, len(local_trials), len(local_rows))
    local = {}
    for name, (length, dtype) in task_of(config).array_shapes(config.model).items():
        local[name] = np.ones((*leading, length), dtype)
    return sharding.place_batch(config, mesh, local)


def seconds_per_dispatch(steps: Callable, inputs: Callable[[], tuple]) -> float:
    """Calls a train program twice and returns the seconds of the faster call.

    Args:
      steps: maps (state, *others) to (state, metrics), and donates the state.
      inputs: makes the arguments (state, *others) of the first call.
    """
    state, *others = jax.block_until_ready(inputs())
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(steps(state, *others))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def warm_up(config: Config) -> tuple[float, float]:
    """Compiles a run's train program and times it on a batch of ones.

    Returns the seconds of a training step, which all trials take together, and the seconds of the
    compilation. All processes of a job get the times of process 0.
    """
    sharding.require_memory(config)
    with without_cache():
        program = build(config)
    # `build` has already timed the program if it had to choose the lifting.
    per_step = program.measured.get(program.lifting)
    if per_step is None:
        batch = constant_batch(config, program.mesh)
        seconds = seconds_per_dispatch(program.train, lambda: (program.init(None), batch))
        per_step = seconds / config.train.steps_per_dispatch
    return agreement.call_in_process_0(lambda: (per_step, program.compile_seconds))


@contextlib.contextmanager
def _without_slow_compile_notice(mesh: Mesh) -> Iterator[None]:
    """Hides XLA's notice that compiling takes more than two minutes, if there is one CPU device.

    The progress display shows the seconds in any case. XLA cannot turn off this notice alone, so
    all of its messages are hidden inside the `with` block, except fatal ones. A compilation that
    fails still raises its error.

    With several devices or an accelerator nothing is hidden, because some messages warn of slow
    programs.
    """
    if mesh.size > 1 or mesh.devices.flat[0].platform != 'cpu':
        yield
        return
    utils.absl_set_min_log_level(_FATAL)
    try:
        yield
    finally:
        level_of_user = os.environ.get('TF_CPP_MIN_LOG_LEVEL', '')
        level = int(level_of_user) if level_of_user.isdecimal() else _WARNINGS
        utils.absl_set_min_log_level(level)


def _quick_to_compile(mesh: Mesh) -> dict[str, int] | None:
    """Returns XLA options that compile a program quickly on a CPU; None on other devices.

    They are for a program that runs once, where compilation takes most of the time. They change no
    bit of the result. Options that the user has set in XLA_FLAGS are left out.
    """
    if mesh.devices.flat[0].platform != 'cpu':
        return None
    options = {'xla_backend_optimization_level': 1, 'xla_cpu_parallel_codegen_split_count': 1}
    flags_of_user = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in options.items() if name not in flags_of_user}

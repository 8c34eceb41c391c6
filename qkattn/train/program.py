"""The compiled programs of a run, and the choice of how they are lifted over trials."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import Config
from qkattn.data.tasks.task_registry import task_of
from qkattn.train import sharding
from qkattn.train.step import eval_step, graph_of, init_stack, train_steps

LIFTINGS = ('map', 'vmap')

HYPER = {'seed': np.uint32, 'learning_rate': np.float32, 'weight_decay': np.float32}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's train and eval programs on its mesh.

    Attributes:
      mesh: (trial, data, fsdp, tensor).
      lifting: 'vmap' or 'map'.
      abstract_state: ShapeDtypeStructs with shardings, the target of a restore.
      hyper: seed, learning_rate and weight_decay of each trial, on the mesh.
      train: (state, batch [C, X, A, B, ...]) -> (state, metrics [C, X]); the state given is
        consumed.
      evaluate: (state, batch [B, ...]) -> sums [X] of `step.measure`.
      init: () -> state before step 0.
      compile_seconds: time to compile `train`.
      measured: seconds per step by lifting, where it was chosen by measurement.
    """

    mesh: Mesh
    lifting: str
    abstract_state: dict
    hyper: dict[str, jax.Array]
    train: Callable[[dict, dict], tuple[dict, dict]]
    evaluate: Callable[[dict, dict], dict]
    init: Callable[[], dict]
    compile_seconds: float
    measured: dict[str, float]


def abstract_inputs(config: Config, mesh: Mesh | AbstractMesh) -> tuple[dict, dict, Any]:
    """ShapeDtypeStructs with shardings of the train program's state, hyper and batch.

    On an AbstractMesh nothing needs a device: with these a step lowers for a pod from any machine.
    """
    trials = len(config.trials.trials())
    over_trials = NamedSharding(mesh, P('trial'))
    hyper = {
        name: jax.ShapeDtypeStruct((trials,), dtype, sharding=over_trials)
        for name, dtype in HYPER.items()
    }
    seeds = jax.ShapeDtypeStruct((trials,), HYPER['seed'])
    state = jax.eval_shape(lambda seeds: init_stack(config, seeds), seeds)
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        state,
        sharding.state_shardings(state, mesh),
    )
    leading = leading_shape(config)
    placed = sharding.batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct((*leading, length), dtype, sharding=placed)
        for name, (length, dtype) in task_of(config).array_shapes(config.model).items()
    }
    return state, hyper, batch


def leading_shape(config: Config) -> tuple[int, int, int, int]:
    """[C, X, A, B] of one dispatch: steps, trials, microbatches, rows."""
    train = config.train
    return (
        train.steps_per_dispatch,
        len(config.trials.trials()),
        train.accumulation,
        train.batch_size // train.accumulation,
    )


def local_rows(config: Config, mesh: Mesh) -> slice:
    """The rows of the global batch that this process's devices hold.

    Row r of a batch is row r // A of microbatch r % A, so that these rows are consecutive.
    """
    shape = leading_shape(config)
    parts = sharding.batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    bounds = [part[3].indices(shape[3]) for part in parts]
    return slice(min(b[0] for b in bounds) * shape[2], max(b[1] for b in bounds) * shape[2])


def place_batch(
    config: Config, mesh: Mesh, local: dict[str, np.ndarray], rows: slice
) -> dict[str, jax.Array]:
    """The global batch [C, X, A, B, ...] of one dispatch from the rows [C, X, ...] read here.

    The batch is cut into microbatches here rather than in the program, where the cut would move
    rows between devices.
    """
    return {name: _place(config, mesh, array, rows) for name, array in local.items()}


def _place(config: Config, mesh: Mesh, local_CXBT: np.ndarray, rows: slice) -> jax.Array:
    shape = (len(local_CXBT), *leading_shape(config)[1:], local_CXBT.shape[-1])
    C, X, A, B, T = shape
    local_CXABT = np.swapaxes(local_CXBT.reshape(C, X, -1, A, T), 2, 3)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[3].indices(B)
        first = rows.start // A
        return local_CXABT[index[0], index[1], :, start - first : stop - first]

    return jax.make_array_from_callback(shape, sharding.batch_sharding(mesh), part)


def place_everywhere(mesh: Mesh, tree: Any) -> Any:
    """Numpy values on every device of the mesh."""
    replicated = NamedSharding(mesh, P())
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(np.shape(a), replicated, lambda i: a[i]), tree
    )


def build(config: Config, lifting: str | None = None, params: dict | None = None) -> Program:
    """Compiles the run's programs.

    Args:
      config: validated.
      lifting: pins the choice that an earlier start of the same run recorded; None goes by
        config.train.lifting, measuring where that is 'auto'.
      params: what all trials start from; None draws from their seeds.

    Raises:
      ConfigError: the mesh needs more devices than there are.
    """
    mesh = sharding.make_mesh(config.mesh)
    trials = config.trials.trials()
    abstract, abstract_hyper, batch = abstract_inputs(config, mesh)
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    hyper = {
        name: jax.make_array_from_callback(
            wanted.shape,
            wanted.sharding,
            np.array([trial[name] for trial in trials], wanted.dtype).__getitem__,
        )
        for name, wanted in abstract_hyper.items()
    }
    replicated = NamedSharding(mesh, P())
    init = jax.jit(lambda seeds: init_stack(config, seeds), out_shardings=shardings)
    graph = graph_of(config)

    def compiled(kind: str) -> tuple[Callable, float]:
        start = time.perf_counter()
        steps = jax.jit(
            train_steps(config, graph, kind, mesh),
            donate_argnums=0,
            out_shardings=(shardings, replicated),
        )
        return steps.lower(abstract, hyper, batch).compile(), time.perf_counter() - start

    wanted = lifting or config.train.lifting
    if wanted == 'auto' and len(trials) == 1:
        wanted = 'vmap'
    measured: dict[str, float] = {}
    if wanted == 'auto':
        programs = {kind: compiled(kind) for kind in LIFTINGS}
        for kind, (steps, _) in programs.items():
            measured[kind] = _seconds_per_step(
                config,
                mesh,
                lambda state, batch, steps=steps: steps(state, hyper, batch),
                lambda: init(hyper['seed']),
            )
        wanted = min(measured, key=measured.get)
        log.info('lifting %s chosen; seconds per step: %s', wanted, measured)
        steps, compile_seconds = programs[wanted]
    else:
        steps, compile_seconds = compiled(wanted)

    evaluate = jax.jit(eval_step(config, graph, wanted, mesh), out_shardings=replicated)
    return Program(
        mesh=mesh,
        lifting=wanted,
        abstract_state=abstract,
        hyper=hyper,
        train=lambda state, batch: steps(state, hyper, batch),
        evaluate=lambda state, batch: evaluate(state['trials']['params'], batch),
        init=lambda: _start_from(params, init(hyper['seed'])),
        compile_seconds=compile_seconds,
        measured=measured,
    )


def warm_up(config: Config) -> tuple[float, float]:
    """Seconds per step of the whole stack, measured on constant rows, and seconds to compile."""
    program = build(config)
    if program.measured:
        return program.measured[program.lifting], program.compile_seconds
    steps = _seconds_per_step(config, program.mesh, program.train, program.init)
    return steps, program.compile_seconds


def _start_from(params: dict | None, state: dict) -> dict:
    """The fresh state, with `params` in every trial."""
    if params is None:
        return state

    def place(given, fresh):
        stacked = np.broadcast_to(np.asarray(given, fresh.dtype), fresh.shape)
        return jax.make_array_from_callback(fresh.shape, fresh.sharding, lambda i: stacked[i])

    placed = jax.tree.map(place, params, state['trials']['params'])
    return {**state, 'trials': {**state['trials'], 'params': placed}}


def _seconds_per_step(config: Config, mesh: Mesh, steps: Callable, init: Callable) -> float:
    """The faster of two timed dispatches on scratch state and constant rows."""
    rows = local_rows(config, mesh)
    leading = (*leading_shape(config)[:2], rows.stop - rows.start)
    local = {
        name: np.ones((*leading, length), dtype)
        for name, (length, dtype) in task_of(config).array_shapes(config.model).items()
    }
    batch = place_batch(config, mesh, local, rows)
    state = jax.block_until_ready(init())
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        state, metrics = steps(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return min(seconds) / config.train.steps_per_dispatch

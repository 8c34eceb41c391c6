"""The compiled programs of a run."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import Config
from qkattn.data.tasks.task_registry import task_of
from qkattn.jobs import agreement
from qkattn.jobs.machine import keep_freed_memory
from qkattn.model.sites import check_kernel
from qkattn.train import attention_metrics, sharding
from qkattn.train.compiling import without_cache
from qkattn.train.evaluation import eval_step
from qkattn.train.lifting import LIFTINGS, measured_text, seconds_per_dispatch
from qkattn.train.placement import constant_batch, leading_shape, require_memory
from qkattn.train.step import init_stack, train_steps

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
      train: (state, batch [C, X, A, B, ...]) -> (state, metrics [C, X]); donates its state.
      evaluate: (state, batch [B, ...]) -> sums [X, B] of `evaluation.measure`.
      attention: (state, batch [B, ...]) -> `metrics.ATTENTION`, each [X].
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
    attention: Callable[[dict, dict], dict]
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
    placed = sharding.batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct((*leading_shape(config), length), dtype, sharding=placed)
        for name, (length, dtype) in task_of(config).array_shapes(config.model).items()
    }
    return state, hyper, batch


def lower(
    config: Config, lifting: str, mesh: Mesh, state: dict, hyper: dict, batch: Any
) -> jax.stages.Lowered:
    """The train program, traced on abstract inputs, ready to compile for the mesh's devices.

    Raises:
      ConfigError: model.kernel cannot serve the model on these devices.
    """
    check_kernel(config.model, mesh)
    shardings = jax.tree.map(lambda a: a.sharding, state), NamedSharding(mesh, P())
    steps = jax.jit(train_steps(config, lifting, mesh), donate_argnums=0, out_shardings=shardings)
    return steps.lower(state, hyper, batch)


def build(config: Config, lifting: str | None = None, params: dict | None = None) -> Program:
    """Compiles the run's programs.

    Args:
      config: validated.
      lifting: the choice that an earlier start of the same run recorded; None follows
        config.train.lifting, with a measurement where that is 'auto'.
      params: initial parameters of all trials; None draws them from the seeds.

    Raises:
      ConfigError: the mesh needs more devices than there are.
    """
    keep_freed_memory()
    mesh = sharding.make_mesh(config.mesh)
    trials = config.trials.trials()
    abstract, abstract_hyper, batch = abstract_inputs(config, mesh)
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    hyper: dict[str, jax.Array] = {
        name: jax.make_array_from_callback(
            wanted.shape,
            wanted.sharding,
            np.array([trial[name] for trial in trials], wanted.dtype).__getitem__,
        )
        for name, wanted in abstract_hyper.items()
    }
    replicated = NamedSharding(mesh, P())
    init = jax.jit(
        lambda seeds: init_stack(config, seeds),
        out_shardings=shardings,
        compiler_options=_quick_to_compile(mesh),
    )

    def compiled(kind: str) -> tuple[Callable, float]:
        start = time.perf_counter()
        lowered = lower(config, kind, mesh, abstract, abstract_hyper, batch)
        return lowered.compile(), time.perf_counter() - start

    kinds: tuple[str, ...] = (lifting or config.train.lifting,)
    if kinds == ('auto',):
        kinds = tuple(LIFTINGS) if len(trials) > 1 else ('vmap',)
    programs = {kind: compiled(kind) for kind in kinds}
    measured: dict[str, float] = {}
    if len(kinds) > 1:
        scratch = constant_batch(config, mesh)
        for kind, (run, _) in programs.items():
            seconds = seconds_per_dispatch(run, lambda: (init(hyper['seed']), hyper, scratch))
            measured[kind] = seconds / config.train.steps_per_dispatch
        measured = agreement.on_owner(lambda: measured)
        log.info('%s', measured_text(measured))
    chosen = min(measured, key=lambda kind: measured[kind]) if measured else kinds[0]
    steps, compile_seconds = programs[chosen]

    evaluate = jax.jit(eval_step(config, chosen, mesh), out_shardings=replicated)
    attention = jax.jit(attention_metrics.program(config, chosen, mesh), out_shardings=replicated)
    return Program(
        mesh=mesh,
        lifting=chosen,
        abstract_state=abstract,
        hyper=hyper,
        train=lambda state, batch: steps(state, hyper, batch),
        evaluate=lambda state, batch: evaluate(state['trials']['params'], batch),
        attention=lambda state, batch: attention(state['trials']['params'], batch),
        init=lambda: _start_from(params, init(hyper['seed'])),
        compile_seconds=compile_seconds,
        measured=measured,
    )


def warm_up(config: Config) -> tuple[float, float]:
    """Seconds per step of the whole stack, timed on constant rows, and seconds to compile."""
    require_memory(config)
    with without_cache():
        program = build(config)
    if program.measured:
        per_step = program.measured[program.lifting]
    else:
        batch = constant_batch(config, program.mesh)
        seconds = seconds_per_dispatch(program.train, lambda: (program.init(), batch))
        per_step = seconds / config.train.steps_per_dispatch
    return agreement.on_owner(lambda: (per_step, program.compile_seconds))


def _quick_to_compile(mesh: Mesh) -> dict[str, int] | None:
    """Options for a program that is run once: on a CPU its compilation is what it costs.

    With them drawing the parameters gives the same bits in the same time.
    """
    options = {'xla_backend_optimization_level': 1, 'xla_cpu_parallel_codegen_split_count': 1}
    chosen = os.environ.get('XLA_FLAGS', '')
    if mesh.devices.flat[0].platform != 'cpu':
        return None
    return {name: value for name, value in options.items() if name not in chosen}


def _start_from(params: dict | None, state: dict) -> dict:
    """The initial state, with `params` in every trial."""
    if params is None:
        return state

    def place(given: np.ndarray, fresh: jax.Array) -> jax.Array:
        stacked = np.broadcast_to(np.asarray(given, fresh.dtype), fresh.shape)
        return jax.make_array_from_callback(fresh.shape, fresh.sharding, lambda i: stacked[i])

    placed = jax.tree.map(place, params, state['trials']['params'])
    return {**state, 'trials': {**state['trials'], 'params': placed}}

"""Parts of qkattn as works: stacks of trials, workers, compilation, decoding, batches."""

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.benchmark.peers import own
from qkattn.benchmark.work import Work
from qkattn.config import Config, ModelConfig, from_json
from qkattn.data.pipeline import TrainBatches
from qkattn.data.tasks.task_registry import rows_of
from qkattn.decode.generate import generate
from qkattn.decode.kv_cache import init_cache
from qkattn.model import build, cost
from qkattn.run.cores import usable
from qkattn.train import program, sharding
from qkattn.train.placement import place_batch
from qkattn.train.step import init_stack, init_trial, train_trial

_STATUS = Path('/proc/self/status')


def stack(config: dict[str, Any]) -> Work:
    """`own.train` of a stack of trials; a step is one of one of its trials."""
    work, trials = own.train(config), len(from_json(Config, config).trials.trials())
    extra = {**work.extra, 'compilations_per_trial': 1 / trials}
    for name in ('tokens', 'flops'):
        extra[name] /= trials
    return Work(work.run, work.steps * trials, extra)


def one_trial(config: dict[str, Any]) -> Work:
    """The steps of a run of one trial, written without the axis of trials, and its metrics."""
    of_run = from_json(Config, config)
    (trial,) = of_run.trials.trials()
    hyper = {name: jnp.asarray(trial[name], dtype) for name, dtype in program.HYPER.items()}
    placed = place_batch(of_run, sharding.make_mesh(of_run.mesh), own.batch_of(of_run))
    batch = {name: a_CXABT[:, 0] for name, a_CXABT in placed.items()}

    def steps(state: dict, hyper: dict, batches: dict) -> tuple[dict, dict]:
        def step(state: dict, batch: dict) -> tuple[dict, dict]:
            after, metrics = train_trial(of_run, state['step'], state['trial'], hyper, batch)
            return {'step': state['step'] + 1, 'trial': after}, metrics

        return jax.lax.scan(step, state, batches)

    def initial() -> dict:
        return {'step': jnp.int32(0), 'trial': init_trial(of_run, hyper['seed'])}

    state = jax.jit(initial)()
    start = time.perf_counter()
    compiled = jax.jit(steps, donate_argnums=0).lower(state, hyper, batch).compile()
    extra = {**own.costs(of_run), 'compile_seconds': time.perf_counter() - start}
    extra['compilations_per_trial'] = 1

    def run(calls: int) -> dict:
        nonlocal state
        for _ in range(calls):
            state, metrics = compiled(state, hyper, batch)
        return jax.block_until_ready((state, metrics))[1]

    return Work(run, of_run.train.steps_per_dispatch, extra)


def workers(work: str, settings: dict[str, Any]) -> Work:
    """The same work at once in as many processes as there are cores, one bound to each.

    A step is one of one of the processes, which end with this one.
    """
    cores = usable()
    orders = [{'cores': [core], 'works': [(work, settings)]} for core in cores]
    command = [sys.executable, '-m', 'qkattn.benchmark.contestant']
    options: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
    options['env'] = {**os.environ, 'OMP_NUM_THREADS': '1'}
    processes = [subprocess.Popen([*command, json.dumps(order)], **options) for order in orders]
    answers = [_answer(process) for process in processes]
    extra = dict(answers[0]['extra'])
    extra['compilations_per_trial'] = 1 / len(cores)  # they compile at the same time

    def run(calls: int) -> None:
        for process in processes:
            process.stdin.write(f'0 {calls}\n')
            process.stdin.flush()
        for process in processes:
            _answer(process)

    return Work(run, answers[0]['steps'] * len(cores), extra)


def _answer(process: subprocess.Popen) -> dict[str, Any]:
    answer = json.loads(process.stdout.readline() or '{"failed": "a worker has ended"}')
    if 'failed' in answer:
        raise RuntimeError(answer['failed'])
    return answer


def memory_and_compilation(config: dict[str, Any], compilations: int) -> Work:
    """The train program, what it costs before it runs, and what it holds while it does.

    Its extra has seconds 'trace_rounds' and 'compile_rounds' of `compilations` compilations from
    nothing; bytes by XLA's memory analysis; and 'step_peak_bytes', the most that the process has
    held in its first call, on Linux.
    """
    of_run = from_json(Config, config)
    rounds: dict[str, list[float]] = {'trace_rounds': [], 'compile_rounds': []}
    mesh = sharding.make_mesh(of_run.mesh)
    for _ in range(compilations):
        jax.clear_caches()
        start = time.perf_counter()
        abstract = program.abstract_inputs(of_run, mesh)
        lowered = program.lower(of_run, of_run.train.lifting, mesh, *abstract)
        traced = time.perf_counter()
        compiled = lowered.compile()
        rounds['trace_rounds'].append(traced - start)
        rounds['compile_rounds'].append(time.perf_counter() - traced)
    trials = of_run.trials.trials()
    hyper = {n: jnp.array([t[n] for t in trials], dtype) for n, dtype in program.HYPER.items()}
    batch = place_batch(of_run, mesh, own.batch_of(of_run))
    state = jax.jit(functools.partial(init_stack, of_run))(hyper['seed'])

    def run(calls: int) -> None:
        nonlocal state
        for _ in range(calls):
            state, metrics = compiled(state, hyper, batch)
        jax.block_until_ready((state, metrics))

    forget_peak()
    run(1)
    analysis = compiled.memory_analysis()
    extra = {
        **own.costs(of_run),
        **rounds,
        'temporary_bytes': analysis.temp_size_in_bytes,
        'argument_bytes': analysis.argument_size_in_bytes,
        'step_peak_bytes': peak(),
    }
    return Work(run, of_run.train.steps_per_dispatch, extra)


def forget_peak() -> None:
    """The peak of the memory that the process has held begins anew, where the system can."""
    try:
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        return


def peak() -> int | None:
    """Peak bytes that the process has held; None where the system does not tell."""
    if not _STATUS.exists():
        return None
    found = re.search(r'VmHWM:\s*(\d+) kB', _STATUS.read_text())
    return int(found[1]) * 1024 if found else None


def greedy(model: dict[str, Any], rows: int, prompt: int, tokens: int) -> Work:
    """Greedy continuation of `rows` prompts by `tokens` tokens each; a step is one token a row.

    Its extra has the bytes of the real cache at full context, and those predicted.
    """
    config = from_json(ModelConfig, model)
    decoder = build(config, key=jax.random.key(0))
    shape = (rows, prompt)
    prompts = jax.device_get(jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size))
    cache = init_cache(decoder, rows, config.context)
    held = sum(array.nbytes for array in jax.tree.leaves(cache.layers))
    itemsize = jax.tree.leaves(cache.layers)[0].dtype.itemsize
    floats = cost.cache_floats_per_token(config)

    extra = {
        'parameters': cost.count(config)['total'],
        'tokens': rows,
        'cache_bytes': held,
        'predicted_cache_bytes': floats * itemsize * rows * config.context,
    }

    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(generate(decoder, prompts, tokens))

    return Work(run, tokens, extra)


def batches(config: dict[str, Any]) -> Work:
    """The training batches of a run, read ahead as its loop reads them, without a model."""
    of_run = from_json(Config, config)
    rows, train, trials = rows_of(of_run), of_run.train, of_run.trials.trials()
    reader = TrainBatches(
        rows,
        seeds=[trial['seed'] for trial in trials],
        batch_size=train.batch_size,
        num_steps=train.num_steps,
        steps_per_read=train.steps_per_dispatch,
    )

    def run(calls: int) -> None:
        for _ in range(calls):
            next(reader)

    tokens = len(trials) * train.batch_size * of_run.model.context
    return Work(run, train.steps_per_dispatch, {'tokens': tokens})

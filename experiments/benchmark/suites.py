"""The suites: programs of qkattn, sizes and peers. A suite yields groups as they are timed."""

import dataclasses
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmark.race import Row, Work, race
from experiments.benchmark.record import Group
from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
    from_json,
    to_json,
)
from qkattn.config.variant import Variant
from qkattn.decode.generate import generate
from qkattn.decode.kv_cache import init_cache
from qkattn.errors import ConfigError, ProcessError
from qkattn.jobs.machine import usable_cores
from qkattn.jobs.output import run_program
from qkattn.model import build, cost
from qkattn.model.sites import validate
from qkattn.report.prose import counted
from qkattn.study.variant_catalogue import documented_variants
from qkattn.train import program
from qkattn.train.sharding import place_batch

log = logging.getLogger('qkattn.benchmark')

# Works: what is timed


def _batch_of(config: Config) -> dict[str, np.ndarray]:
    """Returns random tokens, targets and loss weights of one dispatch, the same for all trials.

    Their axes are steps, trials, sequences and positions.
    """
    train = config.train
    num_trials = len(config.trials.trials())
    shape = (train.steps_per_dispatch, 1, train.batch_size, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32)
    tokens = np.repeat(tokens, num_trials, axis=1)
    inputs = tokens[..., :-1]
    targets = tokens[..., 1:]
    loss_weights = np.ones(inputs.shape, np.float32)
    return {'tokens_BT': inputs, 'targets_BT': targets, 'loss_weights_BT': loss_weights}


def train(config: Any) -> Work:
    """Builds qkattn's training program for a decoder, whose config is given as JSON.

    A call makes `steps_per_dispatch` steps of every trial. Each of them counts as a step of the
    work: a call with 10 steps per dispatch and 8 trials has 80.
    """
    config = from_json(Config, config)
    built = program.build(config)
    batch = place_batch(config, built.mesh, _batch_of(config))
    state = built.init(None)

    def run(calls: int) -> dict:
        nonlocal state
        for _ in range(calls):
            state, metrics = built.train(state, batch)
        _, metrics = jax.block_until_ready((state, metrics))
        return metrics

    num_trials = len(config.trials.trials())
    return Work(run, steps=config.train.steps_per_dispatch * num_trials)


def greedy(model: dict[str, Any], rows: int, prompt: int, tokens: int) -> Work:
    """Builds the greedy continuation of `rows` prompts by `tokens` tokens each.

    A step is one token of every row. The extra numbers have the bytes of the real cache of keys and
    values at full context. `prompt` is the length of a prompt in tokens.
    """
    config = from_json(ModelConfig, model)
    decoder = build(config, key=jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (rows, prompt), 0, config.vocab_size)
    prompts = jax.device_get(prompts)
    cache = init_cache(decoder, batch=rows, length=config.context)
    cache_arrays = jax.tree.leaves(cache.layers)
    extra = {'tokens': rows, 'cache_bytes': sum(array.nbytes for array in cache_arrays)}

    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(generate(decoder, prompts, tokens))

    return Work(run, steps=tokens, extra=extra)


# Rows

TRAIN = f'{__name__}:train'
GREEDY = f'{__name__}:greedy'
READING = 'experiments.benchmark.reading:batches'
JAX = 'experiments.benchmark.jax_gpt:train'
TORCH = 'experiments.benchmark.torch_gpt:train'


def decoder(
    layers: int,
    width: int,
    heads: int,
    context: int,
    vocabulary: int,
    batch: int,
    dispatch: int = 10,
    **model: Any,
) -> Config:
    """Returns the config of a decoder's run: AdamW with clipping of gradients.

    The model has pre-norm, learned positions, tied embeddings and no biases. `batch` is the number
    of sequences per step. `dispatch` is the number of steps in one call of the compiled program.
    """
    sizes = {'num_layers': layers, 'd_model': width, 'num_heads': heads, 'context': context}
    every = 10 * dispatch
    return Config(
        model=ModelConfig(vocab_size=vocabulary, **sizes | model),
        data=DataConfig(name='tiny_shakespeare', tokenizer='characters'),
        optimizer=OptimizerConfig(decay='coupled'),
        train=TrainConfig(
            batch_size=batch,
            num_steps=1_000_000,
            steps_per_dispatch=dispatch,
            log_every=every,
            eval_every=every,
            checkpoint_every=every,
        ),
        trials=TrialsConfig(seeds=(0,), learning_rates=(1e-3,), weight_decays=(0.1,)),
    )


def with_changes(run: Config, variant: str = 'qk/vo', *, trials: int = 1, **train: Any) -> Config:
    """Returns a run with another variant, number of trials, and fields of its `TrainConfig`.

    Raises ConfigError for a variant that is malformed.
    """
    score_and_value = Variant.parse(variant)._asdict()
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, **score_and_value),
        train=dataclasses.replace(run.train, **train),
        trials=dataclasses.replace(run.trials, seeds=tuple(range(trials))),
    )


def training_row(name: str, run: Config, work: str = TRAIN) -> Row:
    """Returns a row that trains a run, with the tokens and FLOPs of a step.

    Raises ConfigError if the run is not valid.
    """
    validate(run)
    tokens = run.train.batch_size * run.model.context
    flops = tokens * cost.training_flops_per_token(run.model)
    extra = {'tokens': tokens, 'flops': flops}
    return Row(name, settings={'config': to_json(run)}, extra=extra, work=work)


def title_of(run: Config) -> str:
    """Returns a title such as '4 x 128 x context 64, batch 12, float32, 2 cores'."""
    model = run.model
    sizes = f'{model.num_layers} x {model.d_model} x context {model.context}'
    return f'{sizes}, batch {run.train.batch_size}, {model.compute_dtype}, {cores()}'


def cores() -> str:
    """Returns the number of cores that this process may use, such as '2 cores'."""
    return counted(len(usable_cores()), 'core')


# nanoGPT's README, "I only have a macbook", and the shape of its character model for a GPU.
RECIPE = decoder(4, 128, 4, 64, 67, 12)
MEDIUM = decoder(6, 384, 6, 256, 67, 4, dispatch=2)
# GPT-2 124M (Radford et al. 2019), its vocabulary rounded up to a multiple of 128.
LOW: dict[str, Any] = {'compute_dtype': 'bfloat16', 'activation': 'gelu_tanh'}
GPT2 = decoder(12, 768, 12, 1024, 50304, 8, **LOW)
TINY = decoder(1, 16, 2, 8, 11, 2)
# The variants that the suite `decoding` compares.
DECODED = (
    'qk/vo',
    'merged/vo',
    'shared_qk/vo',
    'query_free/vo',
    'key_free/vo',
    'qk/no_v',
    'qk/no_o',
    'qk/merged_vo',
    'qk/k_is_v',
    'latent/latent',
)


class Scale(NamedTuple):
    """How much is measured."""

    shapes: tuple[Config, ...]  # at which training is compared with peers
    variants: Config  # the shape at which `names`, or all variants, are compared
    stacks: Config  # a model of which several trials are in one program
    decoding: Config
    names: tuple[str, ...] = ()
    study: str = 'quickstart'  # a config
    shards: int = 100  # files of tokens, that are read at random
    ids: int = 5_000_000  # in each file
    sparse_ids: int = 100_000_000  # in each file that holds only zeros, and takes no disk
    rounds: int = 7
    seconds: float = 0.5  # of a row in a round, at least


SCALES = {
    'cpu': Scale(
        shapes=(RECIPE, MEDIUM),
        variants=RECIPE,
        stacks=decoder(2, 96, 4, 64, 67, 12, dispatch=4),
        decoding=decoder(4, 128, 4, 256, 256, 8),
    ),
    'gpu': Scale(
        shapes=(GPT2,),
        variants=decoder(4, 768, 12, 1024, 8192, 8, dispatch=4, **LOW),
        # A character model that leaves most of a GPU idle when it is alone, and fits 32 times.
        stacks=decoder(4, 256, 4, 256, 256, 8, **LOW),
        decoding=GPT2,
    ),
    'smoke': Scale(
        shapes=(TINY,),
        variants=TINY,
        names=('qk/vo', 'qk/no_v'),
        stacks=TINY,
        decoding=TINY,
        study='claims/lm_one_head:smoke',
        shards=2,
        ids=50_000,
        sparse_ids=100_000,
        rounds=2,
        seconds=0.0,
    ),
}


def steps(scale: Scale) -> Iterator[Group]:
    """Times training steps: of qkattn beside its peers, and of every variant beside qk/vo."""
    for run in scale.shapes:
        yield _timed('steps', title_of(run), _peers(run), scale, reference='qkattn')

    names = scale.names
    if not names:
        names = tuple(f'{score}/{value}' for score, value in documented_variants())
    rows = []
    for name in names:
        try:
            rows.append(training_row(name, with_changes(scale.variants, name)))
        except ConfigError as error:
            log.info('  %s is left out: %s', name, error)
    title = f'variants, {title_of(scale.variants)}'
    yield _timed('steps', title, rows, scale, reference='qk/vo')


def _peers(run: Config) -> list[Row]:
    """Returns rows of the same training step: by qkattn, in plain JAX, and in PyTorch."""
    single = with_changes(run, steps_per_dispatch=1)
    return [
        training_row('qkattn', run),
        training_row('qkattn, 1 step a dispatch', single),
        training_row('functional JAX', run, JAX),
        training_row('torch.compile', single, TORCH),
    ]


def stacks(scale: Scale) -> Iterator[Group]:
    """Times runs with several trials in one program, per step and trial.

    The ratio to the row `one run` is the time of X trials together, relative to X runs in turn.
    """
    rows = [training_row('one run', with_changes(scale.stacks, lifting='vmap'))]
    for trials in (2, 8, 32):
        for lifting in ('vmap', 'map'):
            run = with_changes(scale.stacks, trials=trials, lifting=lifting)
            rows.append(training_row(f'{lifting}, {trials} trials', run))
    title = f'{title_of(scale.stacks)}, time per step and trial'
    yield _timed('stacks', title, rows, scale, reference='one run')


def decoding(scale: Scale) -> Iterator[Group]:
    """Times greedy decoding, per token of every row, and records the bytes of the caches."""
    run = scale.decoding
    prompt = max(1, run.model.context // 16)  # tokens of a prompt
    tokens = run.model.context // 2  # tokens that are added
    rows = []
    for name in scale.names or DECODED:
        settings = {
            'model': to_json(with_changes(run, name).model),
            'prompt': prompt,
            'tokens': tokens,
            'rows': run.train.batch_size,
        }
        rows.append(Row(name, settings, work=GREEDY))
    title = f'{title_of(run)}, {prompt} + {tokens} tokens'
    yield _timed('decoding', title, rows, scale, reference='qk/vo')


def study(scale: Scale) -> Iterator[Group]:
    """Times a study in one process, and by the workers that this machine has room for.

    Each has a compilation cache of its own, which is empty.
    """
    with tempfile.TemporaryDirectory() as parent:
        # The first call is not timed. It prepares the data, and brings files into memory.
        _ablate(scale.study, Path(parent, 'first'), '--dry_run', '--measure')
        seconds_of_one = _ablate(scale.study, Path(parent, 'one'))
        seconds_of_workers = _ablate(scale.study, Path(parent, 'all'), '--workers=auto')
    rows = [
        Row('one process', rounds=[seconds_of_one]),
        Row('workers', rounds=[seconds_of_workers]),
    ]
    yield Group('study', f'{scale.study}, {cores()}', rows, reference='one process')


def _ablate(config: str, directory: Path, *flags: str) -> float:
    """Runs experiments.ablate in a directory; returns the seconds that it takes."""
    command = [sys.executable, '-m', 'experiments.ablate', f'--config={config}', *flags]
    command.append(f'--workdir={directory}/study')
    import_paths = [path for path in sys.path if path]
    environment = {
        **os.environ,
        'JAX_COMPILATION_CACHE_DIR': f'{directory}/compiled',
        'PYTHONPATH': os.pathsep.join(import_paths),
    }
    start = time.perf_counter()
    process = run_program(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    if process.returncode != 0:
        _, _, last_line = process.stderr.strip().rpartition('\n')
        raise ProcessError(f'experiments.ablate ended with {process.returncode}: {last_line}')
    return time.perf_counter() - start


def reading(scale: Scale) -> Iterator[Group]:
    """Times batches of rows that are drawn at random from many files of tokens."""
    in_memory = {'shards': scale.shards, 'ids': scale.ids}
    on_disk = in_memory | {'cold': True}
    sparse = {'shards': scale.shards, 'ids': scale.sparse_ids, 'sparse': True}
    # The title of each group, the folder of its files, their settings, and the tokens of rows. The
    # first and the last group read the same files.
    cases = [
        (f'{scale.ids:,} ids in memory, CPU time', 'written', in_memory, (1024, 256)),
        (f'{scale.sparse_ids:,} ids, sparse, CPU time', 'sparse', sparse, (1024, 256)),
        (f'{scale.ids:,} ids on the disk, elapsed time', 'written', on_disk, (1024,)),
    ]
    with tempfile.TemporaryDirectory() as parent:
        for title, folder, settings, contexts in cases:
            rows = []
            for context in contexts:
                arguments = {**settings, 'context': context, 'directory': f'{parent}/{folder}'}
                rows.append(Row(f'rows of {context:,} tokens', arguments, work=READING))
            title_of_group = f'{scale.shards} files of {title}'
            group = _timed('reading', title_of_group, rows, scale, reference='')
            # The directory does not outlive the measurement, so the record does not name it.
            recorded_rows = []
            for row in group.rows:
                recorded_settings = dict(row.settings)
                recorded_settings.pop('directory', None)
                recorded_rows.append(dataclasses.replace(row, settings=recorded_settings))
            yield dataclasses.replace(group, rows=recorded_rows)


def _timed(suite: str, title: str, rows: Sequence[Row], scale: Scale, reference: str) -> Group:
    """Times rows in turns; returns them as a group, whose times are related to `reference`."""
    log.info('%s: %s', suite, title)
    timed_rows = race(rows, rounds=scale.rounds, seconds=scale.seconds)
    return Group(suite, title, timed_rows, reference)


SUITES: dict[str, Callable[[Scale], Iterator[Group]]] = {
    function.__name__: function for function in (steps, stacks, decoding, study, reading)
}

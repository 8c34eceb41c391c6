"""The suites: sizes and peers of each measurement. A suite yields groups as they are timed."""

import dataclasses
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.race import OWN, ROOT, Row, bind, race
from experiments.benchmark.record import ONE_CORE, ONE_PROCESS, ONE_RUN, QKATTN, WORKERS, Group
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
from qkattn.config.calls import Variant
from qkattn.errors import ConfigError, ProcessError
from qkattn.jobs.machine import usable_cores
from qkattn.model import cost
from qkattn.model.sites import validate
from qkattn.report.prose import counted
from qkattn.study.catalogue import documented_variants

log = logging.getLogger('qkattn.benchmark')

TRAIN, GREEDY = f'{OWN}:train', f'{OWN}:greedy'
JAX, TORCH = 'experiments.benchmark.jax_gpt:train', 'experiments.benchmark.torch_gpt:train'


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
    """A run: pre-norm, learned positions, tied embeddings, no biases; clipping and AdamW.

    Args:
      batch: sequences per step.
      dispatch: steps of a program call.
      model: further settings of ModelConfig.
    """
    sizes = {'num_layers': layers, 'd_model': width, 'num_heads': heads, 'context': context}
    return Config(
        model=ModelConfig(vocab_size=vocabulary, **sizes | model),
        data=DataConfig(name='tiny_shakespeare', tokenizer='characters'),
        optimizer=OptimizerConfig(decay='coupled'),
        train=TrainConfig(batch_size=batch, steps_per_dispatch=dispatch),
        trials=TrialsConfig(seeds=(0,), learning_rates=(1e-3,), weight_decays=(0.1,)),
    )


def settings(
    run: Config, variant: str = 'qk/vo', *, trials: int = 1, **train: Any
) -> dict[str, Any]:
    """The JSON of a run with a variant, so many trials, and settings of its training.

    ConfigError for a variant that is malformed.
    """
    train = {'steps_per_dispatch': run.train.steps_per_dispatch, 'num_steps': 1_000_000} | train
    every = dict.fromkeys(
        ('log_every', 'eval_every', 'checkpoint_every'), 10 * train['steps_per_dispatch']
    )
    sections = to_json(run)
    sections['model'] |= Variant.parse(variant)._asdict()
    sections['train'] |= train | every
    sections['trials'] |= {'seeds': [*range(trials)]}
    return sections


def training_row(name: str, config: dict[str, Any], work: str = TRAIN) -> Row:
    """A row that trains a config (JSON), with tokens and FLOPs of a step; checks the config."""
    validate(run := from_json(Config, config))
    tokens = run.train.batch_size * run.model.context
    flops = tokens * cost.training_flops_per_token(run.model)
    return Row(name, {'config': config}, extra={'tokens': tokens, 'flops': flops}, work=work)


def title_of(run: Config, cores: int = 0) -> str:
    model = run.model
    sizes = f'{model.num_layers} x {model.d_model} x context {model.context}'
    on = f', {counted(cores, "core")}' if cores else ''
    return f'{sizes}, batch {run.train.batch_size}, {model.compute_dtype}{on}'


# nanoGPT's README, "I only have a macbook", and the shape of its character model for a GPU.
RECIPE = decoder(4, 128, 4, 64, 67, 12)
MEDIUM = decoder(6, 384, 6, 256, 67, 4, dispatch=2)
# GPT-2 124M (Radford et al. 2019), its vocabulary rounded up to a multiple of 128.
LOW: dict[str, Any] = {'compute_dtype': 'bfloat16', 'activation': 'gelu_tanh'}
GPT2 = decoder(12, 768, 12, 1024, 50304, 8, **LOW)
TINY = decoder(1, 16, 2, 8, 11, 2)
DECODED = 'qk/vo merged/vo shared_qk/vo query_free/vo key_free/vo qk/no_v qk/no_o qk/merged_vo'
DECODED += ' qk/k_is_v latent/latent'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
      shapes: at which training is compared with peers, on all cores, and on one if `one_core`.
      variants: the shape at which `names`, or all variants, are compared with each other.
      stacks, trials: the shape of a stack, and how many trials are in one program.
      decoding, prompt, tokens: the shape of a decoder, after and of how many tokens it decodes.
      study: the name of a config.
      rounds: of a race.
      seconds: of a contestant in a round, at least.
    """

    shapes: tuple[Config, ...]
    one_core: bool = True
    variants: Config
    names: tuple[str, ...] = ()
    stacks: Config
    trials: tuple[int, ...] = (2, 8, 32)
    decoding: Config
    prompt: int
    tokens: int
    study: str = 'quickstart'
    rounds: int = 7
    seconds: float = 0.5


SCALES = {
    'cpu': Scale(
        shapes=(RECIPE, MEDIUM),
        variants=decoder(4, 128, 4, 64, 67, 12, dispatch=4),
        stacks=decoder(2, 96, 4, 64, 67, 12, dispatch=4),
        decoding=decoder(4, 128, 4, 256, 256, 8),
        prompt=16,
        tokens=128,
    ),
    'gpu': Scale(
        shapes=(GPT2,),
        one_core=False,
        variants=decoder(4, 768, 12, 1024, 8192, 8, dispatch=4, **LOW),
        # A character model that leaves most of a GPU idle when it is alone, and fits 32 times.
        stacks=decoder(4, 256, 4, 256, 256, 8, **LOW),
        decoding=GPT2,
        prompt=128,
        tokens=512,
        seconds=1.0,
    ),
    'smoke': Scale(
        shapes=(TINY,),
        one_core=False,
        variants=TINY,
        names=('qk/vo', 'qk/no_v'),
        stacks=TINY,
        trials=(2,),
        decoding=TINY,
        prompt=2,
        tokens=4,
        study='claims/single_head:smoke',
        rounds=2,
        seconds=0.0,
    ),
}


def steps(scale: Scale) -> Iterator[Group]:
    """Training steps: beside the peers, by the number of cores, and of every variant."""
    all_cores = len(usable_cores())
    counts = sorted({1, all_cores}) if scale.one_core else [all_cores]
    for run in scale.shapes:
        for cores in counts:
            yield _timed('steps', title_of(run, cores), _peers(run), scale, QKATTN, cores)
    rows = []
    for name in scale.names or map('/'.join, documented_variants()):
        try:
            rows.append(training_row(name, settings(scale.variants, name)))
        except ConfigError as error:
            log.info('  %s is left out: %s', name, error)
    title = f'variants, {title_of(scale.variants, counts[0])}'
    once = dataclasses.replace(scale, seconds=0)
    yield _timed('steps', title, rows, once, 'qk/vo', counts[0])


def _peers(run: Config) -> list[Row]:
    """A step of qkattn and of the same model elsewhere."""
    several, single = settings(run), settings(run, steps_per_dispatch=1)
    rows = [
        training_row(QKATTN, several),
        training_row(f'{QKATTN}, 1 step a dispatch', single),
        training_row('functional JAX', several, JAX),
    ]
    if not importlib.util.find_spec('torch'):
        log.warning("torch.compile is left out: it needs pip install -e '.[benchmark]'")
        return rows
    return [*rows, training_row('torch.compile', single, TORCH)]


def stacks(scale: Scale) -> Iterator[Group]:
    """Seconds per step and trial, whose ratio to one run is that of X trials to X runs in turn."""
    rows = [training_row(ONE_RUN, settings(scale.stacks, lifting='vmap'))]
    for trials in scale.trials:
        for lifting in ('vmap', 'map'):
            config = settings(scale.stacks, trials=trials, lifting=lifting)
            rows.append(training_row(f'{lifting}, {trials} trials', config))
    title = f'{title_of(scale.stacks)}, seconds per step and trial'
    yield _timed('stacks', title, rows, scale, ONE_RUN)


def decoding(scale: Scale) -> Iterator[Group]:
    """Greedy decoding: seconds per new token of all rows, and the bytes that caches really hold."""
    sizes = {'rows': scale.decoding.train.batch_size}
    sizes |= {'prompt': scale.prompt, 'tokens': scale.tokens}
    rows = [
        Row(name, {'model': settings(scale.decoding, name)['model'], **sizes}, work=GREEDY)
        for name in scale.names or DECODED.split()
    ]
    title = f'{title_of(scale.decoding)}, {scale.prompt} + {scale.tokens} tokens'
    yield _timed('decoding', title, rows, scale, 'qk/vo')


def study(scale: Scale) -> Iterator[Group]:
    """A study in one process, in one process on one core, and by workers.

    The compilation cache is empty every time; data is prepared, and files are read into memory,
    before any time counts.
    """
    with tempfile.TemporaryDirectory() as directory:

        def ablate(name: str, *flags: str, cores: Sequence[int] = usable_cores()) -> float:
            return _ablate(scale.study, Path(directory, name), *flags, cores=cores)

        ablate('first', '--dry_run')
        rows = [
            Row(ONE_PROCESS, rounds=[ablate('one')]),
            Row(ONE_CORE, rounds=[ablate('slow', cores=usable_cores()[:1])]),
            Row(WORKERS, rounds=[ablate('auto', '--workers=auto')]),
        ]
    yield Group('study', f'workers, {counted(len(usable_cores()), "core")}', rows, ONE_PROCESS)


def _ablate(config: str, directory: Path, *flags: str, cores: Sequence[int]) -> float:
    """Seconds of a study, bound to `cores`."""
    command = [sys.executable, '-m', 'experiments.ablate', f'--config={config}', *flags]
    paths = [os.environ.get('PYTHONPATH'), ROOT]
    environment = {'JAX_COMPILATION_CACHE_DIR': f'{directory}/compiled'}
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    start = time.perf_counter()
    done = subprocess.run(
        [*command, f'--workdir={directory}/study'],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: bind(cores),
    )
    if done.returncode:
        last = done.stderr.strip().rpartition('\n')[2]
        raise ProcessError(f'experiments.ablate ended with {done.returncode}: {last}')
    return time.perf_counter() - start


def _timed(
    suite: str, title: str, rows: Sequence[Row], scale: Scale, reference: str, cores: int = 0
) -> Group:
    """The group of rows that are raced, on all cores unless `cores` says how many."""
    log.info('%s: %s', suite, title)
    cores = cores or len(usable_cores())
    measured = race(rows, cores=cores, rounds=scale.rounds, seconds=scale.seconds)
    return Group(suite, title, measured, reference)


SUITES: dict[str, Callable[[Scale], Iterator[Group]]] = {
    function.__name__: function for function in (steps, stacks, decoding, study)
}

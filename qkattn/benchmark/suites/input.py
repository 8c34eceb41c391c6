"""Training data: what the pipeline reads per second, and what a real run waits for."""

import dataclasses

from qkattn.benchmark import commands
from qkattn.benchmark.race import Contestant
from qkattn.benchmark.session import Session
from qkattn.benchmark.shape import GPT2, MEDIUM, RECIPE, TINY, Shape
from qkattn.benchmark.targets import TRAINING
from qkattn.run.cores import usable

WORK = 'qkattn.benchmark.peers.own_parts:batches'
SCALES: dict[str, tuple[Shape, ...]] = {
    'cpu': (RECIPE, MEDIUM),
    'gpu': (RECIPE, GPT2),
    'smoke': (TINY,),
}
LOOP = {
    'input wait': 'input_seconds',
    'host gap': 'gap_seconds',
    'logging': 'logging_seconds',
}


def run(session: Session) -> None:
    contestants = [
        _pipeline(shape, seeds) for shape in SCALES[session.scale.name] for seeds in (1, 8)
    ]
    session.race('pipeline alone, seconds per step', contestants)
    commands.record(
        session,
        'real loop, seconds per step',
        lambda: commands.loop_rows(session.scale.name, LOOP),
        TRAINING,
    )


def _pipeline(shape: Shape, seeds: int) -> Contestant:
    """Batches of text that needs no network."""
    vocabulary = max(256, shape.vocabulary)  # bytes
    config = dataclasses.replace(shape, vocabulary=vocabulary).config(seeds=seeds)
    config['data'] = {'name': 'stdlib'}
    counted = f'{seeds} seed{"s" * (seeds > 1)}'
    return Contestant(
        name=f'context {shape.context}, batch {shape.batch}, {counted}',
        work=WORK,
        settings={'config': config},
        cores=len(usable()),
        process='input',
    )

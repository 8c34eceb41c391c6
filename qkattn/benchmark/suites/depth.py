"""Step, compilation and memory against depth, and against context for each attention kernel."""

import dataclasses
from typing import Any

from qkattn.benchmark.measurement import Measurement
from qkattn.benchmark.race import Contestant
from qkattn.benchmark.session import Session
from qkattn.benchmark.shape import GPT2, TINY, Shape
from qkattn.benchmark.targets import SHALLOW
from qkattn.run.cores import usable

WORK = 'qkattn.benchmark.peers.own_parts:memory_and_compilation'
KERNELS = ('einsum', 'blockwise', 'dot_product')
LONG = Shape(layers=1, width=128, heads=4, context=4096, vocabulary=256, batch=1)
DEEP = Shape(layers=48, width=64, heads=4, context=64, vocabulary=256, batch=4)


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is measured: a shape at some depths, and another one at some contexts by kernel."""

    deep: Shape
    depths: tuple[int, ...]
    compilations: int
    long: Shape
    contexts: tuple[int, ...]
    kernels: tuple[str, ...]


SCALES = {
    'cpu': Scale(DEEP, (2, 4, 8, 12, 24, 48), 2, LONG, (1024, 2048, 4096), KERNELS),
    'gpu': Scale(
        dataclasses.replace(GPT2, batch=4),
        (2, 4, 12, 24, 48),
        3,
        dataclasses.replace(GPT2, layers=2, batch=1),  # twelve processes share the memory
        (1024, 4096, 8192),
        (*KERNELS, 'tokamax'),
    ),
    'smoke': Scale(TINY, (4,), 1, TINY, (), ()),
}


def run(session: Session) -> None:
    scale = SCALES[session.scale.name]
    rounds, seconds = min(5, session.scale.rounds), min(0.2, session.scale.seconds)
    # Each in a process of its own, whose peak of memory and compilations are its own.
    fresh = {} if session.scale.name == 'smoke' else {'JAX_ENABLE_COMPILATION_CACHE': 'false'}

    def row(shape: Shape, line: str, name: str, compilations: int, **model: Any) -> Contestant:
        config = shape.config(steps_per_dispatch=1, lifting='vmap', **model)
        return Contestant(
            name=name,
            work=WORK,
            settings={'config': config, 'compilations': compilations},
            cores=len(usable()),
            extra={'line': line, 'layers': shape.layers, 'context': shape.context},
            environment=fresh,
        )

    shapes = [dataclasses.replace(scale.deep, layers=layers) for layers in scale.depths]
    by_depth = [row(s, 'qkattn', f'{s.layers} layers', scale.compilations) for s in shapes]
    title = f'width {scale.deep.width}, context {scale.deep.context}, batch {scale.deep.batch}'
    timed = session.race(
        title, by_depth, reference=SHALLOW, x='layers', rounds=rounds, seconds=seconds
    )
    session.record(
        f'{title}, tracing and compilation',
        lambda: [*map(_compilation, timed.rows)],
        reference=SHALLOW,
        x='layers',
    )
    shapes = [dataclasses.replace(scale.long, context=context) for context in scale.contexts]
    by_context = [
        row(shape, kernel, f'{kernel}, context {shape.context}', 1, kernel=kernel)
        for kernel in scale.kernels
        for shape in shapes
    ]
    title = f'{scale.long.layers} x {scale.long.width}, attention kernels against context'
    if by_context:
        session.race(title, by_context, x='context', rounds=min(3, rounds), seconds=0)


def _compilation(row: Measurement) -> Measurement:
    """Its compilations in place of its steps."""
    if not row.rounds:
        return row
    pairs = zip(row.extra['trace_rounds'], row.extra['compile_rounds'], strict=True)
    extra = {name: row.extra[name] for name in ('line', 'layers', 'context')}
    return dataclasses.replace(row, rounds=[sum(pair) for pair in pairs], extra=extra)

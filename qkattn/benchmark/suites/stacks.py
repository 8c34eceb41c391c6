"""X trials by every lifting against X runs one after another, and against worker processes."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from qkattn.benchmark.machine import accelerators
from qkattn.benchmark.measurement import Measurement
from qkattn.benchmark.race import Contestant
from qkattn.benchmark.session import Session
from qkattn.benchmark.shape import RECIPE, TINY, Shape
from qkattn.benchmark.targets import NO_AXIS, ONE_RUN
from qkattn.run.cores import usable

PARTS = 'qkattn.benchmark.peers.own_parts'
# A character model that leaves most of a GPU idle when it is alone, and fits 32 times.
CHARACTERS = Shape(
    layers=4,
    width=256,
    heads=4,
    context=256,
    vocabulary=256,
    batch=8,
    dtype='bfloat16',
    gelu='tanh',
)
# Shape, steps a dispatch, numbers of trials.
SCALES: dict[str, tuple[Shape, int, tuple[int, ...]]] = {
    'cpu': (dataclasses.replace(RECIPE, layers=2, width=96), 4, (2, 8, 32)),
    'gpu': (CHARACTERS, 10, (2, 8, 32)),
    'smoke': (TINY, 2, (2,)),
}
STEPS = 1000


def run(session: Session) -> None:
    """Seconds per step and trial, whose ratio to one run is that of X trials to X runs in turn."""
    shape, dispatch, numbers = SCALES[session.scale.name]
    # Compiled from nothing: a cache would hide what a stack saves.
    fresh = {} if session.scale.name == 'smoke' else {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    title, devices = f'{shape}, seconds per step and trial', 1
    if session.scale.name != 'smoke' and not accelerators():
        devices = len(usable())
    contestants = list(_contestants(shape, dispatch, numbers, devices, fresh))
    timed = session.race(
        title,
        contestants,
        reference=ONE_RUN,
        x='trials',
        rounds=min(4, session.scale.rounds),
        seconds=min(0.2, session.scale.seconds),
    )
    alone = {'config': _config(shape, dispatch, 'vmap', 1)}
    works = {NO_AXIS: 'one_trial', ONE_RUN: 'stack'}
    # In one process, since two of the same program differ by some percent; and on one core, since
    # on several XLA's threads leave them further apart.
    session.race(
        f'{shape}, one trial on one core',
        [
            Contestant(
                name=name,
                work=f'{PARTS}:{work}',
                settings=alone,
                cores=1,
                process='one trial',
                environment=fresh,
            )
            for name, work in works.items()
        ],
        reference=NO_AXIS,
        rounds=3 * session.scale.rounds,
        seconds=min(0.2, session.scale.seconds),
    )
    session.record(
        f'{title}, with compilation in {STEPS:,} steps',
        lambda: [*map(_with_compilation, timed.rows)],
        reference=ONE_RUN,
        x='trials',
    )


def _contestants(
    shape: Shape, dispatch: int, numbers: tuple[int, ...], devices: int, fresh: dict[str, str]
) -> Iterator[Contestant]:
    """One trial; stacks; a process for each core."""

    def row(
        line: str, work: str, trials: int, settings: dict[str, Any], name: str = '', **more: str
    ) -> Contestant:
        return Contestant(
            name=name or f'{line}, {trials} trials',
            work=f'{PARTS}:{work}',
            settings=settings,
            cores=len(usable()),
            extra={'trials': trials, 'line': line},
            environment={**fresh, **more},
        )

    def config(lifting: str, trials: int) -> dict[str, Any]:
        return _config(shape, dispatch, lifting, trials)

    one = {'config': config('vmap', 1)}
    yield row('vmap', 'stack', 1, one, ONE_RUN)
    for trials in numbers:
        for lifting in ('vmap', 'map'):
            yield row(lifting, 'stack', trials, {'config': config(lifting, trials)})
        if devices > 1 and trials % devices == 0:
            spread = {'config': {**config('map', trials), 'mesh': {'trial': devices}}}
            flags = f'--xla_force_host_platform_device_count={devices}'
            flags = f'{os.environ.get("XLA_FLAGS", "")} {flags}'
            yield row(f'map over {devices} devices', 'stack', trials, spread, XLA_FLAGS=flags)
    if devices > 1:
        settings: dict[str, Any] = {'work': f'{PARTS}:stack', 'settings': one}
        name = f'{devices} processes'
        yield row(name, 'workers', devices, settings, name)


def _config(shape: Shape, dispatch: int, lifting: str, trials: int) -> dict[str, Any]:
    return shape.config(steps_per_dispatch=dispatch, seeds=trials, lifting=lifting)


def _with_compilation(row: Measurement) -> Measurement:
    """The compilation of all its trials, shared out over them and over STEPS steps of each."""
    if not row.rounds:
        return row
    share = row.extra['compile_seconds'] * row.extra['compilations_per_trial'] / STEPS
    return dataclasses.replace(row, rounds=[seconds + share for seconds in row.rounds])

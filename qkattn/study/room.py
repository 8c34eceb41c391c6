"""How many workers of a study a machine has room for."""

import dataclasses
import math

import jax

from qkattn.config import Study
from qkattn.run import cores
from qkattn.run.files import check_directory
from qkattn.study import plan, ways, worker
from qkattn.study.arms import Arm
from qkattn.study.plan import PlannedRun


def limit(
    study: Study, arms: list[Arm], wanted: int | None, left: list[PlannedRun]
) -> tuple[int, str | None]:
    """The most workers that there is work and room for, and why they are fewer than wanted."""
    room, what = of_machine(study)
    # The plan grows; of a chain of runs only the first is known.
    runs = max(len(left), min(len(arms), len(plan.least(study, arms)) - 1)) if left else 0
    runs = len(left) if len(left) != 1 else runs
    verb = 'is' if runs == 1 else 'are'
    limits = [
        (room, f'is room on {what}'),
        (max(1, runs), f'{verb} {ways.count(runs, "run")} left'),
    ]
    most, note = ways.at_most(wanted or room, limits)
    return most, note if wanted else None


def describe(study: Study, arms: list[Arm], wanted: int | None, workdir: str | None) -> str:
    """What `crew.run` would do, in a line."""
    path = None if workdir is None else check_directory(workdir)
    runs = plan.runs(study, arms, lambda run: None)
    if path is not None:
        runs = worker.left_of(study, arms, path)
    most, note = limit(study, arms, wanted, runs)
    found = None if path is None or wanted is not None else ways.recorded(path)
    if found is not None:
        return f'workers: {min(most, found["processes"])}, as measured before: {path}/{ways.NAME}'
    if wanted is not None or most == 1 or gpus():
        return f'workers: {most}' + ('' if note is None else f' ({note})')
    numbers = ways.candidates(len(cores.usable()), most)
    return f'workers: {" or ".join(map(str, numbers))}, by a measurement before the first run'


def of_machine(study: Study) -> tuple[int, str]:
    """The most workers that the machine has room for, and what of it they share."""
    number, own = len(cores.usable()), gpus()
    if own is None:
        return 1, 'an accelerator whose chips one process drives together'
    if own:
        room = len(own) // math.prod(dataclasses.astuple(study.base.mesh))
        return max(1, room), ways.count(len(own), 'GPU')
    return number, ways.count(number, 'core')


def gpus() -> list[str] | None:
    """As `cores.accelerators`."""
    return cores.accelerators(jax.config.jax_platforms)  # type: ignore[attr-defined]

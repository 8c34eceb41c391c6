"""What a study still lacks: arms without their result, and how far each has come."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from qkattn.study.tuning import SINGLE, VERDICT


@dataclasses.dataclass(frozen=True)
class Missing:
    """An arm or run without results; `name` is the run's, None where none is planned yet."""

    name: str | None
    variant: str
    size: str
    progress: str


class _Cell(Protocol):
    name: str
    variant: str
    size: str
    stage: str
    knob: str | None
    progress: str
    trials: tuple


def missing(
    arms: Sequence[tuple[str, str]], runs: Sequence[_Cell], *, tuned: bool
) -> tuple[Missing, ...]:
    """Of every arm the planned runs without results, or the arm itself while none is planned."""
    found = []
    for variant, size in arms:
        own = [run for run in runs if (run.variant, run.size) == (variant, size)]
        waiting = [run for run in own if not run.trials]
        found += [Missing(run.name, variant, size, _progress(run)) for run in waiting]
        last = VERDICT if tuned else SINGLE
        if not waiting and not any(run.stage == last for run in own):
            progress = f'{last} not started' if tuned and own else 'not started'
            found.append(Missing(None, variant, size, progress))
    return tuple(found)


def _progress(run: _Cell) -> str:
    """'screening of learning_rate, step 300 of 800', 'verdict not started', 'step 30 of 80'."""
    if run.stage == SINGLE:
        return run.progress
    stage = run.stage if run.knob is None else f'{run.stage} of {run.knob}'
    return f'{stage}{" " if run.progress == "not started" else ", "}{run.progress}'

"""What a study still lacks: arms without their result, and how far each has come."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from qkattn.tuning import SINGLE, VERDICT


@dataclasses.dataclass(frozen=True)
class Missing:
    """An arm or cell without results; `name` is the cell's, None where none is planned yet."""

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
    arms: Sequence[tuple[str, str]], cells: Sequence[_Cell], *, tuned: bool
) -> tuple[Missing, ...]:
    """Of every arm the planned cells without results, or the arm itself while none is planned."""
    found = []
    for variant, size in arms:
        own = [cell for cell in cells if (cell.variant, cell.size) == (variant, size)]
        waiting = [cell for cell in own if not cell.trials]
        found += [Missing(cell.name, variant, size, _progress(cell)) for cell in waiting]
        last = VERDICT if tuned else SINGLE
        if not waiting and not any(cell.stage == last for cell in own):
            progress = f'{last} not started' if tuned and own else 'not started'
            found.append(Missing(None, variant, size, progress))
    return tuple(found)


def _progress(cell: _Cell) -> str:
    """'screening of learning_rate, step 300 of 800', 'verdict not started', 'step 30 of 80'."""
    if cell.stage == SINGLE:
        return cell.progress
    stage = cell.stage if cell.knob is None else f'{cell.stage} of {cell.knob}'
    return f'{stage}{" " if cell.progress == "not started" else ", "}{cell.progress}'

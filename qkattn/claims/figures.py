"""Figures of claims and answers, from their rows: forests of differences by context."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qkattn.claims.claim import ClaimResult, Kind, Row, Speaks
from qkattn.claims.export import Answer
from qkattn.claims.studies import UNIT
from qkattn.report.figures.forest import Line, Panel, forest, limits_of
from qkattn.report.figures.style import Drawing, short, style_sheet, styles
from qkattn.report.prose import words
from qkattn.stats.decision import Decision
from qkattn.verdict.judging import DECIDED

PARTS: dict[str, str] = {
    Kind.REMOVED: 'same shape, fewer parameters',
    Kind.REINVESTED: 'parameters reinvested',
    Kind.MATCHED: 'equal parameter count',
}
SHAPES = (Kind.REMOVED, Kind.MATCHED)  # the parts that figures show
_LONGEST, _QUANTITY = 52, 22  # characters of a name, and of what is compared in it


class Compared(NamedTuple):
    """Rows about the same thing in the same context, by kind."""

    quantity: str
    context: Mapping[str, str]
    rows: dict[str, Row]

    @property
    def decision(self) -> str:
        """'worse', or 'worse / undecided' where the verdicts of its rows differ."""
        decisions = [self.rows[kind].decision for kind in PARTS if kind in self.rows]
        return ' / '.join(dict.fromkeys(decision for decision in decisions if decision))


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Removed, reinvested and matched rows, each `quantity` and context once, in their order.

    The kind tells the shape, which is no part of the context; of two rows of one kind, the one that
    decides is shown.
    """
    by_context: dict[tuple, Compared] = {}
    for row in rows:
        if row.kind in PARTS:
            context = {name: value for name, value in row.context.items() if name != 'shape'}
            key = row.quantity, *context.items()
            parts = by_context.setdefault(key, Compared(row.quantity, context, {})).rows
            if row.speaks != Speaks.BESIDE or row.kind not in parts:
                parts[row.kind] = row
    return list(by_context.values())


def varying(rows: Iterable[Row | Compared]) -> list[str]:
    """The names in contexts whose values differ between rows, and do not only repeat `quantity`."""
    rows, names = list(rows), []
    for name in dict.fromkeys(name for row in rows for name in row.context):
        pairs = {(row.context.get(name), row.quantity) for row in rows}
        is_news = any(value not in (None, quantity) for value, quantity in pairs)
        if len({value for value, _ in pairs}) > 1 and is_news:
            names.append(name)
    return names


def located(row: Row | Compared, names: Iterable[str]) -> list[str]:
    """'d_model=64', 'stdlib', 'steps 500': these of its context, a number with its name."""
    values = [(name, row.context[name]) for name in names if name in row.context]
    return [f'{words(name)} {value}' if value[:1].isdigit() else value for name, value in values]


def has_figure(claim: ClaimResult) -> bool:
    """Whether it has differences; other rows have tables alone."""
    return any(row.kind in SHAPES for row in claim.rows)


def claim_figure(claim: ClaimResult) -> Drawing:
    """A panel at the baseline's shape and one at equal parameter count, with the decisions.

    A line has the shortest name that tells it apart.
    """
    lines = compared(claim.rows)
    chosen = varying(lines)

    def num_names(names: Sequence[str]) -> int:
        return len({(line.quantity, *(line.context.get(name) for name in names)) for line in lines})

    for name in reversed(chosen):
        others = [other for other in chosen if other != name]
        chosen = others if num_names(others) == num_names(chosen) else chosen
    several = len({line.quantity for line in lines}) > 1 or not chosen
    panels = []
    for kind in SHAPES:
        drawn = []
        for line in (line for line in lines if kind in line.rows):
            row, reported = line.rows[kind], None
            if row.expected is not None and row.tolerance is not None:
                reported = row.expected - row.tolerance, row.expected + row.tolerance
            where = [short(line.quantity, _QUANTITY)] * several + located(line, chosen)
            drawn.append(
                Line(
                    row.quantity,
                    *(row.value, row.low, row.high),
                    right=row.decision or '',
                    is_decided=row.speaks in (Speaks.FOR, Speaks.AGAINST),
                    name=', '.join(where),
                    reported=reported,
                )
            )
        if drawn:
            panels.append(Panel(drawn, f'difference ({UNIT})', PARTS[kind], 0.0))
    name = f'{claim.name.lower()}_differences'
    return _drawing(name, panels, [line.quantity for line in lines])


def answers_figure(answers: Sequence[Answer]) -> Drawing | None:
    """The difference of each change in a decoder at equal parameter count; None without any."""
    rows = {answer.name: row for answer in answers if (row := answer.row('decoder', Kind.MATCHED))}
    decided = [decision.value for decision in DECIDED]
    lines = [
        Line(
            row.decision or '',
            *(row.value, row.low, row.high),
            name=f'{name}: {row.decision}',
            is_decided=row.decision in decided,
        )
        for name, row in rows.items()
    ]
    if not lines:
        return None
    panel = Panel(lines, f'difference ({UNIT})', PARTS[Kind.MATCHED], 0.0)
    decisions = sorted({line.arm for line in lines})
    return _drawing('answers', [panel], decisions, Decision.NO_VERDICT.value, far=math.inf)


def _drawing(
    stem: str, panels: Sequence[Panel], arms: Sequence[str], black: str = '', **limits: float
) -> Drawing:
    """A forest whose panels have one scale; `arms` are those of its lines, one of them black."""
    look = styles(list(dict.fromkeys(arms)), black)
    reach = limits_of([line for panel in panels for line in panel.lines], 0.0, **limits)
    with style_sheet():
        figure = forest(panels, look, 'no difference', None, reach, longest=_LONGEST)
    return Drawing(figure, stem)

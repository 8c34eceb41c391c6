"""Rows of a claim as they are shown: what is compared in which context, and points by panel."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qkattn.report.claim_results import Kind, Row, Speaks
from qkattn.report.figures.style import HUES
from qkattn.report.prose import listed, words

PARTS: dict[str, str] = {
    Kind.REMOVED: 'same shape, fewer parameters',
    Kind.REINVESTED: 'parameters reinvested',
    Kind.MATCHED: 'equal parameter count',
}


class Compared(NamedTuple):
    """Rows about the same thing in the same context, by kind; what tells them from others."""

    what: str
    context: Mapping[str, str]
    rows: dict[str, Row]

    @property
    def word(self) -> str:
        """'worse', or 'worse / undecided' where the verdicts of its rows differ."""
        words = {kind: self.rows[kind].word for kind in PARTS if kind in self.rows}
        return ' / '.join(dict.fromkeys(word for word in words.values() if word))

    @property
    def is_decided(self) -> bool:
        return any(row.speaks in (Speaks.FOR, Speaks.AGAINST) for row in self.rows.values())


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Removed, reinvested and matched rows, each what and context once, in their order.

    The kind tells the shape, which is no part of the context; of two rows of one kind that which
    decides is shown.
    """
    found: dict[tuple, Compared] = {}
    for row in rows:
        if row.kind in PARTS and row.x is None:
            context = {name: of for name, of in row.context.items() if name != 'shape'}
            place = row.what, row.arm, *context.items()
            parts = found.setdefault(place, Compared(row.what, context, {})).rows
            if row.speaks != Speaks.BESIDE or row.kind not in parts:
                parts[row.kind] = row
    return list(found.values())


def varying(rows: Iterable[Row | Compared]) -> list[str]:
    """The names in contexts whose values differ between rows, and do not only repeat `what`."""
    rows, found = list(rows), []
    for name in dict.fromkeys(name for row in rows for name in row.context):
        among = {row.context.get(name) for row in rows}
        if len(among) > 1 and any(row.context.get(name) not in (None, row.what) for row in rows):
            found.append(name)
    return found


def places(row: Row | Compared, names: Iterable[str]) -> list[str]:
    """'d_model=64', 'stdlib', 'steps 500': these of its context, a number with its name."""
    known = [(name, row.context[name]) for name in names if name in row.context]
    return [f'{words(name)} {of}' if of[:1].isdigit() else of for name, of in known]


def has_several_arms(rows: Iterable[Row]) -> bool:
    """Whether arms differ between rows, and do not only repeat `what`."""
    rows = list(rows)
    return len({row.arm for row in rows}) > 1 and any(
        row.arm not in (None, row.what) for row in rows
    )


def quantity(rows: Iterable[Row], most: int = 1) -> str:
    """What values are of: 'rank of A', 'loss (nats/token)', 'values' of more than `most` things."""
    rows = list(rows)
    whats, units = ([*dict.fromkeys(getattr(row, of) for row in rows)] for of in ('what', 'unit'))
    name = listed(whats) if len(whats) <= most else 'values'
    return name + (f' ({units[0]})' if len(units) == 1 and units[0] else '')


class Axis(NamedTuple):
    """What the points of one panel of curves have in common; a place in their contexts or ''."""

    unit: str
    x_label: str
    kind: str
    place: str = ''


def curves(rows: Iterable[Row]) -> dict[Axis, dict[str, list[Row]]]:
    """Points by panel and by the name of their line, by ascending x.

    Many lines have a panel for each value of one name in their contexts.
    """
    rows = sorted((row for row in rows if row.x is not None), key=lambda row: row.x)
    names, whats, arms = varying(rows), {row.what for row in rows}, {row.arm for row in rows}
    of_axes: dict[Axis, list[Row]] = {}
    for row in rows:
        of_axes.setdefault(Axis(row.unit, row.x_label or 'x', row.kind), []).append(row)
    found: dict[Axis, dict[str, list[Row]]] = {}
    for axis, of_axis in of_axes.items():
        apart = _apart(of_axis)
        for row in of_axis:
            where = places(row, [name for name in names if name not in apart])
            about = [row.what] * (len(whats) > 1 or not where) + [row.arm or ''] * (len(arms) > 1)
            # A context or an arm that repeats the name adds nothing.
            label = ', '.join(filter(None, dict.fromkeys(about + where)))
            panel = axis._replace(place=', '.join(places(row, apart)))
            found.setdefault(panel, {}).setdefault(label, []).append(row)
    return found


def _apart(rows: Sequence[Row]) -> list[str]:
    """The name in contexts, of the fewest values, that has a panel for each where lines are many.

    None where a panel would have one line.
    """
    lines = {(row.what, row.arm, *row.context.items()) for row in rows}
    counts = {
        name: len({row.context[name] for row in rows})
        for name in varying(rows)
        if all(name in row.context for row in rows)
    }
    fewest = sorted(counts, key=lambda name: counts[name])[:1]
    return [name for name in fewest if 2 * counts[name] <= len(lines) > len(HUES)]

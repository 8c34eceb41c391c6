"""Rows of a claim as pages and figures show them: compared arms, curves by panel, tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from qkattn.claims.decided import ClaimResult, Kind, Row, Speaks
from qkattn.report.figures.style import HUES
from qkattn.report.prose import END, NONE, environment, listed, tidy, words
from qkattn.report.sheets import Heading, Sheet

PARTS: dict[str, str] = {
    Kind.REMOVED: 'same shape, fewer parameters',
    Kind.REINVESTED: 'parameters reinvested',
    Kind.MATCHED: 'equal parameter count',
}
# What a row says about its claim, in a table.
SPOKEN: dict[str, str] = {speaks: NONE if speaks is Speaks.BESIDE else speaks for speaks in Speaks}

Table = tuple[list[Heading], list[list[str]]]  # headings and rows

_MAX_NAMES = 3  # of contexts: with more, a table has one column for all


def macros() -> Any:
    """The macros of claims.j2, as plain text."""
    templates = environment(html=False).overlay(loader=jinja2.PackageLoader('qkattn.claims'))
    return templates.get_template('claims.j2').make_module()


class Compared(NamedTuple):
    """Rows about the same thing in the same context, by kind."""

    what: str
    context: Mapping[str, str]
    rows: dict[str, Row]

    @property
    def decision(self) -> str:
        """'worse', or 'worse / undecided' where the verdicts of its rows differ."""
        decisions = {kind: self.rows[kind].word for kind in PARTS if kind in self.rows}
        return ' / '.join(dict.fromkeys(word for word in decisions.values() if word))

    @property
    def is_decided(self) -> bool:
        return any(row.speaks in (Speaks.FOR, Speaks.AGAINST) for row in self.rows.values())


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Removed, reinvested and matched rows, each `what` and context once, in their order.

    The kind tells the shape, which is no part of the context; of two rows of one kind, the one that
    decides is shown.
    """
    by_context: dict[tuple, Compared] = {}
    for row in rows:
        if row.kind in PARTS and row.x is None:
            context = {name: value for name, value in row.context.items() if name != 'shape'}
            key = row.what, row.arm, *context.items()
            parts = by_context.setdefault(key, Compared(row.what, context, {})).rows
            if row.speaks != Speaks.BESIDE or row.kind not in parts:
                parts[row.kind] = row
    return list(by_context.values())


def varying(rows: Iterable[Row | Compared]) -> list[str]:
    """The names in contexts whose values differ between rows, and do not only repeat `what`."""
    rows, names = list(rows), []
    for name in dict.fromkeys(name for row in rows for name in row.context):
        values = {row.context.get(name) for row in rows}
        if len(values) > 1 and any(row.context.get(name) not in (None, row.what) for row in rows):
            names.append(name)
    return names


def located(row: Row | Compared, names: Iterable[str]) -> list[str]:
    """'d_model=64', 'stdlib', 'steps 500': these of its context, a number with its name."""
    values = [(name, row.context[name]) for name in names if name in row.context]
    return [f'{words(name)} {value}' if value[:1].isdigit() else value for name, value in values]


def has_several_arms(rows: Iterable[Row]) -> bool:
    """Whether arms differ between rows, and do not only repeat `what`."""
    rows = list(rows)
    several = len({row.arm for row in rows}) > 1
    return several and any(row.arm not in (None, row.what) for row in rows)


def quantity(rows: Iterable[Row], most: int = 1) -> str:
    """'rank of A', 'loss (nats/token)'; 'values' of more than `most` things."""
    rows = list(rows)
    whats = list(dict.fromkeys(row.what for row in rows))
    units = list(dict.fromkeys(row.unit for row in rows))
    name = listed(whats) if len(whats) <= most else 'values'
    return name + (f' ({units[0]})' if len(units) == 1 and units[0] else '')


class Axis(NamedTuple):
    """What the points of one panel of curves have in common."""

    unit: str
    x_label: str
    kind: str
    context: str = ''


def curves(rows: Iterable[Row]) -> dict[Axis, dict[str, list[Row]]]:
    """Points by panel and name of their line, by ascending x; many lines are split by `_apart`."""
    rows = sorted((row for row in rows if row.x is not None), key=lambda row: row.x)
    names, whats, arms = varying(rows), {row.what for row in rows}, {row.arm for row in rows}
    by_axis: dict[Axis, list[Row]] = {}
    for row in rows:
        by_axis.setdefault(Axis(row.unit, row.x_label or 'x', row.kind), []).append(row)
    panels: dict[Axis, dict[str, list[Row]]] = {}
    for axis, points in by_axis.items():
        apart = _apart(points)
        for row in points:
            where = located(row, [name for name in names if name not in apart])
            about = [row.what] * (len(whats) > 1 or not where) + [row.arm or ''] * (len(arms) > 1)
            # A context or an arm that repeats the name adds nothing.
            label = ', '.join(filter(None, dict.fromkeys(about + where)))
            panel = axis._replace(context=', '.join(located(row, apart)))
            panels.setdefault(panel, {}).setdefault(label, []).append(row)
    return panels


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


def amount(row: Row | None) -> str:
    """'+0.0102 [+0.0062, +0.0154]', '16', '3.1e-16': the value, with its interval if it has one."""
    if row is None:
        return NONE
    if row.low is None or row.high is None:
        return number(row.value, row)
    return f'{number(row.value, row)} [{number(row.low, row)}, {number(row.high, row)}]'


def number(value: float, row: Row) -> str:
    """A number in the unit of the row; differences have a sign, losses four decimals."""
    sign = '+' * (row.kind in PARTS)
    if row.unit.startswith('nats'):
        return f'{value:{sign}.4f}'
    if value == round(value) and abs(value) < 1e12:
        return f'{value:{sign},.0f}'
    return f'{value:{sign}.4g}'


def expected(row: Row) -> str:
    """'16', '0 ± 1e-12', '-' where nothing is expected."""
    if row.expected is None:
        return NONE
    tolerance = f' ± {row.tolerance:.3g}' if row.tolerance else ''
    return number(row.expected, row) + tolerance


def described_row(row: Row) -> str:
    """'query_free/vo, d_model=64, stdlib, steps 500': what it is about and its context."""
    at = [f'{row.x_label} {row.x:,g}'] if row.x is not None else []
    return ', '.join(dict.fromkeys([row.what, *located(row, row.context), *at]))


def claim_sheets(claim: ClaimResult) -> list[Sheet]:
    """The tables of its rows: parts of differences, other values, and the points of each panel."""
    others = [row for row in claim.rows if row.x is None and row.kind not in PARTS]
    made: list[tuple[str, Sequence[Row], Table]] = [
        ('parts', (), _parts(claim)),
        ('values', others, _values(others)),
    ]
    for axis, lines in curves(claim.rows).items():
        points = [row for line in lines.values() for row in line]
        made.append(('points', points, _points(axis, lines)))
    shared = _shared(claim.rows)
    return [
        Sheet(name, *table, *map(tidy, getattr(macros(), name)(rows, shared).split(END)))
        for name, rows, table in made
        if table[1]
    ]


def _shared(rows: Sequence[Row]) -> str:
    """'model decoder, steps 500': what all contexts have in common."""
    first = rows[0].context if rows else {}
    same = [pair for pair in first.items() if all(pair in row.context.items() for row in rows)]
    return ', '.join(f'{words(name)} {value}' for name, value in same)


def _parts(claim: ClaimResult) -> Table:
    lines = compared(claim.rows)
    names = varying(lines)
    cells = [
        [
            line.what,
            *(line.context.get(name, NONE) for name in names),
            *(amount(line.rows.get(kind)) for kind in PARTS),
            line.decision or NONE,
            _spoken(line.rows.values()),
        ]
        for line in lines
    ]
    units = ', '.join(dict.fromkeys(row.unit for line in lines for row in line.rows.values()))
    titles = [('removed', 'same shape'), ('reinvested', 'matched - same shape')]
    titles.append(('both', 'equal parameter count'))
    numbers = [(f'{name}, {units}|{about}', False) for name, about in titles]
    left = [('verdict', True), ('for or against|the claim', True)]
    return [('arm', True), *((words(name), True) for name in names), *numbers, *left], cells


def _spoken(parts: Iterable[Row]) -> str:
    """'for "not worse"'; 'for "worse", open "not better"' of several that decide."""
    texts = [
        f'{SPOKEN[row.speaks]} "{words(row.relation)}"' if row.relation else SPOKEN[row.speaks]
        for row in parts
        if row.speaks != Speaks.BESIDE
    ]
    return ', '.join(dict.fromkeys(texts)) or NONE


def _values(rows: Sequence[Row]) -> Table:
    """A row for each value; contexts of many names, as various checks have, in one cell."""
    names, several = varying(rows), has_several_arms(rows)
    apart = len(names) <= _MAX_NAMES
    contexts = [(words(name), True) for name in names] if apart else [('context', True)]
    numbers = [('value', False), ('expected', False), ('unit', True)]
    cells = []
    for row in rows:
        where = {name: row.context.get(name, NONE) for name in names}
        joined = ', '.join(f'{name} {where[name]}' for name in names if name in row.context)
        context = [row.arm or NONE] * several + ([*where.values()] if apart else [joined or NONE])
        about = [amount(row), expected(row), row.unit or NONE, SPOKEN[row.speaks]]
        cells.append([row.what, *context, *about])
    headings = [('quantity', True), *[('arm', True)] * several, *contexts, *numbers]
    return [*headings, ('for or against|the claim', True)], cells


def _points(axis: Axis, lines: Mapping[str, Sequence[Row]]) -> Table:
    """A row for each x, a column for each line."""
    by_x = {name: {row.x: row for row in points} for name, points in lines.items()}
    about = ', '.join(filter(None, [axis.context, PARTS.get(axis.kind, axis.unit)]))
    headings = [(axis.x_label, True), *((f'{name}|{about}', False) for name in lines)]
    every = sorted({row.x for points in lines.values() for row in points if row.x is not None})
    return headings, [
        [f'{x:,g}', *(amount(points.get(x)) for points in by_x.values())] for x in every
    ]

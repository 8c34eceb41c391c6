"""The numbers of a claim as text: the decisive one, and the tables of its rows."""

from collections.abc import Mapping, Sequence

from qkattn.report.claim_results import ClaimResult, Row, Speaks
from qkattn.report.claim_rows import (
    PARTS,
    Axis,
    compared,
    curves,
    has_several_arms,
    places,
    varying,
)
from qkattn.report.prose import END, NONE, environment, tidy, words
from qkattn.report.sheets import Heading, Sheet

SAID: dict[str, str] = {
    Speaks.FOR: 'for',
    Speaks.AGAINST: 'against',
    Speaks.OPEN: 'open',
    Speaks.BESIDE: NONE,
}

# Headings and rows.
Table = tuple[list[Heading], list[list[str]]]
# A table has columns for at most so many names of contexts.
_MAX_NAMES = 3


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
    return ', '.join(dict.fromkeys([row.what, *places(row, row.context), *at]))


def claim_sheets(claim: ClaimResult) -> list[Sheet]:
    """The tables of its rows: parts of differences, other values, and the points of each panel."""
    others = [row for row in claim.rows if row.x is None and row.kind not in PARTS]
    made: list[tuple[str, Sequence[Row], Table]] = [
        ('parts', (), _parts(claim)),
        ('values', others, _values(others)),
    ]
    for axis, lines in curves(claim.rows).items():
        points = [row for of in lines.values() for row in of]
        made.append(('points', points, _points(axis, lines)))
    shared = _shared(claim.rows)
    return [
        Sheet(name, *table, *_said(name, rows, shared)) for name, rows, table in made if table[1]
    ]


def _said(name: str, rows: Sequence[Row], shared: str) -> list[str]:
    """Title and note of a table, which shows these rows."""
    module = environment(html=False).get_template('claims.j2').make_module()
    return [tidy(part) for part in getattr(module, name)(rows, shared).split(END)]


def _shared(rows: Sequence[Row]) -> str:
    """'model decoder, steps 500': what all contexts have in common."""
    first = rows[0].context if rows else {}
    same = [of for of in first.items() if all(of in row.context.items() for row in rows)]
    return ', '.join(f'{words(name)} {value}' for name, value in same)


def _parts(claim: ClaimResult) -> Table:
    of_claim = compared(claim.rows)
    names = varying(of_claim)
    rows = []
    for of in of_claim:
        parts = list(of.rows.values())
        rows.append(
            [
                of.what,
                *(of.context.get(name, NONE) for name in names),
                *(amount(of.rows.get(kind)) for kind in PARTS),
                of.word or NONE,
                _said_by(parts),
            ]
        )
    units = ', '.join(dict.fromkeys(row.unit for of in of_claim for row in of.rows.values()))
    titles = [('removed', 'same shape'), ('reinvested', 'matched - same shape')]
    titles.append(('both', 'equal parameter count'))
    numbers = [(f'{name}, {units}|{of}', False) for name, of in titles]
    left = [('verdict', True), ('for or against|the claim', True)]
    return [('arm', True), *((words(name), True) for name in names), *numbers, *left], rows


def _said_by(parts: Sequence[Row]) -> str:
    """'for "not worse"'; 'for "worse", open "not better"' of several that decide."""
    said = [
        f'{SAID[row.speaks]} "{words(row.relation)}"' if row.relation else SAID[row.speaks]
        for row in parts
        if row.speaks != Speaks.BESIDE
    ]
    return ', '.join(dict.fromkeys(said)) or SAID[Speaks.BESIDE]


def _values(rows: Sequence[Row]) -> Table:
    """A row for each value; contexts of many names, as various checks have, in one cell."""
    names, several = varying(rows), has_several_arms(rows)
    apart = len(names) <= _MAX_NAMES
    places = [(words(name), True) for name in names] if apart else [('context', True)]
    numbers = [('value', False), ('expected', False), ('unit', True)]
    cells = []
    for row in rows:
        where = {name: row.context.get(name, NONE) for name in names}
        joined = ', '.join(f'{name} {where[name]}' for name in names if name in row.context)
        place = [row.arm or NONE] * several + ([*where.values()] if apart else [joined or NONE])
        said = [amount(row), expected(row), row.unit or NONE, SAID[row.speaks]]
        cells.append([row.what, *place, *said])
    about = [('quantity', True), *[('arm', True)] * several, *places]
    return [*about, *numbers, ('for or against|the claim', True)], cells


def _points(axis: Axis, lines: Mapping[str, Sequence[Row]]) -> Table:
    """A row for each x, a column for each line."""
    by_x = {name: {row.x: row for row in of} for name, of in lines.items()}
    about = ', '.join(filter(None, [axis.place, PARTS.get(axis.kind, axis.unit)]))
    headings = [(axis.x_label, True), *((f'{name}|{about}', False) for name in lines)]
    every = sorted({row.x for of in lines.values() for row in of if row.x is not None})
    return headings, [[f'{x:,g}', *(amount(of.get(x)) for of in by_x.values())] for x in every]

"""The numbers of a claim as text: the decisive one, and the tables of its rows."""

from collections.abc import Sequence

from qkattn.report.claim_results import ClaimResult, Row, Speaks
from qkattn.report.figures.claim_figures import PARTS, compared, lines_of, varying
from qkattn.report.prose import NONE, environment, tidy, words
from qkattn.report.sheets import Heading, Sheet

SAID: dict[str, str] = {
    Speaks.FOR: 'for',
    Speaks.AGAINST: 'against',
    Speaks.OPEN: 'open',
    Speaks.BESIDE: NONE,
}


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
    where = [
        value if value.upper() != value else f'{words(name)} {value}'
        for name, value in row.context.items()
    ]
    at = [f'{row.x_label} {row.x:,g}'] if row.x is not None else []
    return ', '.join(dict.fromkeys([row.what, *where, *at]))


def claim_sheets(claim: ClaimResult) -> list[Sheet]:
    """The tables of its rows: parts of differences, other values, curves."""
    points = [row for row in claim.rows if row.x is not None]
    others = [row for row in claim.rows if row.x is None and row.kind not in PARTS]
    made = {'parts': _parts(claim), 'values': _values(others), 'points': _points(points)}
    return [
        Sheet(name, *table, *_said(name, claim, shared=_shared(claim.rows)))
        for name, table in made.items()
        if table[1]
    ]


def _said(name: str, claim: ClaimResult, shared: str) -> list[str]:
    """Title and note of a table."""
    module = environment(html=False).get_template('claims.j2').make_module()
    return [tidy(part) for part in getattr(module, name)(claim, shared).split('\x1f')]


def _shared(rows: Sequence[Row]) -> str:
    """'model decoder, steps 500': what all contexts have in common."""
    names = set(varying(rows))
    same = [item for row in rows[:1] for item in row.context.items() if item[0] not in names]
    return ', '.join(f'{words(name)} {value}' for name, value in same)


def _parts(claim: ClaimResult) -> tuple[list[Heading], list[list[str]]]:
    of_claim = compared(claim.rows)
    names = varying(row for of in of_claim for row in of.rows.values())
    rows = []
    for of in of_claim:
        parts = list(of.rows.values())
        speaks = next((row.speaks for row in parts if row.speaks != Speaks.BESIDE), Speaks.BESIDE)
        relation = next((row.relation for row in parts if row.relation), '')
        rows.append(
            [
                of.what,
                *(of.context.get(name, NONE) for name in names),
                *(amount(of.rows.get(kind)) for kind in PARTS),
                of.word or NONE,
                f'{SAID[speaks]} "{words(relation)}"' if relation else SAID[speaks],
            ]
        )
    units = ', '.join(dict.fromkeys(row.unit for of in of_claim for row in of.rows.values()))
    titles = [('removed', 'same shape'), ('reinvested', 'matched - same shape')]
    titles.append(('both', 'equal parameter count'))
    numbers = [(f'{name}, {units}|{of}', False) for name, of in titles]
    left = [('verdict', True), ('for or against|the claim', True)]
    return [('arm', True), *((words(name), True) for name in names), *numbers, *left], rows


def _values(rows: Sequence[Row]) -> tuple[list[Heading], list[list[str]]]:
    names = varying(rows)
    left = [('quantity', True), *((words(name), True) for name in names)]
    titles = [
        *left,
        ('value', False),
        ('expected', False),
        ('unit', True),
        ('for or against', True),
    ]
    cells = [
        [
            row.what,
            *(row.context.get(name, NONE) for name in names),
            amount(row),
            expected(row),
            row.unit or NONE,
            SAID[row.speaks],
        ]
        for row in rows
    ]
    return titles, cells


def _points(rows: Sequence[Row]) -> tuple[list[Heading], list[list[str]]]:
    """A row for each x, a column for each line."""
    lines = lines_of(rows)
    by_x = {name: {row.x: row for row in of} for name, of in lines.items()}
    label = ', '.join(dict.fromkeys(row.x_label or 'x' for row in rows))
    headings = [(label, True)] + [(f'{name},|{of[0].unit}', False) for name, of in lines.items()]
    every = sorted({row.x for row in rows if row.x is not None})
    return headings, [[f'{x:,g}', *(amount(of.get(x)) for of in by_x.values())] for x in every]

"""Decided claims as data: what claims.json holds, and what their tables and figures show."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from qkattn.errors import ReportError
from qkattn.report.prose import rounded
from qkattn.storage.records import damaged, parse_file, read, write_json

NAME = 'claims.json'
T = TypeVar('T')
_ADVICE = 'make it again with python -m experiments.claims --workdir=DIR --export={}'


class ClaimVerdict(enum.StrEnum):
    """What is decided about a claim, at its scale; HERE: in one setting where two are needed."""

    HOLDS = 'holds'
    HOLDS_HERE = 'holds in this setting'
    HOLDS_ONLY_IF = 'holds only if'
    FAILS = 'fails'
    FAILS_HERE = 'fails in this setting'
    UNDECIDED = 'undecided'


class Kind(enum.StrEnum):
    """What the value of a row is."""

    EXACT = 'exact'  # an algebraic check
    REMOVED = 'removed'  # an arm at the baseline's shape minus the baseline
    REINVESTED = 'reinvested'  # the matched arm minus that
    MATCHED = 'matched'  # the matched arm minus the baseline: the sum of both
    MEASURED = 'measured'  # anything else, as a point of a curve


class Speaks(enum.StrEnum):
    """What a row says about its claim; one that stands BESIDE others decides nothing."""

    FOR = 'for'
    AGAINST = 'against'
    OPEN = 'open'
    BESIDE = 'beside'


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison or measurement."""

    what: str  # what was compared, in a few words
    kind: str  # of `Kind`
    context: Mapping[str, str]  # by name: model, size, corpus, steps, destination
    value: float
    speaks: str  # of `Speaks`
    unit: str = ''  # '' for a pure number
    low: float | None = None  # with `high`, the 95 % interval
    high: float | None = None
    expected: float | None = None  # an exact check asks for |value - expected| <= tolerance
    tolerance: float | None = None
    arm: str | None = None  # the variant, which chooses colour and marker
    relation: str | None = None  # what the claim expects of the arm, 'not_better'
    word: str | None = None  # the arm's verdict in its study
    x: float | None = None  # the place on a curve: rows of one claim with it are points of lines
    x_label: str | None = None
    study: str | None = None  # the one it comes from, a directory beside claims.json

    def __post_init__(self) -> None:
        Kind(self.kind), Speaks(self.speaks)


@dataclasses.dataclass(frozen=True)
class ClaimResult:
    """A claim as decided at one scale; `name` to `rule` are those of the `Claim`."""

    name: str  # its letter is the group
    title: str
    statement: str
    source: str
    reported: str | None
    rule: str
    scale: str
    verdict: str  # of `ClaimVerdict`
    rows: tuple[Row, ...] = ()
    condition: str | None = None  # of a claim that holds only if it is met, a clause
    refuted: str | None = None  # the contexts in which an undecided claim is false
    lacking: str | None = None  # what an undecided claim lacks, in a few words
    needed: str | None = None  # seeds, tokens and parameters that would decide an undecided claim
    decisive: int | None = None  # the place in `rows` of the row whose number stands for the claim
    missing: tuple[str, ...] = ()  # what is missing and how to get it, sentence by sentence
    studies: tuple[str, ...] = ()
    command: str | None = None
    commit: str | None = None
    hardware: str | None = None
    seconds: float | None = None  # of training and checks together
    models: tuple[str, ...] = ()  # size, training and loss of baselines beside their yardsticks

    def __post_init__(self) -> None:
        ClaimVerdict(self.verdict)
        if self.decisive is not None and not 0 <= self.decisive < len(self.rows):
            raise ValueError(f'decisive is {self.decisive}, but there are {len(self.rows)} rows')

    @property
    def is_theorem(self) -> bool:
        """Whether algebra alone decides it, and no training."""
        return is_theorem(self.rows)

    @property
    def decisive_row(self) -> Row | None:
        return None if self.decisive is None else self.rows[self.decisive]


def is_theorem(rows: Iterable[Row]) -> bool:
    """Whether there are rows that decide, all of them exact checks."""
    kinds = {row.kind for row in rows if row.speaks != Speaks.BESIDE}
    return kinds == {Kind.EXACT}


def write_claims(directory: str | Path, claims: Iterable[ClaimResult]) -> Path:
    """Writes claims.json, each claim with a checksum, digits as `rounded`; returns its path."""
    path = Path(directory) / NAME
    write_json(path, [replace(claim, rows=tuple(map(stored, claim.rows))) for claim in claims])
    return path


def stored(row: Row) -> Row:
    """The row with the digits that claims.json has."""
    return replace(row, **{name: rounded(value) for name, value in vars(row).items()})


def read_claims(directory: str | Path, advice: str | None = None) -> tuple[ClaimResult, ...]:
    """The claims of a directory.

    ReportError if there is no claims.json, RunDirectoryError if it was edited or is not what
    `write_claims` writes; both give the `advice`, by default to export it again.
    """
    path = Path(directory) / NAME
    advice = advice or _ADVICE.format(directory)
    if not path.is_file():
        raise ReportError(f'{path} does not exist; {advice}.')
    return read_records(path, ClaimResult, 'name', advice)


def read_records(path: Path, cls: type[T], key: str, advice: str | None = None) -> tuple[T, ...]:
    """The records of a file, each a `cls` with rows that `key` names; RunDirectoryError if bad."""
    try:
        made = []
        for record in parse_file(path, [{key: str, 'rows': list}]):
            name = f'{cls.__name__.removesuffix("Result").lower()} {record[key]}'
            rows = [_read(Row, row, f'{name}: row {i}') for i, row in enumerate(record['rows'])]
            made.append(_read(cls, record, name, rows=tuple(rows)))
    except ValueError as error:
        raise damaged(path, error, advice or _ADVICE.format(path.parent)) from error
    return tuple(made)


def _read(cls: type[T], record: dict, name: str, **given: Any) -> T:
    try:
        return read(cls, record, **given)
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from error

"""Decided claims as data: what claims.json holds, and what their tables and figures show."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from qkattn.errors import ReportError
from qkattn.report.prose import rounded
from qkattn.storage.records import damaged, parse_file, read, write_json

NAME = 'claims.json'
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
    """What the value of a row is.

    EXACT is an algebraic check; REMOVED an arm at the baseline's shape minus the baseline,
    REINVESTED the matched arm minus that, MATCHED the matched arm minus the baseline, which is the
    sum of both; MEASURED anything else, as a point of a curve.
    """

    EXACT = 'exact'
    REMOVED = 'removed'
    REINVESTED = 'reinvested'
    MATCHED = 'matched'
    MEASURED = 'measured'


class Speaks(enum.StrEnum):
    """What a row says about its claim; one that stands BESIDE others decides nothing."""

    FOR = 'for'
    AGAINST = 'against'
    OPEN = 'open'
    BESIDE = 'beside'


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison or measurement.

    Attributes:
      what: what was compared, in a few words.
      kind: of `Kind`.
      context: where it was measured, name by name: model, size, corpus, steps, destination.
      value: in `unit`, which is '' for a pure number.
      speaks: of `Speaks`.
      low, high: the 95 % interval.
      expected, tolerance: of an exact check, which asks for |value - expected| <= tolerance.
      arm: the variant, which chooses colour and marker.
      relation: what the claim expects of the arm, 'not_better'.
      word: the arm's verdict in its study.
      x, x_label: the place on a curve: rows of one claim that have it are points of lines.
      study: the study that it comes from, a directory beside claims.json.
    """

    what: str
    kind: str
    context: Mapping[str, str]
    value: float
    speaks: str
    unit: str = ''
    low: float | None = None
    high: float | None = None
    expected: float | None = None
    tolerance: float | None = None
    arm: str | None = None
    relation: str | None = None
    word: str | None = None
    x: float | None = None
    x_label: str | None = None
    study: str | None = None

    def __post_init__(self) -> None:
        Kind(self.kind), Speaks(self.speaks)


@dataclasses.dataclass(frozen=True)
class ClaimResult:
    """A claim as decided at one scale.

    Attributes:
      name: 'B2'; its letter is the group.
      title: the statement in a few words.
      source, reported: who says so, and the number reported there.
      rule: how it is decided, in a sentence.
      verdict: of `ClaimVerdict`.
      condition: the contexts in which a claim holds that holds only there.
      refuted: the contexts in which an undecided claim is false.
      needed: the seeds, tokens and parameters that would decide an undecided claim.
      decisive: the place in `rows` of the row whose number stands for the claim.
      missing: what is missing and how to get it, sentence by sentence.
      models: size, training and loss of the baselines beside their yardsticks, one by one.
      seconds: of training and checks together.
    """

    name: str
    title: str
    statement: str
    source: str
    reported: str | None
    rule: str
    scale: str
    verdict: str
    rows: tuple[Row, ...] = ()
    condition: str | None = None
    refuted: str | None = None
    needed: str | None = None
    decisive: int | None = None
    missing: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()
    command: str | None = None
    commit: str | None = None
    hardware: str | None = None
    seconds: float | None = None
    models: tuple[str, ...] = ()

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
    """Writes claims.json into a directory, each claim with a checksum; returns its path.

    Numbers of rows have the digits of `rounded`.
    """
    path = Path(directory) / NAME
    write_json(path, [replace(claim, rows=tuple(map(stored, claim.rows))) for claim in claims])
    return path


def stored(row: Row) -> Row:
    """The row with the digits that claims.json has."""
    return replace(row, **{name: rounded(value) for name, value in vars(row).items()})


def read_claims(directory: str | Path, advice: str | None = None) -> tuple[ClaimResult, ...]:
    """The claims of a directory.

    Args:
      advice: what to do without the file or with a damaged one; by default, to export it again.

    Raises:
      ReportError: there is no claims.json.
      RunDirectoryError: it was edited, or is not what `write_claims` writes.
    """
    path = Path(directory) / NAME
    advice = advice or _ADVICE.format(directory)
    if not path.is_file():
        raise ReportError(f'{path} does not exist; {advice}.')
    try:
        return tuple(map(_claim, parse_file(path, [{'name': str, 'rows': list}])))
    except ValueError as error:
        raise damaged(path, error, advice) from error


def _claim(record: dict) -> ClaimResult:
    try:
        rows = []
        for place, row in enumerate(record['rows']):
            try:
                rows.append(read(Row, row))
            except ValueError as error:
                raise ValueError(f'row {place}: {error}') from error
        return read(ClaimResult, record, rows=tuple(rows))
    except ValueError as error:
        raise ValueError(f'claim {record["name"]}: {error}') from error

"""Keeps what claims were decided from, and decides them again."""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qkattn.claims import catalogue
from qkattn.claims.decided import NAME, ClaimResult, Kind, Row, read_claims, write_claims
from qkattn.claims.deciding import decide
from qkattn.claims.pages import SCALING, write_page
from qkattn.claims.results import MEASURES, Results
from qkattn.errors import ReportError
from qkattn.report import export as export_study
from qkattn.report.verify import difference, near

# What another machine or commit changes.
_OF_MACHINE = ('command', 'commit', 'hardware', 'seconds', 'rows')


def export(decided: Iterable[ClaimResult], results: Results, destination: str | Path) -> Path:
    """Writes claims.json, claims.md and the studies behind them; returns the path of the page.

    The scaling study, of no claim, is kept where the directory has it. ReportError if the
    destination holds something else.
    """
    decided, destination = list(decided), Path(destination)
    names = [name for claim in decided for name in claim.studies]
    for name in dict.fromkeys([*names, SCALING]):
        source = results.directory / name
        if results.study(name) is not None:
            export_study(source, destination / name)
        if (source / MEASURES).is_dir():
            shutil.copytree(source / MEASURES, destination / name / MEASURES, dirs_exist_ok=True)
    write_claims(destination, decided)
    return write_page(destination)


def check(directory: str | Path) -> int:
    """Decides the claims of an exported directory again; returns how many rows agree.

    ReportError if claims.json holds other claims than are declared, or another result.
    """
    path, declared = Path(directory) / NAME, catalogue.declared()
    stored, results = read_claims(directory), Results(directory)
    if [claim.name for claim in stored] != list(declared):
        unlike = {claim.name for claim in stored} ^ declared.keys()
        raise ReportError(
            f'{path} has not the claims that are declared, in their order; {", ".join(unlike)} '
            'differ'
        )
    for old in stored:
        if difference := mismatch(old, decide(declared[old.name], old.scale, results)):
            raise ReportError(f'{path}: {difference}')
    return sum(len(claim.rows) for claim in stored)


def mismatch(old: ClaimResult, new: ClaimResult) -> str | None:
    """The first difference between a stored claim and the same one decided again."""
    fields = [f.name for f in dataclasses.fields(old) if f.name not in _OF_MACHINE]
    for field in fields:
        one, other = getattr(old, field), getattr(new, field)
        if not _agree(field, one, other):
            return (
                f'{field} of claim {old.name} is {one!r}, but its checks and studies give {other!r}'
            )
    if len(old.rows) != len(new.rows):
        return (
            f'claim {old.name} has {len(old.rows)} rows, but its checks and studies give '
            f'{len(new.rows)}'
        )
    for place, (row, again) in enumerate(zip(old.rows, new.rows, strict=True)):
        if field := _unlike(row, again):
            return (
                f'{field} of row {place} of claim {old.name} is {getattr(row, field)!r}, but its '
                f'checks and studies give {getattr(again, field)!r}'
            )
    return None


def _agree(field: str, old: Any, new: Any) -> bool:
    """Whether fields are equal; counts of what a claim needs may be one apart."""
    if field != 'needed' or None in (old, new):
        return old == new
    return difference(old, new, at_boundary=lambda _: True) is None


def _unlike(row: Row, again: Row) -> str | None:
    """The first field in which a stored row is not the one made again; see report.verify."""
    rounding = row.tolerance if row.kind == Kind.EXACT and row.tolerance else 0.0
    for field in (f.name for f in dataclasses.fields(row)):
        one, other = getattr(row, field), getattr(again, field)
        if isinstance(one, float) and isinstance(other, float):
            if not (near(one, other) or abs(one - other) <= rounding):
                return field
        elif one != other:
            return field
    return None

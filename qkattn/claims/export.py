"""Keeps what claims were decided from, and decides them again."""

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qkattn.claims import catalogue
from qkattn.claims.answers import NAME as ANSWERS
from qkattn.claims.answers import Answer, answers, read_answers, write_answers
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
    """Writes claims.json, answers.json, claims.md and their studies; returns the path of the page.

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
    if made := answers(results):
        write_answers(destination, made)
    return write_page(destination)


def check(directory: str | Path) -> int:
    """Makes the claims and answers of an exported directory again; returns how many rows agree.

    ReportError if claims.json or answers.json hold others than are declared, or another result.
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
    kept, again = read_answers(directory), answers(results)
    unequal = None if len(kept) == len(again) else f'{len(kept)} answers, not {len(again)}'
    for one, other in zip(kept, again, strict=False):
        unequal = unequal or _unlike_answer(one, other)
    if unequal:
        raise ReportError(f'{path.parent / ANSWERS}: {unequal}')
    return sum(len(record.rows) for record in stored) + sum(len(record.rows) for record in kept)


def mismatch(old: ClaimResult, new: ClaimResult) -> str | None:
    """The first difference between a stored claim and the same one decided again."""
    fields = [f.name for f in dataclasses.fields(old) if f.name not in _OF_MACHINE]
    for field in fields:
        one, other = getattr(old, field), getattr(new, field)
        if not _agree(field, one, other):
            return (
                f'{field} of claim {old.name} is {one!r}, but its checks and studies give {other!r}'
            )
    return _unlike_rows(f'claim {old.name}', old.rows, new.rows)


def _unlike_answer(old: Answer, new: Answer) -> str | None:
    """The first difference between a stored answer and the same one made again."""
    for field in ('what', 'variant', 'attention'):
        if getattr(old, field) != getattr(new, field):
            return (
                f'{field} of {old.what!r} is {getattr(old, field)!r}, not {getattr(new, field)!r}'
            )
    return _unlike_rows(f'answer {old.what!r}', old.rows, new.rows)


def _unlike_rows(name: str, old: Sequence[Row], new: Sequence[Row]) -> str | None:
    """The first difference between stored rows and those of the checks and studies."""
    if len(old) != len(new):
        return f'{name} has {len(old)} rows, but its checks and studies give {len(new)}'
    for place, (row, again) in enumerate(zip(old, new, strict=True)):
        if field := _unlike(row, again):
            return (
                f'{field} of row {place} of {name} is {getattr(row, field)!r}, but its checks and '
                f'studies give {getattr(again, field)!r}'
            )
    return None


def _agree(field: str, old: Any, new: Any) -> bool:
    """Whether fields are equal; counts of what a claim needs may be one apart."""
    if field not in ('lacking', 'needed') or None in (old, new):
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

"""What a directory has of the studies of claims: WORKDIR/STUDY, or an exported copy."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from qkattn.claims.claim import Claim, Measure
from qkattn.claims.evidence import Loaded
from qkattn.errors import ReportError
from qkattn.report.claim_results import Row
from qkattn.report.prose import counted
from qkattn.verdict import find, load_study

MEASURES = 'measures'
"""The directory, inside that of a study, of the files that measures record."""


def load(directory: Path) -> Loaded:
    """A study with its findings, kept until its results change.

    Raises:
      ReportError: no study, or one without results.
    """
    results = directory / 'results.jsonl'
    return _load(directory, results.stat().st_mtime_ns if results.exists() else 0)


@functools.lru_cache(maxsize=32)
def _load(directory: Path, time: int) -> Loaded:
    study = load_study(directory)
    return Loaded(study, find(study))


class Results:
    """The studies of a directory, each read once."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._read: dict[str, Loaded | None] = {}

    def study(self, name: str) -> Loaded | None:
        """A study with its findings; None if it has no results."""
        if name not in self._read:
            try:
                self._read[name] = load(self.directory / name)
            except ReportError:
                self._read[name] = None
        return self._read[name]

    def has(self, name: str) -> bool:
        """Whether there are results of a study, or files that a measure recorded there."""
        return self.study(name) is not None or (self.directory / name / MEASURES).is_dir()

    def rows(self, measure: Measure) -> list[Row]:
        """The rows of a measure; none before it has recorded, or before its study has results."""
        path = self.directory / measure.study
        ready = (path / MEASURES).is_dir() if measure.record else self.has(measure.study)
        rows = measure.read(path) if ready else []
        return [dataclasses.replace(row, study=measure.study) for row in rows]

    def missing(self, claim: Claim, scale: str) -> Iterator[str]:
        """What a claim lacks, a sentence for each study, with the command that adds it."""
        command = f'python -m experiments.claims {claim.name} --scale={scale} --workdir=DIR'
        for name in claim.studies:
            if not self.has(name):
                yield f'study {name} has no results; {command} trains it into DIR/{name}'
            elif (loaded := self.study(name)) and (left := loaded.study.missing):
                yield f'study {name} lacks the results of {counted(left, "run")}; {command} goes on'
        for measure in claim.measures:
            if measure.record and self.has(measure.study) and not self._recorded(measure):
                yield f'study {measure.study} lacks a measurement; {command} makes it'

    def _recorded(self, measure: Measure) -> bool:
        return (self.directory / measure.study / MEASURES).is_dir()

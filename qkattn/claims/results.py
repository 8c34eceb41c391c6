"""What a directory has of the studies of claims: WORKDIR/STUDY, or an exported copy."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qkattn.claims.claim import Claim, Measure, Recorder
from qkattn.claims.decided import Row
from qkattn.errors import ReportError
from qkattn.report.prose import counted
from qkattn.storage.records import START, read_json
from qkattn.study.stored import RUNS
from qkattn.verdict import Findings, Study, load_findings
from qkattn.verdict.arms import Arm

UNIT = 'nats/token'
MEASURES = 'measures'  # the directory, inside that of a study, of the files that measures record


class Loaded(NamedTuple):
    """A study with its findings."""

    study: Study
    found: Findings

    def names(self, label: str, variant: str) -> bool:
        """Whether a variant, with or without a destination, names the arm of a label."""
        return variant in (label, self.study.bare(label))

    def context(self, arm: Arm) -> dict[str, str]:
        """Where an arm is compared: the kind of its model, its size, corpus and steps."""
        context = {
            'model': self.study.base['model']['kind'].replace('_', '-'),
            'size': arm.size,
            'corpus': arm.corpus,
            'steps': str(arm.example.planned_steps),
        }
        destination = arm.variant.removeprefix(self.study.bare(arm.variant)).strip(' []')
        return context | ({'destination': destination} if destination else {})


def marker(study: Path, record: Recorder) -> Path:
    """The file that `record` is over for a study: how the process started, and its seconds."""
    return study / MEASURES / f'{record.__module__.rpartition(".")[2]}.done'


def load(directory: Path) -> Loaded:
    """A study with its findings, kept until its files change; raises as `load_study`."""
    return Loaded(*load_findings(directory))


class Results:
    """The studies of a directory, each read once."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._read: dict[str, Loaded | ReportError] = {}

    def study(self, name: str) -> Loaded | None:
        """A study with its findings; None if it has no results, or none that can be read."""
        if name not in self._read:
            try:
                self._read[name] = load(self.directory / name)
            except ReportError as error:
                self._read[name] = error
        loaded = self._read[name]
        return None if isinstance(loaded, ReportError) else loaded

    def has(self, name: str) -> bool:
        """Whether there are results of a study, or files that a measure recorded there."""
        return self.study(name) is not None or (self.directory / name / MEASURES).is_dir()

    def unfinished(self, name: str) -> bool:
        """Whether a study has no results, or lacks runs of its plan."""
        loaded = self.study(name)
        return bool(loaded.study.missing) if loaded else not self.has(name)

    def rows(self, measure: Measure) -> list[Row]:
        """The rows of a measure; none before it has recorded, or before its study has results."""
        rows = measure.read(self.directory / measure.study) if self.ready(measure) else []
        return [dataclasses.replace(row, study=measure.study) for row in rows]

    def ready(self, measure: Measure) -> bool:
        """Whether a measure has recorded; of one that only reads, whether there are results."""
        if measure.record is None:
            return self.study(measure.study) is not None
        return marker(self.directory / measure.study, measure.record).exists()

    def provenance(self, measure: Measure) -> dict[str, Any] | None:
        """How a measure was recorded: 'start', as of a run, and 'seconds'; None if it was not."""
        if measure.record is None or not self.ready(measure):
            return None
        path = marker(self.directory / measure.study, measure.record)
        return read_json(path, {'start': START, 'seconds': float})

    def missing(self, claim: Claim, scale: str) -> Iterator[str]:
        """What a claim lacks, a sentence for each study, with the command that adds it."""
        command = f'python -m experiments.claims {claim.name} --scale={scale} --workdir=DIR'
        for name in claim.studies:
            loaded = self.study(name)
            if loaded is None and self._begun(name):
                yield f'study {name} cannot be used: {self._read[name]}'
            elif not self.has(name):
                yield f'study {name} has no results; {command} trains it into DIR/{name}'
            elif loaded and (left := loaded.study.missing):
                yield f'study {name} lacks the results of {counted(left, "run")}; {command} goes on'
            elif loaded and (problems := loaded.study.problems):
                yield f'study {name} is damaged: {problems[0].removesuffix(".")}'
        for measure in claim.measures:
            if measure.record and self.has(measure.study) and not self.ready(measure):
                yield f'study {measure.study} lacks a measurement; {command} makes it'

    def _begun(self, name: str) -> bool:
        """Whether there are results, whatever they are like."""
        files = (self.directory / name / file for file in ('results.jsonl', RUNS))
        return any(file.exists() and file.stat().st_size for file in files)

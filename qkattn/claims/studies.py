"""The studies of claims: configs at a scale, training, and the results of a directory."""

import dataclasses
import logging
import runpy
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from qkattn.claims.claim import Claim, Measure, Row
from qkattn.config import Study, from_config_dict
from qkattn.errors import ConfigError, DiskError, ProcessError, ReportError
from qkattn.jobs import cli
from qkattn.jobs.display import waiting
from qkattn.jobs.output import text_table
from qkattn.report import write_report
from qkattn.report.prose import counted
from qkattn.storage.files import check_directory, make_directory
from qkattn.storage.records import START, read_json, write_json
from qkattn.storage.run_directory import describe_start
from qkattn.study import declaration, local_workers, plan, stored, yardsticks
from qkattn.study.arms import build_arms
from qkattn.verdict import Findings, load_findings
from qkattn.verdict import Study as LoadedStudy
from qkattn.verdict.arms import Arm

MEASURES = 'measures'  # the directory, inside that of a study, of what measures record

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A study with its findings."""

    study: LoadedStudy
    findings: Findings

    def names(self, label: str, variant: str) -> bool:
        """Whether a variant, with or without a destination, names the labelled arm."""
        return variant in (label, self.study.bare(label))

    def context(self, arm: Arm) -> dict[str, str]:
        """The context of an arm: model kind, size, corpus and steps."""
        context = {
            'model': self.study.base['model']['kind'].replace('_', '-'),
            'size': arm.size,
            'corpus': arm.corpus,
            'steps': str(arm.example.planned_steps),
        }
        destination = arm.variant.removeprefix(self.study.bare(arm.variant)).strip(' []')
        return context | ({'destination': destination} if destination else {})


def load(directory: Path) -> Loaded:
    """A study with its findings, kept until its files change; raises as `load_study`."""
    return Loaded(*load_findings(directory))


class Results:
    """The studies of a directory, WORKDIR/STUDY or an exported copy, each read once."""

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
        """Whether a study has results, or a measure's own directory what it recorded."""
        return self.study(name) is not None or recording(self.directory / name).exists()

    def problem(self, name: str) -> str | None:
        """What a study lacks to decide a claim alone; None if it has the results of its plan."""
        loaded = self.study(name)
        files = (self.directory / name / file for file in ('results.jsonl', stored.RUNS))
        if loaded is None and any(f.exists() and f.stat().st_size for f in files):
            return f'cannot be used: {self._read[name]}'
        if not self.has(name):
            return 'has no results'
        if loaded and (left := loaded.study.missing):
            return f'lacks the results of {counted(left, "run")}'
        problems = loaded.study.problems if loaded else ()
        return f'is damaged: {problems[0]}' if problems else None

    def recorded(self, name: str) -> dict[str, Any] | None:
        """How the process that recorded a measure started, and `seconds`; None if none did.

        RunDirectoryError if the file is damaged.
        """
        path = recording(self.directory / name)
        return read_json(path, {'start': START, 'seconds': float}) if path.exists() else None

    def rows(self, measure: Measure) -> list[Row]:
        """The rows of a measure; none before it has recorded, or before its study has results."""
        rows = measure.read(self.directory / measure.study) if self.has(measure.study) else []
        return [dataclasses.replace(row, study=measure.study) for row in rows]


def recording(study: Path) -> Path:
    """The file of what the measure of a directory of its own recorded."""
    return study / MEASURES / f'{study.name}.json'


def study_of(name: str, scale: str) -> Study | None:
    """The study that configs/claims/NAME.py gives at a scale; None if there is no such file."""
    path = cli.shipped('configs/claims').get(name)
    if path is None:
        return None
    return cast(Study, from_config_dict(runpy.run_path(str(path))['get_config'](scale)))


def names_of(claims: Iterable[Claim]) -> list[str]:
    """The studies of claims, each once."""
    return list(dict.fromkeys(name for claim in claims for name in claim.studies))


def check_workdir(claims: Iterable[Claim], scale: str, directory: Path) -> None:
    """Raises ConfigError for a directory of one study, or one that lacks a study without config."""
    if (directory / 'study.json').exists():
        raise ConfigError(
            f'workdir={directory} is the directory of one study; claims need another, which has a '
            'directory for each study'
        )
    declaration.require_no_run(directory)
    for claim in claims:
        for name in dict.fromkeys(expected.study for expected in claim.expectations):
            if study_of(name, scale) is None and not (directory / name).is_dir():
                raise ConfigError(
                    f'claim {claim.name}: study {name!r} is none of configs/claims; train it with '
                    f'{cli.script("ablate")} --workdir={directory / name}, then decide with '
                    '--notrain'
                )


def train(
    claims: Iterable[Claim], scale: str, directory: str | Path, workers: int | None
) -> dict[str, Exception]:
    """Trains each study of the claims once, then records measures; the same call resumes.

    A study that cannot be trained, or whose workers give up, does not stop the others: returns the
    reasons by name. `workers` as in `local_workers.run`; 1 is this process. DiskError if nothing
    can be written; Stopped on SIGTERM or Ctrl-C, with the state saved.
    """
    claims, path = list(claims), check_directory(directory)
    names, failed = names_of(claims), dict[str, Exception]()
    studies = {name: study for name in names if (study := study_of(name, scale))}

    def attempt(name: str, job: Callable[..., Any], *arguments: Any) -> None:
        if name in failed:
            return
        log.info('study %s, %d of %d', name, names.index(name) + 1, len(names))
        try:
            job(*arguments)
        except DiskError:
            raise  # the others could not be saved either
        except (ConfigError, ProcessError) as error:
            failed[name] = error
            log.error('study %s: %s', name, error)

    for name, study in studies.items():
        arms = partial(build_arms, study)
        attempt(name, local_workers.run, study, arms, path / name, workers)
    # After all training: workers start from a process that has no threads of JAX yet.
    for name, study in studies.items():
        if study.tuning.seeds:
            attempt(name, yardsticks.record_finished, path / name)
    for measure in (measure for claim in claims for measure in claim.measures):
        if measure.record:
            attempt(measure.study, _record, path / measure.study, measure.record, scale)
    return failed


def _record(study: Path, record: Callable[[str], dict[str, Any]], scale: str) -> None:
    """Keeps what a measure records, with how this process started, unless it is there."""
    path = recording(study)
    if path.exists():
        return
    started = time.perf_counter()
    recorded = record(scale)
    seconds = time.perf_counter() - started
    start = describe_start()  # exported, so that user, host and paths are left out
    make_directory(path.parent)
    write_json(path, recorded | {'start': {key: start[key] for key in START}, 'seconds': seconds})


def report(names: Iterable[str], directory: Path) -> None:
    """Writes the report of each study with newer results; each report counts as a look."""
    for name in names:
        results, page = (directory / name / file for file in ('results.jsonl', 'report.html'))
        if not results.exists() or not results.stat().st_size:
            continue
        if not page.exists() or page.stat().st_mtime < results.stat().st_mtime:
            with waiting(name, 'writing the report'):
                write_report(directory / name)


def costs(claims: Iterable[Claim], scale: str) -> str:
    """A table of the plans of the studies of claims, with their sum.

    Arms that are trained longer are counted as if all were.
    """
    claims = list(claims)
    lines: list[tuple] = []
    for name in names_of(claims):
        if study := study_of(name, scale):
            with waiting(name, 'planning'):
                runs = plan.imagined(study, build_arms(study))
            serves = ','.join(claim.name for claim in claims if name in claim.studies)
            lines.append((name, serves, *plan.cost(runs)))
    sums = [sum(line[column] for line in lines) for column in range(2, 6)]
    titles = [('study', True), ('claims', True)]
    titles += [(name, False) for name in ('runs', 'trials', 'tokens', 'FLOPs')]
    rows = [
        [name, serves, f'{runs:,}', f'{trials:,}', f'{tokens:.3g}', f'{flops:.3g}']
        for name, serves, runs, trials, tokens, flops in [*lines, ('total', '', *sums)]
    ]
    return text_table(titles, rows)

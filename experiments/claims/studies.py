"""The studies of claims: configs at a scale, training, and the results of a directory."""

import dataclasses
import functools
import logging
import runpy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from experiments.claims.claim import Claim, Measure, Row, Speaks
from qkattn.config import Study
from qkattn.errors import ConfigError, ReportError
from qkattn.jobs import cli
from qkattn.jobs.display import waiting
from qkattn.jobs.output import text_table
from qkattn.report import write_report
from qkattn.report.prose import counted
from qkattn.storage import ledger
from qkattn.storage.files import check_directory
from qkattn.storage.records import read_json
from qkattn.study import local_workers, plan, yardsticks
from qkattn.study.arms import build_arms
from qkattn.study.plan import PlannedRun
from qkattn.verdict import Findings, load_findings, rules
from qkattn.verdict import Study as LoadedStudy
from qkattn.verdict.arms import Arm

CONFIGS = 'configs/claims'

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
            'model': self.study.base.model.kind.replace('_', '-'),
            'size': arm.size,
            'corpus': arm.corpus,
            'steps': str(arm.example.run.num_steps),
        }
        destination = arm.variant.removeprefix(self.study.bare(arm.variant)).strip(' []')
        return context | ({'destination': destination} if destination else {})


class Results:
    """The studies of a directory, WORKDIR/STUDY or an exported copy, each read once."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._read: dict[str, Loaded | ReportError] = {}

    def study(self, name: str) -> Loaded | None:
        """A study with its findings; None if it has no results, or none that can be read."""
        if name not in self._read:
            try:
                self._read[name] = Loaded(*load_findings(self.directory / name))
            except ReportError as error:
                self._read[name] = error
        loaded = self._read[name]
        return None if isinstance(loaded, ReportError) else loaded

    def newest_first(self, name: str) -> list[str]:
        """The studies of the directory that repeat one, the last repeat first; then that one."""
        names = [name]
        for earlier in names:  # which grows
            names += [repeat for repeat in self._repeats.get(earlier, ()) if repeat not in names]
        return names[::-1]

    @functools.cached_property
    def _repeats(self) -> dict[str, list[str]]:
        """By the name of a study those that repeat it, in the order in which they began."""
        began: dict[tuple[str, str], list[str]] = {}
        for path in sorted(self.directory.glob(f'*/{ledger.NAME}')):
            try:
                kept = ledger.read(path)
            except ReportError:  # of which `problem` tells the reason
                continue
            name = path.parent.name
            repeated = [repeat.study for repeat in kept.repeats if not repeat.is_lost]
            began[kept.entries[0]['time'], name] = repeated
        repeats: dict[str, list[str]] = {}
        for (_, name), repeated in sorted(began.items()):
            for earlier in repeated:
                repeats.setdefault(earlier, []).append(name)
        return repeats

    def problem(self, name: str) -> str | None:
        """What a study lacks to decide a claim alone; None if it has the results of its plan."""
        if (loaded := self.study(name)) is None:
            is_study = (self.directory / name / 'study.json').exists()
            return f'cannot be used: {self._read[name]}' if is_study else 'has no results'
        if left := loaded.study.missing:
            return f'lacks the results of {counted(left, "arm")}'
        problems = loaded.study.problems
        return f'is damaged: {problems[0]}' if problems else None

    def rows(self, measure: Measure, decisive: bool) -> Iterator[Row]:
        """The rows of a measure; none before its study has results.

        They decide nothing if not decisive, or if a rule withholds every verdict or a baseline's.
        """
        if loaded := self.study(measure.study):
            bases = rules.baselines(loaded.study, loaded.findings.arms)
            decisive &= bool(bases) and not loaded.findings.blocks
            decisive &= not any([*rules.untrained(arm), *arm.blocks] for arm in bases)
            for row in measure.read(loaded):
                is_open = not decisive and row.speaks != Speaks.BESIDE
                speaks = Speaks.OPEN if is_open else row.speaks
                yield dataclasses.replace(row, study=measure.study, speaks=speaks)


def studies_of(claims: Iterable[Claim], scale: str) -> dict[str, Study]:
    """The studies of claims, by name, that configs/claims/NAME.py give at a scale.

    With those that repeat them, each behind the study that it repeats.
    """
    configs = {
        name: cast(Study, runpy.run_path(str(file))['get_config'](scale))
        for name, file in cli.shipped(CONFIGS).items()
    }
    names = [name for claim in claims for name in claim.studies]
    for name in names:  # which grows
        names += [other for other, study in configs.items() if study.repeats == name]
    ordered: dict[str, Study] = {}

    def add(name: str) -> None:
        """Adds a study behind the one that it repeats."""
        if name in configs and name not in ordered:
            if (repeated := configs[name].repeats) is not None:
                add(repeated)
            ordered[name] = configs[name]

    for name in names:
        add(name)
    return ordered


def check_workdir(studies: Mapping[str, Study], scale: str, directory: Path) -> None:
    """Raises ConfigError for the directory of a study or run, and for studies of another scale."""
    if any((directory / file).exists() for file in ('study.json', 'config.json')):
        raise ConfigError(
            f'workdir={directory} is the directory of a study or run; claims need a directory '
            'of their own, with a subdirectory for each study'
        )
    for name, study in studies.items():
        path = directory / name / 'study.json'
        sizes = read_json(path, {'sizes': tuple[str, ...]})['sizes'] if path.is_file() else ()
        if sizes and not {*sizes} & {*study.sizes}:
            raise ConfigError(
                f'{path.parent} has the sizes {", ".join(sizes)}, but at scale {scale} the study '
                f'has {", ".join(study.sizes)}; give another scale or another workdir'
            )


def train(studies: Mapping[str, Study], scale: str, directory: Path, workers: int | None) -> None:
    """Trains each study in a directory of its name; the same call resumes.

    Then records yardsticks, but at scale smoke, which decides nothing. `workers` as in
    `local_workers.run`, which raises; 1 is this process. DiskError if nothing can be written;
    Stopped on SIGTERM or Ctrl-C, with the state saved.
    """
    path = check_directory(directory)
    for number, (name, study) in enumerate(studies.items(), start=1):
        log.info('study %s, %d of %d', name, number, len(studies))
        local_workers.run(study, path / name, build_arms(study), workers)
    # After all training: this process takes memory of a GPU as soon as it computes.
    for name in studies if scale != 'smoke' else ():
        yardsticks.record_finished(path / name)


def report(claims: Iterable[Claim], directory: Path) -> None:
    """Writes the report of each study with newer results; each report counts as a look."""
    studies = Results(directory)
    named = [name for claim in claims for name in claim.studies]
    repeats = [other for name in named for other in reversed(studies.newest_first(name))]
    for name in dict.fromkeys(repeats):
        results, page = (directory / name / file for file in ('results.jsonl', 'report.html'))
        times = [path.stat().st_mtime if path.exists() else 0.0 for path in (page, results)]
        if times[0] < times[1] and results.stat().st_size:
            try:
                with waiting(name, 'writing the report'):
                    write_report(directory / name)
            except ReportError as error:  # other claims can be decided all the same
                log.warning('no report of study %s: %s', name, error)


def costs(studies: Mapping[str, Study]) -> str:
    """A table of the plans of studies, with their sum."""
    planned: dict[str, list[PlannedRun]] = {}
    for name, study in studies.items():
        with waiting(name, 'planning'):
            planned[name] = plan.imagined(study, build_arms(study))
    every = [run for runs in planned.values() for run in runs]
    rows = []
    for name, runs in (planned | {'total': every}).items():
        number, trials, tokens, flops = plan.cost(runs)
        rows.append([name, f'{number:,}', f'{trials:,}', f'{tokens:.3g}', f'{flops:.3g}'])
    titles = [(name, name == 'study') for name in ('study', 'runs', 'trials', 'tokens', 'FLOPs')]
    return text_table(titles, rows)

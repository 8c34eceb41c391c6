"""The studies of claims: configs at a scale, training, and the results of a directory."""

import dataclasses
import functools
import logging
import runpy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from experiments.claims.claim import Claim, ClaimResult, Measure, Row, Speaks
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
from qkattn.verdict.trained_arm import TrainedArm

CONFIGS = 'configs/claims'

log = logging.getLogger(__name__)


def context_of(findings: Findings, arm: TrainedArm) -> dict[str, str]:
    """Returns what an arm was trained with, by factor, for the context of a row of evidence.

    For example, {'model': 'decoder', 'size': 'd_model=96', 'corpus': 'stdlib', 'steps': '2000'}. An
    arm named 'qk/no_v [d_ff]' also has the destination of its saved parameters, 'd_ff'.
    """
    study = findings.study
    context = {
        'model': study.base.model.kind.replace('_', '-'),
        'size': arm.size,
        'corpus': arm.corpus,
        'steps': str(arm.example.run.num_steps),
    }
    # What `bare` removes from the name: ' [d_ff]'.
    destination = arm.variant.removeprefix(study.bare(arm.variant)).strip(' []')
    if destination:
        context['destination'] = destination
    return context


class Results:
    """The studies of a directory, which is the workdir or an exported copy. Each is read once."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._read: dict[str, Findings | ReportError] = {}

    def study(self, name: str) -> Findings | None:
        """Returns the findings of a study; None if it has no results that can be read."""
        if name not in self._read:
            try:
                self._read[name] = load_findings(self.directory / name)
            except ReportError as error:
                self._read[name] = error
        findings = self._read[name]
        return None if isinstance(findings, ReportError) else findings

    def newest_first(self, name: str) -> list[str]:
        """Returns the names of a study and of all studies that repeat it, the newest first.

        Repeats of repeats are included.
        """
        names = [name]
        for earlier in names:
            # The list grows while the loop goes through it, so repeats of repeats are found, too.
            for repeat in self._repeats.get(earlier, ()):
                if repeat not in names:
                    names.append(repeat)
        names.reverse()
        return names

    def with_repeats(self, claims: Iterable[Claim | ClaimResult]) -> list[str]:
        """Returns the names of the studies of claims, each followed by the studies that repeat it.

        Each name occurs once.
        """
        names: dict[str, None] = {}
        for claim in claims:
            for study in claim.studies:
                names |= dict.fromkeys(reversed(self.newest_first(study)))
        return list(names)

    @functools.cached_property
    def _repeats(self) -> dict[str, list[str]]:
        """For each study, the names of the studies that repeat it, in the order of their start.

        A repeat asks the question of an earlier study again, with other seeds. Its ledger names
        that study.
        """
        # (start, name, names of the studies that it repeats) of each study in the directory.
        studies: list[tuple[str, str, list[str]]] = []
        for path in self.directory.glob(f'*/{ledger.NAME}'):
            try:
                ledger_of_study = ledger.read(path)
            except ReportError:
                # `problem` returns the reason.
                continue
            start = ledger_of_study.entries[0]['time']
            # A study that was repeated may be lost: there is only a record of it.
            earlier = [repeat.study for repeat in ledger_of_study.repeats if not repeat.is_lost]
            studies.append((start, path.parent.name, earlier))

        repeats: dict[str, list[str]] = {}
        for _, name, earlier in sorted(studies):
            for earlier_name in earlier:
                repeats.setdefault(earlier_name, []).append(name)
        return repeats

    def problem(self, name: str) -> str | None:
        """Returns what is wrong with a study, such as 'has no results'; None if it is complete."""
        findings = self.study(name)
        if findings is None:
            if (self.directory / name / 'study.json').exists():
                error = self._read[name]
                return f'cannot be used: {error}'
            return 'has no results'
        if findings.study.missing:
            return f'lacks the results of {counted(findings.study.missing, "arm")}'
        if findings.study.problems:
            return f'is damaged: {findings.study.problems[0]}'
        return None

    def rows(self, measure: Measure, decisive: bool) -> Iterator[Row]:
        """Yields the rows that a measure reads from its study; none without results.

        A row decides nothing (OPEN) in three cases: if `decisive` is False, if remarks withhold
        every verdict of the study (`blocks`), or if a baseline has not learned enough or breaks a
        rule. Rows that are only shown (BESIDE) stay so.
        """
        findings = self.study(measure.study)
        if findings is None:
            return
        baselines = rules.baselines(findings.study, findings.arms)
        may_decide = decisive and bool(baselines) and not findings.blocks
        for baseline in baselines:
            if baseline.blocks or list(rules.why_untrained(baseline)):
                may_decide = False
        for row in measure.read(findings):
            speaks = row.speaks
            if speaks != Speaks.BESIDE and not may_decide:
                speaks = Speaks.OPEN
            yield dataclasses.replace(row, study=measure.study, speaks=speaks)


def studies_of(claims: Iterable[Claim], scale: str) -> dict[str, Study]:
    """Returns the configs of claims' studies, from configs/claims/NAME.py, by name.

    A study that repeats one of them, or repeats a repeat, is included. It comes after the study
    that it repeats.
    """
    configs: dict[str, Study] = {}
    for name, file in cli.shipped(CONFIGS).items():
        get_config = runpy.run_path(str(file))['get_config']
        configs[name] = get_config(scale)

    names = [name for claim in claims for name in claim.studies]
    for name in names:
        # The list grows while the loop goes through it, so repeats of repeats are found, too.
        names += [other for other, study in configs.items() if study.repeats == name]

    ordered: dict[str, Study] = {}
    for name in names:
        # Go back from the study to the first one that it repeats, and add them in reverse.
        chain = []
        member: str | None = name
        while member in configs and member not in ordered:
            chain.append(member)
            member = configs[member].repeats
        for earliest_first in reversed(chain):
            ordered[earliest_first] = configs[earliest_first]
    return ordered


def check_workdir(studies: Mapping[str, Study], scale: str, directory: Path) -> None:
    """Raises ConfigError if `directory` is a study or run, or has studies of another scale."""
    if any((directory / file).exists() for file in ('study.json', 'config.json')):
        raise ConfigError(
            f'workdir={directory} is the directory of a study or run; claims need a directory '
            'of their own, with a subdirectory for each study'
        )
    for name, study in studies.items():
        path = directory / name / 'study.json'
        if not path.is_file():
            continue
        sizes = read_json(path, {'sizes': tuple[str, ...]})['sizes']
        if sizes and set(sizes).isdisjoint(study.sizes):
            raise ConfigError(
                f'{path.parent} has the sizes {", ".join(sizes)}, but at scale {scale} the study '
                f'has {", ".join(study.sizes)}; give another scale or another workdir'
            )


def train(studies: Mapping[str, Study], scale: str, directory: Path, workers: int | None) -> None:
    """Trains each study in a directory of its name; the same call resumes.

    Then records the yardsticks of all studies, except at scale smoke, which decides nothing.
    `workers` is the number of processes on this machine, as in `local_workers.run`; 1 is this
    process. Raises like `local_workers.run`. Raises DiskError if nothing can be written, and
    Stopped on SIGTERM or Ctrl-C, with the state saved.
    """
    path = check_directory(directory)
    for number, (name, study) in enumerate(studies.items(), start=1):
        log.info('study %s, %d of %d', name, number, len(studies))
        local_workers.run(study, path / name, build_arms(study), workers)
    # This process takes memory of a GPU as soon as it computes, so it does this after all training.
    if scale != 'smoke':
        for name in studies:
            yardsticks.record_finished(path / name)


def report(claims: Iterable[Claim], directory: Path) -> None:
    """Writes the reports of the claims' studies, unless there are no results newer than a report.

    Each report counts as a look at results, which the study's ledger records.
    """
    for name in Results(directory).with_repeats(claims):
        trained = directory / name / 'results.jsonl'
        page = directory / name / 'report.html'
        if not trained.exists() or not trained.stat().st_size:
            continue
        if page.exists() and page.stat().st_mtime >= trained.stat().st_mtime:
            continue
        try:
            with waiting(name, 'writing the report'):
                write_report(directory / name)
        except ReportError as error:
            # Claims on other studies can still be decided.
            log.warning('no report of study %s: %s', name, error)


def costs(studies: Mapping[str, Study]) -> str:
    """Returns a table of what the plans of studies cost: a row for each study, and their sum."""
    planned: dict[str, list[PlannedRun]] = {}
    for name, study in studies.items():
        with waiting(name, 'planning'):
            planned[name] = plan.fewest_runs(study, build_arms(study))
    planned['total'] = [run for runs in planned.values() for run in runs]
    rows = []
    for name, runs in planned.items():
        num_runs, num_trials, tokens, flops = plan.cost(runs)
        rows.append([name, f'{num_runs:,}', f'{num_trials:,}', f'{tokens:.3g}', f'{flops:.3g}'])
    # Each title with whether its column is aligned to the left.
    titles = [('study', True), ('runs', False), ('trials', False), ('tokens', False)]
    titles.append(('FLOPs', False))
    return text_table(titles, rows)

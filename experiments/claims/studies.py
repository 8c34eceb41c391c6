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
    """Returns the model, size, corpus and number of steps of an arm, for the context of a row.

    For example, {'model': 'decoder', 'size': 'd_model=96', 'corpus': 'stdlib', 'steps': '2000'}. An
    arm 'qk/no_v [d_ff]' also has 'destination': 'd_ff', where its saved parameters are spent.
    """
    study = findings.study
    context = {
        'model': study.base.model.kind.replace('_', '-'),
        'size': arm.size,
        'corpus': arm.corpus,
        'steps': str(arm.example.run.num_steps),
    }
    suffix = arm.variant.removeprefix(study.bare(arm.variant))  # ' [d_ff]' or ''
    destination = suffix.strip(' []')
    if destination:
        context['destination'] = destination
    return context


class Results:
    """The studies of a directory, with a cache of their findings."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._read: dict[str, Findings | ReportError] = {}

    def study(self, name: str) -> Findings | None:
        """Returns the findings of a study; None without readable results."""
        if name not in self._read:
            try:
                self._read[name] = load_findings(self.directory / name)
            except ReportError as error:
                self._read[name] = error
        findings = self._read[name]
        return None if isinstance(findings, ReportError) else findings

    def newest_first(self, name: str) -> list[str]:
        """Returns the names of a study's direct and indirect repeats, newest first, then `name`."""
        names = [name]
        for earlier in names:
            # Appending to the list during the loop also finds repeats of repeats.
            for repeat in self._repeats.get(earlier, ()):
                if repeat not in names:
                    names.append(repeat)
        names.reverse()
        return names

    def with_repeats(self, claims: Iterable[Claim | ClaimResult]) -> list[str]:
        """Returns the distinct study names of claims, each followed by its repeats."""
        names: dict[str, None] = {}  # an ordered set
        for claim in claims:
            for study in claim.studies:
                oldest_first = reversed(self.newest_first(study))
                names |= dict.fromkeys(oldest_first)
        return list(names)

    @functools.cached_property
    def _repeats(self) -> dict[str, list[str]]:
        """Maps each study to the studies that repeat it with other seeds, oldest first."""
        studies: list[tuple[str, str, list[str]]] = []  # (start time, name, repeated studies)
        for path in self.directory.glob(f'*/{ledger.NAME}'):
            try:
                ledger_of_study = ledger.read(path)
            except ReportError:
                # `problem` returns the error.
                continue
            start_time = ledger_of_study.entries[0]['time']
            repeated = [repeat.study for repeat in ledger_of_study.repeats if not repeat.is_lost]
            studies.append((start_time, path.parent.name, repeated))

        repeats: dict[str, list[str]] = {}
        for _, name, repeated in sorted(studies):
            for repeated_name in repeated:
                repeats.setdefault(repeated_name, []).append(name)
        return repeats

    def problem(self, name: str) -> str | None:
        """Returns what a study lacks, such as 'has no results'; None if it is complete."""
        findings = self.study(name)
        if findings is None:
            if not (self.directory / name / 'study.json').exists():
                return 'has no results'
            error = self._read[name]
            return f'cannot be used: {error}'
        if findings.study.missing:
            return f'lacks the results of {counted(findings.study.missing, "arm")}'
        if findings.study.problems:
            return f'is damaged: {findings.study.problems[0]}'
        return None

    def rows(self, measure: Measure, decisive: bool) -> Iterator[Row]:
        """Yields the rows that a measure reads from its study, if the study has results.

        FOR and AGAINST become OPEN if `decisive` is False, or if the study or a baseline breaks a
        rule.
        """
        findings = self.study(measure.study)
        if findings is None:
            return
        baselines = rules.baselines(findings.study, findings.arms)
        may_decide = decisive and bool(baselines) and not findings.blocks
        for baseline in baselines:
            # Reasons why the baseline is not trained well enough.
            reasons_untrained = list(rules.why_untrained(baseline))
            if baseline.blocks or reasons_untrained:
                may_decide = False
        for row in measure.read(findings):
            speaks = row.speaks
            if speaks != Speaks.BESIDE and not may_decide:
                speaks = Speaks.OPEN
            yield dataclasses.replace(row, study=measure.study, speaks=speaks)


def studies_of(claims: Iterable[Claim], scale: str) -> dict[str, Study]:
    """Returns the configs of claims' studies and their repeats, from configs/claims/NAME.py.

    The configs are sorted so that every study comes before its repeats.
    """
    configs: dict[str, Study] = {}
    for name, file in cli.shipped(CONFIGS).items():  # 'lm_long': configs/claims/lm_long.py
        get_config = runpy.run_path(str(file))['get_config']
        configs[name] = get_config(scale)

    names = [name for claim in claims for name in claim.studies]
    for name in names:
        # Appending to the list during the loop also finds repeats of repeats.
        names += [repeat for repeat, study in configs.items() if study.repeats == name]

    ordered: dict[str, Study] = {}
    for name in names:
        newest_first = []  # the study, the study that it repeats, and so on
        study_name: str | None = name
        while study_name in configs and study_name not in ordered:
            newest_first.append(study_name)
            study_name = configs[study_name].repeats
        for earliest in reversed(newest_first):
            ordered[earliest] = configs[earliest]
    return ordered


def check_workdir(studies: Mapping[str, Study], scale: str, directory: Path) -> None:
    """Raises ConfigError if `directory` is a study or run, or its studies are of another scale."""
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
    """Trains each study in a subdirectory, or resumes; then records yardsticks to beat.

    Args:
        studies: The configs by name.
        scale: One of SCALES. Scale smoke has no yardsticks.
        directory: The parent directory.
        workers: The number of processes, as in `local_workers.run`.

    Raises:
        DiskError: Nothing can be written.
        Stopped: On SIGTERM or Ctrl-C, with the state saved.
    """
    path = check_directory(directory)
    for position, (name, study) in enumerate(studies.items(), start=1):
        log.info('study %s, %d of %d', name, position, len(studies))
        local_workers.run(study, path / name, build_arms(study), workers)
    # This process takes GPU memory once it computes, so yardsticks wait until workers are done.
    if scale != 'smoke':
        for name in studies:
            yardsticks.record_finished(path / name)


def report(claims: Iterable[Claim], directory: Path) -> None:
    """Writes a report for each study with new results, which counts as a look at the results."""
    for name in Results(directory).with_repeats(claims):
        results_file = directory / name / 'results.jsonl'
        report_file = directory / name / 'report.html'
        has_results = results_file.exists() and results_file.stat().st_size > 0
        if not has_results:
            continue
        if report_file.exists() and report_file.stat().st_mtime >= results_file.stat().st_mtime:
            continue  # the report has all results
        try:
            with waiting(name, 'writing the report'):
                write_report(directory / name)
        except ReportError as error:
            # Claims on other studies can still be decided.
            log.warning('no report of study %s: %s', name, error)


def costs(studies: Mapping[str, Study]) -> str:
    """Returns a table of the planned cost: a line for each study, and the total."""
    lines = []
    all_runs: list[PlannedRun] = []
    for name, study in studies.items():
        with waiting(name, 'planning'):
            runs = plan.fewest_runs(study, build_arms(study))
        lines.append(_cells_of_cost(name, runs))
        all_runs.extend(runs)
    lines.append(_cells_of_cost('total', all_runs))
    # (title, whether the column is aligned to the left)
    titles = [
        ('study', True),
        ('runs', False),
        ('trials', False),
        ('tokens', False),
        ('FLOPs', False),
    ]
    return text_table(titles, lines)


def _cells_of_cost(name: str, runs: list[PlannedRun]) -> list[str]:
    """Returns a line of the table of costs: the name, then runs, trials, tokens and FLOPs."""
    num_runs, num_trials, tokens, flops = plan.cost(runs)
    return [name, f'{num_runs:,}', f'{num_trials:,}', f'{tokens:.3g}', f'{flops:.3g}']

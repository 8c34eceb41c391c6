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
    """Returns the context of an arm by factor: model, size, corpus, steps and perhaps destination.

    The destination of saved parameters is included if the labels of the study's arms contain it.
    """
    study = findings.study
    context = {
        'model': study.base.model.kind.replace('_', '-'),
        'size': arm.size,
        'corpus': arm.corpus,
        'steps': str(arm.example.run.num_steps),
    }
    # 'qk/no_v [d_ff]' -> 'd_ff'
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
        loaded = self._read[name]
        return None if isinstance(loaded, ReportError) else loaded

    def newest_first(self, name: str) -> list[str]:
        """Returns the names of a study and of all studies that repeat it, the newest first.

        Repeats of repeats are included.
        """
        names = [name]
        # The list grows during the loop by the repeats of each study in it.
        for earlier in names:
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
        """The names of the studies that repeat a study, by its name, the first to begin first."""
        # For each study of the directory: its start, its name, and the studies that it repeats.
        studies: list[tuple[str, str, list[str]]] = []
        for path in self.directory.glob(f'*/{ledger.NAME}'):
            try:
                kept = ledger.read(path)
            except ReportError:
                # `problem` returns the reason.
                continue
            repeated = [repeat.study for repeat in kept.repeats if not repeat.is_lost]
            studies.append((kept.entries[0]['time'], path.parent.name, repeated))
        repeats: dict[str, list[str]] = {}
        for _, name, repeated in sorted(studies):
            for earlier in repeated:
                repeats.setdefault(earlier, []).append(name)
        return repeats

    def problem(self, name: str) -> str | None:
        """Returns what is wrong with a study, such as 'has no results'; None if it is complete."""
        loaded = self.study(name)
        if loaded is None:
            if (self.directory / name / 'study.json').exists():
                return f'cannot be used: {self._read[name]}'
            return 'has no results'
        if loaded.study.missing:
            return f'lacks the results of {counted(loaded.study.missing, "arm")}'
        if loaded.study.problems:
            return f'is damaged: {loaded.study.problems[0]}'
        return None

    def rows(self, measure: Measure, decisive: bool) -> Iterator[Row]:
        """Yields the rows of a measure; none if its study has no results.

        The rows leave the claim open in three cases: if `decisive` is False, if a rule withholds
        every verdict of the study, or if a baseline has not learned enough or breaks a rule.
        """
        loaded = self.study(measure.study)
        if loaded is None:
            return
        baselines = rules.baselines(loaded.study, loaded.arms)
        is_withheld = not baselines or bool(loaded.blocks)
        for baseline in baselines:
            if baseline.blocks or list(rules.why_untrained(baseline)):
                is_withheld = True
        for row in measure.read(loaded):
            speaks = row.speaks
            if speaks != Speaks.BESIDE and (is_withheld or not decisive):
                speaks = Speaks.OPEN
            yield dataclasses.replace(row, study=measure.study, speaks=speaks)


def studies_of(claims: Iterable[Claim], scale: str) -> dict[str, Study]:
    """Returns the studies of claims, by name, from configs/claims/NAME.py.

    Studies that repeat them are included. Each comes after the study that it repeats.
    """
    configs: dict[str, Study] = {}
    for name, file in cli.shipped(CONFIGS).items():
        get_config = runpy.run_path(str(file))['get_config']
        configs[name] = get_config(scale)
    names = [name for claim in claims for name in claim.studies]
    # The list grows during the loop by the repeats of each study in it.
    for name in names:
        names += [other for other, study in configs.items() if study.repeats == name]
    ordered: dict[str, Study] = {}

    def add(name: str) -> None:
        """Adds a study after the study that it repeats."""
        if name not in configs or name in ordered:
            return
        if configs[name].repeats is not None:
            add(configs[name].repeats)
        ordered[name] = configs[name]

    for name in names:
        add(name)
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
    """Writes the report of each study with newer results; each report counts as a look."""
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

"""The runs of one arm: its screening, as far as results are known, then its verdict by looks."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from qkattn.config import Config, Study, TrialsConfig, fingerprint
from qkattn.run.records import FINISHED
from qkattn.study.arms import Arm, base_of, looks_of
from qkattn.study.place import LONGER
from qkattn.study.tuning import (
    KNOBS,
    MODEL_KNOBS,
    SCREENING,
    SINGLE,
    TRIAL_KNOBS,
    VERDICT,
    Settings,
    tune,
)

# The results of a run, one per trial; None until it is finished.
Results = Callable[['PlannedRun'], list[dict[str, Any]] | None]


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run: an arm at one stage, trained as one stack of trials.

    Attributes:
      arm: the arm.
      stage: 'screening', 'verdict' at the tuned settings, or 'single' in a study without tuning.
      knob: the setting that is screened.
      config: resolved.
      kept: the directory, where an earlier plan named it otherwise.
    """

    arm: Arm
    stage: str
    knob: str | None
    config: Config
    kept: str | None = None

    @property
    def id(self) -> str:
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """Relative to the study: readable, and one per configuration."""
        if self.kept is not None:
            return self.kept
        stage = '' if self.stage == SINGLE else f' {self.stage}'
        words = re.sub(r'[^\w.=]+', '-', self.arm.title + stage).strip('-')
        return f'runs/{words}-{self.id}'

    @property
    def tokens(self) -> int:
        """Training tokens, summed over trials."""
        train = self.config.train
        of_trial = train.num_steps * train.batch_size * self.config.model.context
        return of_trial * len(self.config.trials.trials())

    @property
    def work(self) -> float:
        """Proportional to the time that it takes: tokens x parameters."""
        return self.tokens * self.arm.match.target


def single(study: Study, arm: Arm) -> PlannedRun:
    """The run of an arm in a study without tuning: every combination of its settings."""
    return PlannedRun(arm, SINGLE, None, base_of(study, arm))


def screening(
    study: Study, arm: Arm, grids: Mapping[str, tuple[float, ...]], results: Results
) -> tuple[list[PlannedRun], Settings | None]:
    """The screening runs known so far, and once all that are needed are finished, what they chose.

    Ends: a grid holds at most max_points values, each with at most max_seeds seeds.
    """
    runs: list[PlannedRun] = []
    measured: dict[Settings, dict[int, float | None]] = {}
    while (tuning := tune(grids, study.tuning, measured)).knob is not None:
        stack = [tuning.at(value) for value in tuning.values]
        new = screening_runs(study, arm, tuning.knob, stack, tuning.seeds)
        runs += new
        finished = [results(run) for run in new]
        if None in finished:
            return runs, None
        for run, trials in zip(new, finished, strict=True):
            _collect(measured, run, trials)
    return runs, tuning.settings


def screening_runs(
    study: Study, arm: Arm, knob: str, stack: list[Settings], seeds: tuple[int, ...]
) -> list[PlannedRun]:
    """One run for all values of a trial's knob; one for each value that is compiled in."""
    stacks = [stack] if knob in TRIAL_KNOBS else [[settings] for settings in stack]
    return [_run(study, arm, SCREENING, knob, settings, seeds) for settings in stacks]


def verdict_runs(study: Study, arm: Arm, settings: Settings) -> list[PlannedRun]:
    """One run per look at the study, each with the seeds since the look before."""
    seeds = base_of(study, arm).trials.seeds
    looks = (len(seeds),) if arm.place.control == LONGER else looks_of(study)
    return [
        _run(study, arm, VERDICT, None, [settings], seeds[start:end])
        for start, end in itertools.pairwise((0, *looks))
    ]


def _run(
    study: Study,
    arm: Arm,
    stage: str,
    knob: str | None,
    stack: list[Settings],
    seeds: tuple[int, ...],
) -> PlannedRun:
    columns = zip(KNOBS, zip(*stack, strict=True), strict=True)
    values = {name: tuple(dict.fromkeys(column)) for name, column in columns}
    base = base_of(study, arm)
    trials = TrialsConfig(seeds=seeds, **{f'{name}s': values[name] for name in TRIAL_KNOBS})
    compiled_in = {name: values[name][0] for name in MODEL_KNOBS}
    model = dataclasses.replace(base.model, **compiled_in)
    return PlannedRun(arm, stage, knob, dataclasses.replace(base, model=model, trials=trials))


def _collect(
    measured: dict[Settings, dict[int, float | None]], run: PlannedRun, trials: list[dict[str, Any]]
) -> None:
    """Adds the loss by seed for each of the run's settings; None for a diverged trial."""
    compiled_in = tuple(getattr(run.config.model, name) for name in MODEL_KNOBS)
    for trial in trials:
        of = trial['trial']
        settings = (*(of[name] for name in TRIAL_KNOBS), *compiled_in)
        loss = trial['val_loss'] if trial['status'] == FINISHED else None
        measured.setdefault(settings, {})[of['seed']] = loss

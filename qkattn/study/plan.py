"""The plan of a study: its runs, and the files that list them.

    every arm: screening of the learning rate, with larger grids and further seeds until bracketed
    -> the same for the other settings that are tuned -> the verdict up to the first look,
    then all arms up to the next look, and so on, and the controls that are trained longer.

The plan is a function of the study and of the results of finished runs, so all workers derive the
same plan.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qkattn.config import Config, Study, TrialsConfig, fingerprint, to_json
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.storage.records import FINISHED, to_jsonable
from qkattn.storage.run_directory import command_line
from qkattn.study.arms import Arm, base_of, controls_of, corpora_of, grids, is_tuned, looks_of
from qkattn.study.place import LONGER, Place
from qkattn.study.tuning import (
    KNOBS,
    MODEL_KNOBS,
    SCREENING,
    SINGLE,
    TRIAL_KNOBS,
    VERDICT,
    Settings,
    grids_around,
    tune,
    with_knob,
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


# Test loss by seed; None for a diverged trial.
Losses = Mapping[int, float | None]


def losses_of(trials: Sequence[Mapping[str, Any]]) -> Losses:
    """Losses on the test split, of the results of an arm's verdict."""
    return {
        trial['trial']['seed']: trial['test_loss'] if trial['status'] == FINISHED else None
        for trial in trials
    }


def lengthened_arm(arm: Arm) -> Arm:
    """The arm, trained longer."""
    return dataclasses.replace(arm, place=arm.place._replace(control=LONGER))


def to_lengthen(
    study: Study, arms: Sequence[Arm], losses: Mapping[Place, Losses], comparisons: int
) -> list[Arm]:
    """The baseline and the arms with a word, of primary arms of one size and corpus.

    A word is one by the tests alone, on the test split, paired over seeds: other reasons against a
    verdict are not known before the report.

    Args:
      comparisons: of the whole study, to correct for.
    """
    (baseline,) = (arm for arm in arms if arm.variant == study.baseline)
    others = [arm for arm in arms if arm is not baseline]
    of_baseline = losses[baseline.place]
    differences, diverged = {}, {}
    for arm in others:
        own = losses[arm.place]
        pairs = [(own[seed], of_baseline[seed]) for seed in own]
        finished = [one - other for one, other in pairs if one is not None and other is not None]
        differences[arm.place] = (
            inference.paired(finished, study.margin, resamples=None) if finished else None
        )
        diverged[arm.place] = (
            sum(one is None for one, _ in pairs),
            sum(other is None for _, other in pairs),
        )
    judged = decision.judge(differences, diverged=diverged, planned=comparisons)
    silent = (Decision.UNDECIDED, Decision.NO_VERDICT)
    words = [arm for arm in others if judged[arm.place].decision not in silent]
    return [baseline, *words] if words else []


def runs(study: Study, arms: list[Arm], results: Results) -> list[PlannedRun]:
    """Every run known so far."""
    if not is_tuned(study):
        return [single(study, arm) for arm in arms]
    known: list[PlannedRun] = []
    settings: dict[Place, Settings] = {}
    verdicts: dict[Place, list[PlannedRun]] = {}
    for arm in arms:
        screened, chosen = screening(study, arm, grids(study, arm), results)
        known += screened
        if chosen is not None:
            settings[arm.place] = chosen
            verdicts[arm.place] = verdict_runs(study, arm, chosen)
            known.append(verdicts[arm.place][0])
    for look in range(1, len(looks_of(study))):
        before = [of[look - 1] for of in verdicts.values()]
        if len(before) < len(arms) or None in map(results, before):
            break
        known += [of[look] for of in verdicts.values()]
    for arm in _to_lengthen(study, arms, verdicts, results):
        around = grids_around(grids(study, arm), settings[arm.place])
        arm = lengthened_arm(arm)
        screened, chosen = screening(study, arm, around, results)
        known += screened
        if chosen is not None:
            known += verdict_runs(study, arm, chosen)
    return known


def _to_lengthen(
    study: Study,
    arms: list[Arm],
    verdicts: Mapping[Place, list[PlannedRun]],
    results: Results,
) -> Iterator[Arm]:
    """The primary arms to train longer, of each size and corpus whose verdict runs are finished."""
    if controls_of(study).longer is None:
        return
    primary = [arm for arm in arms if arm.place.control is None]
    comparisons = sum(arm.variant != study.baseline for arm in primary)
    for where in dict.fromkeys((arm.place.corpus, arm.place.size) for arm in primary):
        group = [arm for arm in primary if (arm.place.corpus, arm.place.size) == where]
        finished = {
            arm.place: [results(run) for run in verdicts.get(arm.place, ())] for arm in group
        }
        if not all(of and None not in of for of in finished.values()):
            continue
        losses = {
            place: losses_of([trial for trials in of for trial in trials])
            for place, of in finished.items()
        }
        yield from to_lengthen(study, group, losses, comparisons)


def least(study: Study, arms: list[Arm]) -> list[PlannedRun]:
    """The minimum of runs: the grids as declared, and the verdict of every arm."""
    if not is_tuned(study):
        return runs(study, arms, lambda run: None)
    return [run for arm in arms for run in _at_least(study, arm, grids(study, arm))]


def lengthened(study: Study, arms: list[Arm]) -> list[PlannedRun]:
    """The minimum of longer runs if every arm has a word; () if none are made."""
    primary = [arm for arm in arms if arm.place.control is None]
    known: list[PlannedRun] = []
    for arm in primary if controls_of(study).longer is not None else ():
        middle = tune(grids(study, arm), study.tuning, {}).settings
        around = grids_around(grids(study, arm), middle)
        known += _at_least(study, lengthened_arm(arm), around)
    return known


def _at_least(
    study: Study, arm: Arm, grid: Mapping[str, tuple[float, ...]]
) -> Iterator[PlannedRun]:
    middle = tune(grid, study.tuning, {}).settings
    for knob, values in grid.items():
        if len(values) > 1:
            stack = [with_knob(middle, knob, value) for value in values]
            yield from screening_runs(study, arm, knob, stack, study.tuning.seeds)
    yield from verdict_runs(study, arm, middle)


def declaration(study: Study, arms: list[Arm]) -> dict[str, Any]:
    """The content of study.json."""
    values = to_json(study)
    matched = values.pop('match')
    tuning = None
    if is_tuned(study):
        tuning = values['tuning'] | {f'{k}s': grid for k, grid in grids(study, arms[0]).items()}
    return values | {
        'variants': list(dict.fromkeys(a.label for a in arms if a.place.control is None)),
        'matched': matched,
        'corpora': corpora_of(study),
        'controls': to_json(controls_of(study)),
        'seeds': study.base.trials.seeds,
        'looks': looks_of(study),
        'tuning': tuning,
        'base_hash': fingerprint(study.base),
        'arms': [arm.place._asdict() for arm in arms],
        'command': ' '.join(command_line()),
    }


def lines(study: Study, known: list[PlannedRun]) -> str:
    """plan.jsonl: a line per run, with its resolved config."""
    return ''.join(
        json.dumps(
            to_jsonable(
                {
                    'run': run.id,
                    **about(study, run),
                    'destination': run.arm.destination,
                    'directory': run.directory,
                    'trials': len(run.config.trials.trials()),
                    'config': to_json(run.config),
                }
            )
        )
        + '\n'
        for run in known
    )


def about(study: Study, run: PlannedRun) -> dict[str, Any]:
    """The fields of a run that its own directory does not hold."""
    match = run.arm.match
    return {
        **run.arm.place._asdict(),
        'stage': run.stage,
        'knob': run.knob,
        'target': match.target if study.match else None,
        'residual': match.residual if study.match else None,
    }


def result_lines(study: Study, known: list[PlannedRun], results: Results) -> str:
    """results.jsonl: a line per trial of every finished run."""
    text = []
    for run in known:
        fields = _line(study, run)
        # The hash of a config may have been another one when its run was made.
        own = {} if run.kept is None else {'config_hash': run.id}
        text += [json.dumps({**fields, **trial, **own}) + '\n' for trial in results(run) or []]
    return ''.join(text)


def exported_results(study: Study, run: PlannedRun, lines: list[dict]) -> list[dict[str, Any]]:
    """The results of a run as result.json holds them, of its lines in results.jsonl."""
    fields = _line(study, run)
    return [{name: v for name, v in line.items() if name not in fields} for line in lines]


def _line(study: Study, run: PlannedRun) -> dict[str, Any]:
    fields = {'study': study.name, 'run': run.id, **about(study, run)}
    fields['target_parameters'] = fields.pop('target')
    return fields

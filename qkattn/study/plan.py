"""The plan of a study: its runs, and the files that list them.

    every arm: screening of the learning rate, with larger grids and further seeds until bracketed
    -> the same for the other settings that are tuned -> the verdict up to the first look,
    then all arms up to the next look, and so on, and the controls that are trained longer.

The plan is a function of the study, of its history in study.json and of the results of finished
runs, so all workers derive the same plan.
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
from qkattn.storage.records import FINISHED, read, to_jsonable
from qkattn.storage.run_directory import command_line
from qkattn.study.arm_key import LONGER, ArmKey
from qkattn.study.arms import (
    MatchedArm,
    base_of,
    controls_of,
    corpora_of,
    grids,
    is_tuned,
    looks_of,
)
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
Grids = Mapping[str, tuple[float, ...]]
# Loss by seed; None for a diverged trial.
Losses = Mapping[int, float | None]
# The seeds of a run, and of several.
Seeds = tuple[int, ...]
Stacks = tuple[Seeds, ...]


@dataclasses.dataclass(frozen=True)
class History:
    """What the plan keeps of the settings that a study has had, for its runs to stay in the plan.

    A run stays if all of its seeds are declared, for one look; other seeds are those of new runs.
    """

    # With which the study began: they decide which arms are trained longer.
    margin: float
    seeds: Seeds
    # Of every run at tuned settings, or of an untuned study, that was ever planned, in order.
    stacks: Stacks
    longer_stacks: Stacks  # of longer training


def history(study: Study, earlier: Mapping[str, Any] | None = None) -> History:
    """The history of a study; `earlier` is what study.json declared before, if anything."""
    seeds, longer_seeds = study.base.trials.seeds, controls_of(study).longer_seeds
    now = History(study.margin, seeds, _by_look(seeds, looks_of(study)), _by_look(longer_seeds))
    if earlier is None:
        return now
    if 'history' in earlier:
        before = read(History, earlier['history'])
    else:
        stacks = _by_look(earlier['seeds'], earlier['looks'])
        longer_stacks = _by_look(earlier['controls']['longer_seeds'])
        before = History(earlier['margin'], tuple(earlier['seeds']), stacks, longer_stacks)
    return dataclasses.replace(
        before,
        stacks=_with_missing(before.stacks, now.stacks),
        longer_stacks=_with_missing(before.longer_stacks, now.longer_stacks),
    )


def _by_look(seeds: Sequence[int], looks: Sequence[int] = ()) -> Stacks:
    """The seeds that each look adds; without looks, all."""
    ends = itertools.pairwise((0, *(looks or (len(seeds),))))
    return tuple(tuple(seeds[start:end]) for start, end in ends if start < end)


def _with_missing(stacks: Stacks, by_look: Stacks) -> Stacks:
    """The stacks, and one more for the seeds of each look that none of them trains."""
    more = []
    for seeds in by_look:
        trained = set(itertools.chain(*_cover(stacks, seeds)))
        more.append(tuple(seed for seed in seeds if seed not in trained))
    return (*stacks, *filter(None, more))


def _cover(stacks: Stacks, seeds: Seeds) -> Iterator[Seeds]:
    """The first of the stacks that train these seeds, each once, and no others."""
    left = set(seeds)
    for stack in stacks:
        if left.issuperset(stack):
            left.difference_update(stack)
            yield stack


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run: an arm at one stage, trained as one stack of trials."""

    arm: MatchedArm
    stage: str  # 'screening', 'verdict' at the tuned settings, or 'single' in an untuned study
    knob: str | None  # the setting that is screened
    config: Config  # resolved
    kept: str | None = None  # the directory, where an earlier plan named it otherwise

    @property
    def id(self) -> str:
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """Relative to the study: readable, and one per configuration."""
        if self.kept is not None:
            return self.kept
        stage = '' if self.stage == SINGLE else f' {self.stage}'
        title = re.sub(r'[^\w.=]+', '-', self.arm.title + stage).strip('-')
        return f'runs/{title}-{self.id}'

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


def screening(
    study: Study, arm: MatchedArm, grids: Grids, results: Results
) -> tuple[list[PlannedRun], Settings | None]:
    """The screening runs known so far, and once all that are needed are finished, what they chose.

    Ends: a grid holds at most max_points values, each with at most max_seeds seeds.
    """
    runs: list[PlannedRun] = []
    measured: dict[Settings, dict[int, float | None]] = {}
    while (tuning := tune(grids, study.tuning, measured)).knob is not None:
        stack = [tuning.at(value) for value in tuning.values]
        new = _screening_runs(study, arm, tuning.knob, stack, tuning.seeds)
        runs += new
        finished = [results(run) for run in new]
        if None in finished:
            return runs, None
        for run, trials in zip(new, finished, strict=True):
            compiled_in = tuple(getattr(run.config.model, name) for name in MODEL_KNOBS)
            for trial in trials or ():
                settings = (*(trial['trial'][name] for name in TRIAL_KNOBS), *compiled_in)
                losses = _losses([trial], 'val_loss')
                measured[settings] = measured.get(settings, {}) | losses
    return runs, tuning.settings


def _losses(trials: Sequence[Mapping[str, Any]], field: str) -> dict[int, float | None]:
    """A loss of results by seed; None for a diverged trial."""
    return {t['trial']['seed']: t[field] if t['status'] == FINISHED else None for t in trials}


def _screening_runs(
    study: Study, arm: MatchedArm, knob: str, stack: list[Settings], seeds: tuple[int, ...]
) -> list[PlannedRun]:
    """One run for all values of a trial's knob; one for each value that is compiled in."""
    stacks = [stack] if knob in TRIAL_KNOBS else [[settings] for settings in stack]
    return [_run(study, arm, SCREENING, knob, settings, seeds) for settings in stacks]


def _verdict_runs(
    study: Study, arm: MatchedArm, settings: Settings, kept: History
) -> list[list[PlannedRun]]:
    """For each look at the study, the runs with the seeds since the look before."""
    longer = arm.key.control == LONGER
    by_look = _by_look(base_of(study, arm).trials.seeds, () if longer else looks_of(study))
    stacks = kept.longer_stacks if longer else kept.stacks
    return [
        [_run(study, arm, VERDICT, None, [settings], stack) for stack in _cover(stacks, seeds)]
        for seeds in by_look
    ]


def _run(
    study: Study,
    arm: MatchedArm,
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


def to_lengthen(
    study: Study, arms: Sequence[MatchedArm], losses: Mapping[ArmKey, Losses], comparisons: int
) -> list[MatchedArm]:
    """The baseline and the decided arms, of primary arms of one size and corpus.

    They are decided by the tests alone, on test losses paired over seeds, corrected for the
    comparisons of the whole study: other reasons are not known before the report.
    """
    (baseline,) = (arm for arm in arms if arm.variant == study.baseline)
    differences, diverged = {}, {}
    for arm in (arm for arm in arms if arm is not baseline):
        pairs = [(loss, losses[baseline.key][seed]) for seed, loss in losses[arm.key].items()]
        finished = [one - other for one, other in pairs if one is not None and other is not None]
        test = inference.paired(finished, study.margin, resamples=None) if finished else None
        differences[arm.key] = test
        one, other = ([pair[side] for pair in pairs].count(None) for side in (0, 1))
        diverged[arm.key] = one, other
    judged = decision.judge(differences, diverged=diverged, planned=comparisons)
    silent = (Decision.UNDECIDED, Decision.NO_VERDICT)
    decided = [arm for arm in arms if arm is not baseline]
    decided = [arm for arm in decided if judged[arm.key].decision not in silent]
    return [baseline, *decided] if decided else []


def runs(
    study: Study, arms: list[MatchedArm], results: Results, kept: History | None = None
) -> list[PlannedRun]:
    """Every run known so far; `kept` is the history of the study, if it has had other settings."""
    kept = kept or history(study)
    if not is_tuned(study):
        seeds = study.base.trials.seeds
        return [_single(study, arm, stack) for arm in arms for stack in _cover(kept.stacks, seeds)]
    known: list[PlannedRun] = []
    settings: dict[ArmKey, Settings] = {}
    verdicts: dict[ArmKey, list[list[PlannedRun]]] = {}
    for arm in arms:
        screened, chosen = screening(study, arm, grids(study, arm), results)
        known += screened
        if chosen is not None:
            settings[arm.key] = chosen
            verdicts[arm.key] = _verdict_runs(study, arm, chosen, kept)
            known += verdicts[arm.key][0]
    for look in range(1, len(looks_of(study))):
        before = [run for of_arm in verdicts.values() for run in of_arm[look - 1]]
        if len(verdicts) < len(arms) or None in map(results, before):
            break
        known += [run for of_arm in verdicts.values() for run in of_arm[look]]
    for arm in _to_lengthen(study, arms, verdicts, results, kept):
        around = grids_around(grids(study, arm), settings[arm.key])
        arm = _lengthened(arm)
        screened, chosen = screening(study, arm, around, results)
        known += screened
        if chosen is not None:
            known += itertools.chain(*_verdict_runs(study, arm, chosen, kept))
    return known


def _single(study: Study, arm: MatchedArm, seeds: tuple[int, ...]) -> PlannedRun:
    base = base_of(study, arm)
    trials = dataclasses.replace(base.trials, seeds=seeds)
    return PlannedRun(arm, SINGLE, None, dataclasses.replace(base, trials=trials))


def _lengthened(arm: MatchedArm) -> MatchedArm:
    return dataclasses.replace(arm, key=arm.key._replace(control=LONGER))


def _to_lengthen(
    study: Study,
    arms: list[MatchedArm],
    verdicts: Mapping[ArmKey, list[list[PlannedRun]]],
    results: Results,
    kept: History,
) -> Iterator[MatchedArm]:
    """The primary arms to train longer, of each size and corpus whose verdict runs are finished.

    The margin and the seeds that the study began with decide, so that others train nothing longer.
    """
    if controls_of(study).longer is None:
        return
    groups: dict[tuple[str, str], list[MatchedArm]] = {}
    for arm in arms:
        if arm.key.control is None:
            groups.setdefault((arm.key.corpus, arm.key.size), []).append(arm)
    comparisons = sum(a.variant != study.baseline for group in groups.values() for a in group)
    declared = study.base.trials.seeds
    seeds = kept.seeds if set(kept.seeds) <= set(declared) else declared
    study = dataclasses.replace(study, margin=kept.margin)
    for group in groups.values():
        finished: dict[ArmKey, list[list[dict[str, Any]] | None]] = {}
        for arm in group:
            of_arm = itertools.chain(*verdicts.get(arm.key, ()))
            deciding = [run for run in of_arm if not set(seeds).isdisjoint(run.config.trials.seeds)]
            finished[arm.key] = [results(run) for run in deciding]
        if all(of_arm and None not in of_arm for of_arm in finished.values()):
            losses = {
                key: _losses([t for trials in of_arm for t in trials or ()], 'test_loss')
                for key, of_arm in finished.items()
            }
            yield from to_lengthen(study, group, losses, comparisons)


def least(study: Study, arms: list[MatchedArm]) -> list[PlannedRun]:
    """The minimum of runs: the grids as declared, and the verdict of every arm."""
    if not is_tuned(study):
        return runs(study, arms, lambda run: None)
    return [run for arm in arms for run in _at_least(study, arm, grids(study, arm))]


def lengthened(study: Study, arms: list[MatchedArm]) -> list[PlannedRun]:
    """The minimum of longer runs if every arm is decided; [] if none are made."""
    known: list[PlannedRun] = []
    for arm in arms if controls_of(study).longer is not None else ():
        if arm.key.control is None:
            middle = tune(grids(study, arm), study.tuning, {}).settings
            known += _at_least(study, _lengthened(arm), grids_around(grids(study, arm), middle))
    return known


def _at_least(study: Study, arm: MatchedArm, grid: Grids) -> Iterator[PlannedRun]:
    middle = tune(grid, study.tuning, {}).settings
    for knob, values in grid.items():
        if len(values) > 1:
            stack = [with_knob(middle, knob, value) for value in values]
            yield from _screening_runs(study, arm, knob, stack, study.tuning.seeds)
    yield from itertools.chain(*_verdict_runs(study, arm, middle, history(study)))


def declaration(study: Study, arms: list[MatchedArm]) -> dict[str, Any]:
    """The content of study.json."""
    values = to_json(study)
    matched = values.pop('match')
    tuning = None
    if is_tuned(study):
        tuning = values['tuning'] | {f'{k}s': grid for k, grid in grids(study, arms[0]).items()}
    return values | {
        'variants': list(dict.fromkeys(a.label for a in arms if a.key.control is None)),
        'matched': matched,
        'corpora': corpora_of(study),
        'controls': to_json(controls_of(study)),
        'seeds': study.base.trials.seeds,
        'looks': looks_of(study),
        'tuning': tuning,
        'base_hash': fingerprint(study.base),
        'arms': [arm.key._asdict() for arm in arms],
        'command': ' '.join(command_line()),
    }


def lines(study: Study, known: list[PlannedRun]) -> str:
    """plan.jsonl: a line per run, with its resolved config."""
    records = (
        {
            'run': run.id,
            **_about(study, run),
            'destination': run.arm.destination,
            'directory': run.directory,
            'trials': len(run.config.trials.trials()),
            'config': to_json(run.config),
        }
        for run in known
    )
    return ''.join(json.dumps(to_jsonable(record)) + '\n' for record in records)


def _about(study: Study, run: PlannedRun) -> dict[str, Any]:
    """The fields of a run that its own directory does not hold."""
    match = run.arm.match
    return {
        **run.arm.key._asdict(),
        'stage': run.stage,
        'knob': run.knob,
        'target': match.target if study.match else None,
        'residual': match.residual if study.match else None,
    }


def result_lines(study: Study, known: list[PlannedRun], results: Results) -> str:
    """results.jsonl: a line per trial of every finished run."""
    text = []
    for run in known:
        fields = {'study': study.name, 'run': run.id, **_about(study, run)}
        fields['target_parameters'] = fields.pop('target')
        # The hash of a config may have been another one when its run was made.
        current = {} if run.kept is None else {'config_hash': run.id}
        text += [json.dumps({**fields, **trial, **current}) + '\n' for trial in results(run) or []]
    return ''.join(text)

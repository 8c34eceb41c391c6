"""What a study trains: for each arm a chain of runs, the next link given by the results so far.

    screening of the learning rate -> more of it until bracketed -> the same for weight decay and
    score scale, where they are tuned -> the verdict, on fresh seeds at what was found

The plan is a function of the study and of the results of finished runs, so that all workers agree
on it without talking to each other.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from qkattn.config import Config, Study, TrialsConfig, fingerprint, to_json
from qkattn.run import records
from qkattn.study.arms import Arm, grids, is_tuned
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT, Settings, tune
from qkattn.train.results import FINISHED

# The results of a run, one per trial; None while it is not finished.
Results = Callable[['PlannedRun'], list[dict[str, Any]] | None]


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run: an arm at one stage, trained as one stack of trials.

    Attributes:
      arm: whose it is.
      stage: 'screening' for settings, 'verdict' at those found, or 'single' where nothing is tuned.
      knob: the setting that is screened.
      config: resolved.
    """

    arm: Arm
    stage: str
    knob: str | None
    config: Config

    @property
    def id(self) -> str:
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """Relative to the study: readable, and one per configuration."""
        stage = '' if self.stage == SINGLE else f'-{self.stage}'
        words = re.sub(r'[^\w.=]+', '-', f'{self.arm.label}-{self.arm.size}{stage}').strip('-')
        return f'runs/{words}-{self.id}'

    @property
    def tokens(self) -> int:
        """Training tokens of all its trials together."""
        train = self.config.train
        of_trial = train.num_steps * train.batch_size * self.config.model.context
        return of_trial * len(self.config.trials.trials())


def chain(study: Study, arm: Arm, results: Results) -> Iterator[PlannedRun]:
    """The runs of an arm as far as they are known: up to the first that is not finished."""
    if not is_tuned(study):
        yield PlannedRun(arm, SINGLE, None, dataclasses.replace(study.base, model=arm.model))
        return
    measured: dict[Settings, dict[int, float | None]] = {}
    while True:
        found = tune(grids(study, arm), study.tuning.max_points, measured)
        if found.knob is None:
            yield _run(study, arm, VERDICT, None, [found.settings])
            return
        wanted = [found.at(value) for value in found.values]
        runs = [_run(study, arm, SCREENING, found.knob, s) for s in _stacks(found.knob, wanted)]
        yield from runs
        finished = [results(run) for run in runs]
        if None in finished:
            return
        for run, trials in zip(runs, finished, strict=True):
            _collect(measured, run, trials)


def _stacks(knob: str, wanted: list[Settings]) -> list[list[Settings]]:
    """What one program can train side by side: the score scale is compiled into it."""
    return [[settings] for settings in wanted] if knob == 'score_scale' else [wanted]


def _run(study: Study, arm: Arm, stage: str, knob: str | None, stack: list[Settings]) -> PlannedRun:
    learning_rates, weight_decays, score_scales = (
        tuple(dict.fromkeys(values)) for values in zip(*stack, strict=True)
    )
    (score_scale,) = score_scales
    trials = TrialsConfig(
        seeds=study.tuning.seeds if stage == SCREENING else study.base.trials.seeds,
        learning_rates=learning_rates,
        weight_decays=weight_decays,
    )
    model = dataclasses.replace(arm.model, score_scale=score_scale)
    return PlannedRun(arm, stage, knob, dataclasses.replace(study.base, model=model, trials=trials))


def _collect(
    measured: dict[Settings, dict[int, float | None]], run: PlannedRun, trials: list[dict[str, Any]]
) -> None:
    """Adds loss by seed for each of the run's settings; None for a trial that diverged."""
    for trial in trials:
        of = trial['trial']
        settings = (of['learning_rate'], of['weight_decay'], run.config.model.score_scale)
        loss = trial['val_loss'] if trial['status'] == FINISHED else None
        measured.setdefault(settings, {})[of['seed']] = loss


def runs(study: Study, arms: list[Arm], results: Results) -> list[PlannedRun]:
    """Every run that is known now, arm by arm."""
    return [run for arm in arms for run in chain(study, arm, results)]


def least(study: Study, arms: list[Arm]) -> list[PlannedRun]:
    """The runs that there will be at least: the grids as declared, and one verdict per arm."""
    if not is_tuned(study):
        return runs(study, arms, lambda run: None)
    found = []
    for arm in arms:
        grid = grids(study, arm)
        middle = tune(grid, study.tuning.max_points, {}).settings
        for place, (knob, values) in enumerate(grid.items()):
            if len(values) > 1:
                wanted = [(*middle[:place], value, *middle[place + 1 :]) for value in values]
                found += [_run(study, arm, SCREENING, knob, s) for s in _stacks(knob, wanted)]
        found.append(_run(study, arm, VERDICT, None, [middle]))
    return found


def declaration(study: Study, arms: list[Arm], command: list[str] | None) -> dict[str, Any]:
    """What study.json says, whether trained or not."""
    tuning = None
    if is_tuned(study):
        tuning = {'seeds': study.tuning.seeds, 'max_points': study.tuning.max_points}
        tuning |= {f'{knob}s': values for knob, values in grids(study, arms[0]).items()}
    return {
        'name': study.name,
        'question': study.question,
        'baseline': study.baseline,
        'variants': list(dict.fromkeys(arm.label for arm in arms)),
        'sizes': study.sizes,
        'matched': study.match,
        'fill': study.fill,
        'tolerance': study.tolerance,
        'margin': study.margin,
        'destinations': study.destinations,
        'seeds': study.base.trials.seeds,
        'tuning': tuning,
        'arms': [{'variant': arm.label, 'size': arm.size} for arm in arms],
        'command': ' '.join(command) if command else None,
    }


def lines(study: Study, known: list[PlannedRun]) -> str:
    """plan.jsonl: a line per run, with its resolved config."""
    return ''.join(
        json.dumps(
            records.to_jsonable(
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
    """What the study knows of a run and its run does not."""
    match = run.arm.match
    return {
        'variant': run.arm.label,
        'size': run.arm.size,
        'stage': run.stage,
        'knob': run.knob,
        'target': match.target if study.match else None,
        'residual': match.residual if study.match else None,
    }


def result_lines(study: Study, known: list[PlannedRun], results: Results) -> str:
    """results.jsonl: a line per trial of every finished run."""
    found = []
    for run in known:
        of = {'study': study.name, 'run': run.id, **about(study, run)}
        of['target_parameters'] = of.pop('target')
        found += [json.dumps({**of, **trial}) + '\n' for trial in results(run) or []]
    return ''.join(found)

"""The runs of a study: for each arm a chain, continued from the results of its finished runs.

    screening of the learning rate -> larger grids until bracketed -> the same for weight decay and
    score scale if they are tuned -> the verdict runs, on other seeds at the chosen settings

The plan is a function of the study and of the results of finished runs, so all workers derive the
same plan.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from qkattn.config import Config, Study, TrialsConfig, fingerprint, to_json
from qkattn.run.records import FINISHED, to_jsonable
from qkattn.study.arms import Arm, grids, is_tuned
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT, Settings, tune, with_knob

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
        """Training tokens, summed over trials."""
        train = self.config.train
        of_trial = train.num_steps * train.batch_size * self.config.model.context
        return of_trial * len(self.config.trials.trials())


def chain(study: Study, arm: Arm, results: Results) -> Iterator[PlannedRun]:
    """The runs of an arm known so far: up to the first unfinished ones."""
    if not is_tuned(study):
        yield PlannedRun(arm, SINGLE, None, dataclasses.replace(study.base, model=arm.model))
        return
    measured: dict[Settings, dict[int, float | None]] = {}
    while True:
        tuning = tune(grids(study, arm), study.tuning, measured)
        if tuning.knob is None:
            yield _run(study, arm, VERDICT, None, [tuning.settings])
            return
        settings = [tuning.at(value) for value in tuning.values]
        runs = [
            _run(study, arm, SCREENING, tuning.knob, stack)
            for stack in _stacks(tuning.knob, settings)
        ]
        yield from runs
        finished = [results(run) for run in runs]
        if None in finished:
            return
        for run, trials in zip(runs, finished, strict=True):
            _collect(measured, run, trials)


def _stacks(knob: str, settings: list[Settings]) -> list[list[Settings]]:
    """The settings by program: the score scale is compiled in, so each value needs its own."""
    return [[one] for one in settings] if knob == 'score_scale' else [settings]


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
    """Adds the loss by seed for each of the run's settings; None for a diverged trial."""
    for trial in trials:
        of = trial['trial']
        settings = (of['learning_rate'], of['weight_decay'], run.config.model.score_scale)
        loss = trial['val_loss'] if trial['status'] == FINISHED else None
        measured.setdefault(settings, {})[of['seed']] = loss


def runs(study: Study, arms: list[Arm], results: Results) -> list[PlannedRun]:
    """Every run known so far, arm by arm."""
    return [run for arm in arms for run in chain(study, arm, results)]


def least(study: Study, arms: list[Arm]) -> list[PlannedRun]:
    """The minimum of runs: the grids as declared, and one verdict run per arm."""
    if not is_tuned(study):
        return runs(study, arms, lambda run: None)
    planned = []
    for arm in arms:
        grid = grids(study, arm)
        middle = tune(grid, study.tuning, {}).settings
        for knob, values in grid.items():
            if len(values) > 1:
                stacks = _stacks(knob, [with_knob(middle, knob, value) for value in values])
                planned += [_run(study, arm, SCREENING, knob, stack) for stack in stacks]
        planned.append(_run(study, arm, VERDICT, None, [middle]))
    return planned


def declaration(study: Study, arms: list[Arm], command: list[str] | None) -> dict[str, Any]:
    """The content of study.json."""
    tuning = None
    if is_tuned(study):
        tuning = {
            name: getattr(study.tuning, name) for name in ('seeds', 'max_points', 'max_seeds')
        }
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
        'corpora': study.corpora or (study.base.data.name,),
        'controls': dataclasses.asdict(study.controls),
        'seeds': study.base.trials.seeds,
        'looks': study.looks,
        'tuning': tuning,
        'base': to_json(study.base),
        'base_hash': fingerprint(study.base),
        'arms': [arm.place._asdict() for arm in arms],
        'command': ' '.join(command) if command else None,
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
        fields = {'study': study.name, 'run': run.id, **about(study, run)}
        fields['target_parameters'] = fields.pop('target')
        text += [json.dumps({**fields, **trial}) + '\n' for trial in results(run) or []]
    return ''.join(text)

"""What a study trains: for each arm a chain of cells, the next link given by the results so far.

    screening of the learning rate -> more of it until bracketed -> the same for weight decay and
    score scale, where they are tuned -> the verdict, on fresh seeds at what was found

The plan is a function of the study and of the results of finished cells, so that all workers agree
on it without talking to each other.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn import bowl, records
from qkattn.config import Config, Study, TrialsConfig, fingerprint, to_json
from qkattn.study import Arm, grids, is_tuned, ratio
from qkattn.train.results import FINISHED

SINGLE, SCREENING, VERDICT = 'single', 'screening', 'verdict'

# The results of a cell, one per trial; None while it is not finished.
Results = Callable[['Cell'], list[dict[str, Any]] | None]


@dataclasses.dataclass(frozen=True)
class Cell:
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
        return f'cells/{words}-{self.id}'

    @property
    def tokens(self) -> int:
        """Training tokens of all its trials together."""
        train = self.config.train
        of_trial = train.num_steps * train.batch_size * self.config.model.context
        return of_trial * len(self.config.trials.trials())


def chain(study: Study, arm: Arm, results: Results) -> Iterator[Cell]:
    """The cells of an arm as far as they are known: up to the first that is not finished."""
    if not is_tuned(study):
        yield Cell(arm, SINGLE, None, dataclasses.replace(study.base, model=arm.model))
        return
    settings = {knob: values[len(values) // 2] for knob, values in grids(study).items()}
    for knob, values in grids(study).items():
        if len(values) == 1:
            continue
        factor, losses = ratio(values), {}
        while values:
            stacks = _stacks(knob, values)
            cells = [
                _cell(study, arm, SCREENING, knob, settings | {knob: stack}) for stack in stacks
            ]
            yield from cells
            finished = [results(cell) for cell in cells]
            if None in finished:
                return
            for stack, trials in zip(stacks, finished, strict=True):
                _collect(losses, knob, stack, trials)
            found = bowl.fit(losses)
            values = bowl.next_values(found, factor, study.tuning.max_points)
        settings[knob] = found.chosen
    yield _cell(study, arm, VERDICT, None, settings)


def _stacks(knob: str, values: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Values that one program can train side by side: the score scale is compiled into it."""
    return [(value,) for value in values] if knob == 'score_scale' else [values]


def _cell(
    study: Study, arm: Arm, stage: str, knob: str | None, settings: Mapping[str, Any]
) -> Cell:
    def values(name: str) -> tuple[float, ...]:
        value = settings[name]
        return value if isinstance(value, tuple) else (value,)

    (score_scale,) = values('score_scale')
    model = arm.model
    if len(study.tuning.score_scales) > 1:
        model = dataclasses.replace(model, score_scale=model.score_scale * score_scale)
    trials = TrialsConfig(
        seeds=study.tuning.seeds if stage == SCREENING else study.base.trials.seeds,
        learning_rates=values('learning_rate'),
        weight_decays=values('weight_decay'),
    )
    return Cell(arm, stage, knob, dataclasses.replace(study.base, model=model, trials=trials))


def _collect(
    losses: dict[float, dict[int, float | None]],
    knob: str,
    stack: tuple[float, ...],
    trials: list[dict[str, Any]],
) -> None:
    """Adds loss by seed for each value of the knob; None for a trial that diverged."""
    for trial in trials:
        of = trial['trial']
        value = stack[0] if knob == 'score_scale' else of[knob]
        loss = trial['val_loss'] if trial['status'] == FINISHED else None
        losses.setdefault(value, {})[of['seed']] = loss


def cells(study: Study, arms: list[Arm], results: Results) -> list[Cell]:
    """Every cell that is known now, arm by arm, each once."""
    known = {}
    for arm in arms:
        for cell in chain(study, arm, results):
            known.setdefault(cell.id, cell)
    return list(known.values())


def least(study: Study, arms: list[Arm]) -> list[Cell]:
    """The cells that there will be at least: the grids as declared, and one verdict per arm."""
    if not is_tuned(study):
        return cells(study, arms, lambda cell: None)
    found = []
    middle = {knob: values[len(values) // 2] for knob, values in grids(study).items()}
    for arm in arms:
        for knob, values in grids(study).items():
            if len(values) > 1:
                found += [
                    _cell(study, arm, SCREENING, knob, middle | {knob: stack})
                    for stack in _stacks(knob, values)
                ]
        found.append(_cell(study, arm, VERDICT, None, middle))
    return found


def declaration(study: Study, arms: list[Arm], command: list[str] | None) -> dict[str, Any]:
    """What study.json says, whether trained or not."""
    tuning = None
    if is_tuned(study):
        tuning = {'seeds': study.tuning.seeds, 'max_points': study.tuning.max_points}
        tuning |= {f'{knob}s': values for knob, values in grids(study).items()}
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


def lines(study: Study, known: list[Cell]) -> str:
    """plan.jsonl: a line per cell, with its resolved config."""
    return ''.join(
        json.dumps(
            records.to_jsonable(
                {
                    'cell': cell.id,
                    **about(study, cell),
                    'destination': cell.arm.destination,
                    'directory': cell.directory,
                    'trials': len(cell.config.trials.trials()),
                    'config': to_json(cell.config),
                }
            )
        )
        + '\n'
        for cell in known
    )


def about(study: Study, cell: Cell) -> dict[str, Any]:
    """What the study knows of a cell and its run does not."""
    match = cell.arm.match
    return {
        'variant': cell.arm.label,
        'size': cell.arm.size,
        'stage': cell.stage,
        'knob': cell.knob,
        'target': match.target if study.match else None,
        'residual': match.residual if study.match else None,
    }


def result_lines(study: Study, known: list[Cell], directory: Path) -> str:
    """results.jsonl: a line per trial of every finished cell."""
    found = []
    for cell in known:
        path = directory / cell.directory / 'result.json'
        if path.exists():
            of = {'study': study.name, 'cell': cell.id, **about(study, cell)}
            of['target_weights'] = of.pop('target')
            found += [json.dumps({**of, **trial}) + '\n' for trial in records.read_json(path)]
    return ''.join(found)

"""What a study trains: for each arm a chain of cells, the next link given by the results so far.

    screening of the learning rate -> more of it until bracketed -> the same for weight decay and
    score scale, where they are tuned -> the verdict, on fresh seeds at what was found

The plan is a function of the study and of the results of finished cells, so that all workers agree
on it without talking to each other.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from qkattn import records
from qkattn.config import Config, Study, TrialsConfig, fingerprint, to_json
from qkattn.study import Arm, grids, is_tuned
from qkattn.train.results import FINISHED
from qkattn.tuning import SCREENING, SINGLE, VERDICT, Settings, tune

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
    measured: dict[Settings, dict[int, float | None]] = {}
    while True:
        found = tune(grids(study, arm), study.tuning.max_points, measured)
        if found.knob is None:
            yield _cell(study, arm, VERDICT, None, [found.settings])
            return
        wanted = [found.at(value) for value in found.values]
        cells = [_cell(study, arm, SCREENING, found.knob, s) for s in _stacks(found.knob, wanted)]
        yield from cells
        finished = [results(cell) for cell in cells]
        if None in finished:
            return
        for cell, trials in zip(cells, finished, strict=True):
            _collect(measured, cell, trials)


def _stacks(knob: str, wanted: list[Settings]) -> list[list[Settings]]:
    """What one program can train side by side: the score scale is compiled into it."""
    return [[settings] for settings in wanted] if knob == 'score_scale' else [wanted]


def _cell(study: Study, arm: Arm, stage: str, knob: str | None, stack: list[Settings]) -> Cell:
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
    return Cell(arm, stage, knob, dataclasses.replace(study.base, model=model, trials=trials))


def _collect(
    measured: dict[Settings, dict[int, float | None]], cell: Cell, trials: list[dict[str, Any]]
) -> None:
    """Adds loss by seed for each of the cell's settings; None for a trial that diverged."""
    for trial in trials:
        of = trial['trial']
        settings = (of['learning_rate'], of['weight_decay'], cell.config.model.score_scale)
        loss = trial['val_loss'] if trial['status'] == FINISHED else None
        measured.setdefault(settings, {})[of['seed']] = loss


def cells(study: Study, arms: list[Arm], results: Results) -> list[Cell]:
    """Every cell that is known now, arm by arm."""
    return [cell for arm in arms for cell in chain(study, arm, results)]


def least(study: Study, arms: list[Arm]) -> list[Cell]:
    """The cells that there will be at least: the grids as declared, and one verdict per arm."""
    if not is_tuned(study):
        return cells(study, arms, lambda cell: None)
    found = []
    for arm in arms:
        grid = grids(study, arm)
        middle = tune(grid, study.tuning.max_points, {}).settings
        for place, (knob, values) in enumerate(grid.items()):
            if len(values) > 1:
                wanted = [(*middle[:place], value, *middle[place + 1 :]) for value in values]
                found += [_cell(study, arm, SCREENING, knob, s) for s in _stacks(knob, wanted)]
        found.append(_cell(study, arm, VERDICT, None, [middle]))
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


def result_lines(study: Study, known: list[Cell], results: Results) -> str:
    """results.jsonl: a line per trial of every finished cell."""
    found = []
    for cell in known:
        of = {'study': study.name, 'cell': cell.id, **about(study, cell)}
        of['target_weights'] = of.pop('target')
        found += [json.dumps({**of, **trial}) + '\n' for trial in results(cell) or []]
    return ''.join(found)

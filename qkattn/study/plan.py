"""The plan of a study: its runs, and the files that list them.

    every arm: screening of the learning rate, with larger grids and further seeds until bracketed
    -> the same for the other settings that are tuned -> the verdict up to the first look,
    then all arms up to the next look, and so on, and the controls that are trained longer.

The plan is a function of the study and of the results of finished runs, so all workers derive the
same plan.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from qkattn.config import Study, fingerprint, to_json
from qkattn.run.records import to_jsonable
from qkattn.study import longer
from qkattn.study.arms import Arm, controls_of, corpora_of, grids, is_tuned, looks_of
from qkattn.study.chains import PlannedRun as PlannedRun
from qkattn.study.chains import Results as Results
from qkattn.study.chains import screening, screening_runs, single, verdict_runs
from qkattn.study.place import Place
from qkattn.study.tuning import Settings, grids_around, tune, with_knob


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
        arm = longer.lengthened(arm)
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
            place: longer.losses_of([trial for trials in of for trial in trials])
            for place, of in finished.items()
        }
        yield from longer.to_lengthen(study, group, losses, comparisons)


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
        known += _at_least(study, longer.lengthened(arm), around)
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


def declaration(study: Study, arms: list[Arm], command: list[str] | None) -> dict[str, Any]:
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

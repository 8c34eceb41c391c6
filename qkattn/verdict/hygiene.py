"""Checks of a study's own rules: what a reader has to know, and what stands in a verdict's way.

Only validation and test measurements are ever read as results; training losses are not.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from qkattn.config import ANNEALED, DECAYS, OptimizerConfig
from qkattn.study.tuning import KNOBS, SCREENING, SINGLE, VERDICT
from qkattn.verdict import equality
from qkattn.verdict.arms import Arm, stopped_early
from qkattn.verdict.codes import Remark, RemarkCode
from qkattn.verdict.load import Study
from qkattn.verdict.trials import Trial

ENOUGH_SEEDS = 5


def check(study: Study, arms: Sequence[Arm]) -> tuple[Remark, ...]:
    """All remarks, the blocking ones first."""
    found: list[Remark] = [*_learning_rate_tuned(study), *_separate_seeds(study)]
    for arm in arms:
        found += _trained_to_the_end(study, arm)
        found += _complete(study, arm)
        found += _matched(study, arm)
        if study.tuning:
            found += _planned_seeds(study, arm)
            found += _bracketed(arm)
            found += _at_chosen_settings(study, arm)
    found += equality.differences(study, arms)
    found += _few_seeds(study, arms)
    found += _diverged(arms)
    found += _evaluation(arms)
    return tuple(sorted(_merged(found, len(arms)), key=lambda remark: not remark.blocks))


def _merged(remarks: Sequence[Remark], num_arms: int) -> list[Remark]:
    """The remarks without repetitions, a finding that all arms share as one for every arm."""
    merged: list[Remark] = []
    for remark in remarks:
        same = [r for r in remarks if dataclasses.replace(r, arm=remark.arm) == remark and r.arm]
        if remark.arm and len({other.arm for other in same}) == num_arms > 1:
            remark = dataclasses.replace(remark, arm=None, every_arm=True)
        if remark not in merged:
            merged.append(remark)
    return merged


def _learning_rate_tuned(study: Study) -> Iterator[Remark]:
    if study.tuning is not None and 'learning_rate' not in study.tuning.knobs:
        data = {'learning_rates': study.tuning.learning_rates}
        yield Remark(RemarkCode.LEARNING_RATE_NOT_TUNED, data, blocks=True)


def _separate_seeds(study: Study) -> Iterator[Remark]:
    """Seeds that chose a setting flatter it."""
    if study.tuning is None:
        return
    screening = set(study.tuning.seeds) | _seeds_at(study.trials, SCREENING)
    verdict = set(study.seeds) | _seeds_at(study.trials, VERDICT)
    if both := sorted(screening & verdict):
        yield Remark(RemarkCode.SHARED_SEEDS, {'seeds': tuple(both)}, blocks=True)


def _seeds_at(trials: Iterable[Trial], stage: str) -> set[int]:
    return {trial.seed for trial in trials if trial.stage == stage}


def _trained_to_the_end(study: Study, arm: Arm) -> Iterator[Remark]:
    short = [t for t in arm.verdict_trials if t.finished and stopped_early(study, t)]
    if short:
        data = {
            'stopped': len(short),
            'trials': len(arm.verdict_trials),
            'step': short[0].num_steps,
            'num_steps': study.by_name[short[0].run].config['train']['num_steps'],
        }
        all_of_them = len(short) == len(arm.verdict_trials)
        yield Remark(RemarkCode.STOPPED_EARLY, data, all_of_them, arm.place)
    planned = study.by_name[arm.example.run].config['optimizer']
    schedule, final = planned['schedule'], planned['final_fraction']
    if not OptimizerConfig(schedule=schedule, final_fraction=final).anneals:
        data = {
            'schedule': schedule,
            'final_fraction': final if schedule in DECAYS else None,
            'limit': ANNEALED,
        }
        yield Remark(RemarkCode.NOT_ANNEALED, data, True, arm.place)


def _complete(study: Study, arm: Arm) -> Iterator[Remark]:
    for name in dict.fromkeys(trial.run for trial in arm.trials):
        run = study.by_name[name]
        if len(run.trials) < run.num_trials:
            data = {
                'readable': len(run.trials),
                'planned': run.num_trials,
                'stage': None if run.stage == SINGLE else run.stage,
                'run': name,
            }
            yield Remark(RemarkCode.MISSING_RESULTS, data, run.stage == VERDICT, arm.place)


def _matched(study: Study, arm: Arm) -> Iterator[Remark]:
    residual = arm.example.residual
    if study.matched is None or residual is None:
        return
    if abs(residual) > study.tolerance:
        data = {'matched': study.matched, 'residual': residual, 'tolerance': study.tolerance}
        yield Remark(RemarkCode.OVER_TOLERANCE, data, True, arm.place)
    parameters, target = arm.example.parameters['total'], arm.example.target_parameters
    if study.matched == 'total' and abs(parameters / target - 1 - residual) > 1e-6:
        data = {'parameters': parameters, 'target': target, 'residual': residual}
        yield Remark(RemarkCode.OTHER_PARAMETER_COUNT, data, True, arm.place)


def _planned_seeds(study: Study, arm: Arm) -> Iterator[Remark]:
    """Seeds that were picked are no fresh ones."""
    declared = {SCREENING: study.tuning.seeds, VERDICT: study.seeds}
    for run in study.runs:
        if (run.variant, run.size) != arm.place or run.stage not in declared:
            continue
        seeds = {'actual': tuple(run.config['trials']['seeds']), 'declared': declared[run.stage]}
        if sorted(seeds['actual']) != sorted(seeds['declared']):
            yield Remark(RemarkCode.OTHER_SEEDS, {'stage': run.stage} | seeds, True, arm.place)


def _bracketed(arm: Arm) -> Iterator[Remark]:
    """Not blocking as such: which decisions it leaves is decided with the verdict."""
    for knob in arm.not_bracketed:
        sweep = arm.sweeps[knob]
        data = {'knob': knob, 'low': sweep.values[0], 'high': sweep.values[-1], 'best': sweep.best}
        yield Remark(RemarkCode.NOT_BRACKETED, data, False, arm.place)


def _at_chosen_settings(study: Study, arm: Arm) -> Iterator[Remark]:
    """The verdict has to run at what the screening trials choose."""
    if not arm.verdict_trials:
        return
    tuning = arm.tuning
    if tuning.knob is not None:
        data = {'knob': tuning.knob, 'values': tuning.values}
        yield Remark(RemarkCode.SCREENING_INCOMPLETE, data, True, arm.place)
    else:
        for knob, actual, expected in zip(
            KNOBS, arm.verdict_trials[0].at, tuning.settings, strict=True
        ):
            if actual != expected:
                data = {'knob': knob, 'actual': actual, 'expected': expected}
                data['tuned'] = knob in study.tuning.knobs
                yield Remark(RemarkCode.OTHER_SETTING, data, True, arm.place)
    if len({trial.at for trial in arm.verdict_trials}) > 1:
        yield Remark(RemarkCode.SEVERAL_SETTINGS, {}, True, arm.place)


def _few_seeds(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    few = [arm for arm in arms if arm.verdict_trials and len(arm.chosen) < ENOUGH_SEEDS]
    if study.tuning and few:
        data = {
            'counts': tuple(sorted({len(arm.chosen) for arm in few})),
            'enough': ENOUGH_SEEDS,
            'arms': None if len(few) == len(arms) else tuple(arm.place for arm in few),
        }
        yield Remark(RemarkCode.FEW_SEEDS, data)


def _diverged(arms: Sequence[Arm]) -> Iterator[Remark]:
    found = []
    for arm in arms:
        counts = tuple(
            (stage if arm.screening_trials else None, sum(not t.finished for t in of), len(of))
            for stage, of in ((SCREENING, arm.screening_trials), (VERDICT, arm.verdict_trials))
            if not all(trial.finished for trial in of)
        )
        found += [(arm.place, counts)] if counts else []
    if found:
        yield Remark(RemarkCode.DIVERGED, {'arms': tuple(found)})


def _evaluation(arms: Sequence[Arm]) -> Iterator[Remark]:
    chosen = [trial for arm in arms for trial in arm.chosen]
    tokens = {trial.eval_tokens for trial in chosen} - {None}
    if tokens:
        errors = sorted(e for t in chosen if (e := t.metrics['val_loss_se']) is not None)
        data = {
            'tokens': tuple(sorted(tokens)),
            'rows': tuple(sorted({t.eval_rows for t in chosen} - {None})),
            'standard_error': errors[len(errors) // 2] if errors else None,
        }
        yield Remark(RemarkCode.EVALUATION, data)

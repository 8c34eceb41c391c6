"""Checks that a study was run by its own rules, which a verdict depends on.

Results are validation and test measurements only; training losses are not read.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from qkattn.config import ANNEALED, DECAYS, OptimizerConfig
from qkattn.study.tuning import KNOBS, SCREENING, SINGLE, VERDICT
from qkattn.verdict.arms import Arm, stopped_early
from qkattn.verdict.codes import Remark, RemarkCode
from qkattn.verdict.equality import differences
from qkattn.verdict.load import Study

ENOUGH_SEEDS = 5


def check(study: Study, arms: Sequence[Arm]) -> tuple[Remark, ...]:
    """All remarks, the blocking ones first."""
    remarks = [*_tuning_of(study)]
    for arm in arms:
        remarks += [*_training(study, arm), *_results(study, arm), *_matching(study, arm)]
        if study.tuning:
            remarks += [*_seeds(study, arm), *_settings(study, arm)]
    remarks += differences(study, arms)
    remarks += [*_few_seeds(study, arms), *_diverged(arms), *_evaluation(arms)]
    return tuple(sorted(_merged(remarks, len(arms)), key=lambda remark: not remark.blocks))


def _merged(remarks: Sequence[Remark], num_arms: int) -> list[Remark]:
    """The remarks without repetitions; a finding that all arms share becomes one remark."""
    merged: list[Remark] = []
    for remark in remarks:
        same = [r for r in remarks if r.arm and dataclasses.replace(r, arm=remark.arm) == remark]
        if remark.arm and len({other.arm for other in same}) == num_arms > 1:
            remark = dataclasses.replace(remark, arm=None, every_arm=True)
        if remark not in merged:
            merged.append(remark)
    return merged


def _tuning_of(study: Study) -> Iterator[Remark]:
    """The learning rate is tuned, and on other seeds, as those favour the chosen value."""
    if study.tuning is None:
        return
    if 'learning_rate' not in study.tuning.knobs:
        rates = study.tuning.learning_rates
        yield Remark.of(RemarkCode.LEARNING_RATE_NOT_TUNED, None, True, learning_rates=rates)
    seeds = {SCREENING: set(study.tuning.seeds), VERDICT: set(study.seeds), SINGLE: set()}
    for trial in study.trials:
        seeds[trial.stage].add(trial.seed)
    if both := seeds[SCREENING] & seeds[VERDICT]:
        yield Remark.of(RemarkCode.SHARED_SEEDS, None, True, seeds=tuple(sorted(both)))


def _training(study: Study, arm: Arm) -> Iterator[Remark]:
    """Verdict trials are trained to the end of a schedule that anneals the learning rate."""
    if short := [t for t in arm.verdict_trials if t.finished and stopped_early(study, t)]:
        yield Remark.of(
            RemarkCode.STOPPED_EARLY,
            arm.place,
            len(short) == len(arm.verdict_trials),
            stopped=len(short),
            trials=len(arm.verdict_trials),
            step=short[0].num_steps,
            num_steps=study.by_name[short[0].run].num_steps,
        )
    planned = study.by_name[arm.example.run].config['optimizer']
    schedule, final = planned['schedule'], planned['final_fraction']
    if not OptimizerConfig(schedule=schedule, final_fraction=final).anneals:
        yield Remark.of(
            RemarkCode.NOT_ANNEALED,
            arm.place,
            True,
            schedule=schedule,
            final_fraction=final if schedule in DECAYS else None,
            limit=ANNEALED,
        )


def _results(study: Study, arm: Arm) -> Iterator[Remark]:
    for run in (study.by_name[name] for name in dict.fromkeys(trial.run for trial in arm.trials)):
        if len(run.trials) < run.num_trials:
            yield Remark.of(
                RemarkCode.MISSING_RESULTS,
                arm.place,
                run.stage == VERDICT,
                readable=len(run.trials),
                planned=run.num_trials,
                stage=None if run.stage == SINGLE else run.stage,
                run=run.name,
            )


def _matching(study: Study, arm: Arm) -> Iterator[Remark]:
    residual = arm.example.residual
    if study.matched is None or residual is None:
        return
    if abs(residual) > study.tolerance:
        yield Remark.of(
            RemarkCode.OVER_TOLERANCE,
            arm.place,
            True,
            matched=study.matched,
            residual=residual,
            tolerance=study.tolerance,
        )
    parameters, target = arm.example.parameters['total'], arm.example.target_parameters
    if study.matched == 'total' and abs(parameters / target - 1 - residual) > 1e-6:
        yield Remark.of(
            RemarkCode.OTHER_PARAMETER_COUNT,
            arm.place,
            True,
            parameters=parameters,
            target=target,
            residual=residual,
        )


def _seeds(study: Study, arm: Arm) -> Iterator[Remark]:
    """Each run has the declared seeds: seeds may not be selected by their results."""
    declared = {SCREENING: study.tuning.seeds, VERDICT: study.seeds}
    for run in study.runs:
        expected = declared.get(run.stage)
        actual = tuple(run.config['trials']['seeds'])
        if (run.variant, run.size) == arm.place and expected and sorted(actual) != sorted(expected):
            yield Remark.of(
                RemarkCode.OTHER_SEEDS,
                arm.place,
                True,
                stage=run.stage,
                actual=actual,
                declared=expected,
            )


def _settings(study: Study, arm: Arm) -> Iterator[Remark]:
    """The verdict is run at the settings that the screening chooses; these are bracketed."""
    for knob in arm.not_bracketed:
        values, best = arm.sweeps[knob].values, arm.sweeps[knob].best
        ends = {'low': values[0], 'high': values[-1]}
        yield Remark.of(RemarkCode.NOT_BRACKETED, arm.place, False, knob=knob, **ends, best=best)
    if not arm.verdict_trials:
        return
    tuning, ran_at = arm.tuning, arm.verdict_trials[0].at
    if tuning.knob is not None:
        lacking = {'knob': tuning.knob, 'values': tuning.values}
        yield Remark.of(RemarkCode.SCREENING_INCOMPLETE, arm.place, True, **lacking)
    else:
        for knob, actual, expected in zip(KNOBS, ran_at, tuning.settings, strict=True):
            if actual != expected:
                setting = {'actual': actual, 'expected': expected}
                is_tuned = knob in study.tuning.knobs
                yield Remark.of(
                    RemarkCode.OTHER_SETTING, arm.place, True, knob=knob, **setting, tuned=is_tuned
                )
    if len({trial.at for trial in arm.verdict_trials}) > 1:
        yield Remark.of(RemarkCode.SEVERAL_SETTINGS, arm.place, True)


def _few_seeds(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    few = [arm for arm in arms if arm.verdict_trials and len(arm.chosen) < ENOUGH_SEEDS]
    if study.tuning and few:
        yield Remark.of(
            RemarkCode.FEW_SEEDS,
            counts=tuple(sorted({len(arm.chosen) for arm in few})),
            enough=ENOUGH_SEEDS,
            arms=None if len(few) == len(arms) else tuple(arm.place for arm in few),
        )


def _diverged(arms: Sequence[Arm]) -> Iterator[Remark]:
    diverged = []
    for arm in arms:
        counts = tuple(
            (stage if arm.screening_trials else None, sum(not t.finished for t in of), len(of))
            for stage, of in ((SCREENING, arm.screening_trials), (VERDICT, arm.verdict_trials))
            if not all(trial.finished for trial in of)
        )
        diverged += [(arm.place, counts)] if counts else []
    if diverged:
        yield Remark.of(RemarkCode.DIVERGED, arms=tuple(diverged))


def _evaluation(arms: Sequence[Arm]) -> Iterator[Remark]:
    chosen = [trial for arm in arms for trial in arm.chosen]
    errors = sorted(e for t in chosen if (e := t.metrics['val_loss_se']) is not None)
    if tokens := {trial.eval_tokens for trial in chosen} - {None}:
        yield Remark.of(
            RemarkCode.EVALUATION,
            tokens=tuple(sorted(tokens)),
            rows=tuple(sorted({trial.eval_rows for trial in chosen} - {None})),
            standard_error=errors[len(errors) // 2] if errors else None,
        )

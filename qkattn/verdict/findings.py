"""The findings of a study: differences from the baseline, verdicts, scaling fits, remarks.

Computed once for all tables, figures and pages; the statistics are those of `qkattn.stats`.
"""

import dataclasses
from collections.abc import Iterator

from qkattn.stats import decision, inference, scaling
from qkattn.stats.decision import Judgement
from qkattn.verdict import hygiene
from qkattn.verdict.arms import Arm, arms_of
from qkattn.verdict.codes import Decision, Place, Reason, ReasonCode, Remark, Verdict
from qkattn.verdict.load import Study


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss against parameters over the sizes of one variant.

    `multiplier` is how many parameters of the baseline one of the variant is worth; None for the
    baseline and if the baseline has no results. If `fit` or `multiplier` has a `problem`, its
    numbers are None.
    """

    variant: str
    fit: scaling.Fit
    multiplier: scaling.Multiplier | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """The findings of a study.

    Attributes:
      arms: size by size, the baseline first.
      remarks: all hygiene findings, the blocking ones first.
      scaling: one fit per variant, in the study's order, over the arms whose `not_scaled` is None;
        empty for fewer than two sizes and if a remark blocks every arm.
      num_comparisons: declared arms without the baselines, the family of Holm's correction; 0 in a
        study without tuning.
    """

    arms: tuple[Arm, ...]
    remarks: tuple[Remark, ...]
    scaling: tuple[Scaling, ...]
    num_comparisons: int

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """The remarks that withhold every verdict."""
        return tuple(remark for remark in self.remarks if remark.blocks and remark.arm is None)

    @property
    def lacks_scaling(self) -> bool:
        """Whether the study has several sizes, but no arm that a scaling fit may use."""
        return not self.scaling and len({arm.size for arm in self.arms}) > 1


def find(study: Study) -> Findings:
    """Computes the findings of a study."""
    arms = arms_of(study)
    remarks = hygiene.check(study, arms)
    baselines = {arm.size: arm for arm in arms if arm.is_baseline}
    arms = tuple(
        dataclasses.replace(
            _compared(study, arm, baselines.get(arm.size)),
            remarks=tuple(remark for remark in remarks if remark.arm == arm.place),
        )
        for arm in arms
    )
    number = sum(variant != study.baseline for variant, _ in study.arms) if study.tuning else 0
    found = Findings(arms, remarks, (), number)
    if study.tuning:
        found = dataclasses.replace(found, arms=_judged(study, found))
    return dataclasses.replace(found, scaling=_scaling(study, found))


def _compared(study: Study, arm: Arm, baseline: Arm | None) -> Arm:
    """The arm with its difference from the baseline, unpaired if no seed is shared."""
    if arm.is_baseline or baseline is None or not arm.chosen or not baseline.chosen:
        return arm
    losses, own = _losses(baseline), _losses(arm)
    shared = tuple(loss - losses[seed] for seed, loss in own.items() if seed in losses)
    if shared:
        difference = inference.paired(shared, study.margin)
    else:
        difference = inference.welch(list(own.values()), list(losses.values()), study.margin)
    return dataclasses.replace(arm, differences=shared, difference=difference)


def _losses(arm: Arm) -> dict[int, float]:
    """Val losses by seed, ascending."""
    return {t.seed: t.val_loss for t in sorted(arm.chosen, key=lambda trial: trial.seed)}


def _judged(study: Study, found: Findings) -> tuple[Arm, ...]:
    """The arms with their verdicts; all declared comparisons are one family."""
    number, baselines = found.num_comparisons, {a.size: a for a in found.arms if a.is_baseline}
    pairs = {a.place: (a, baselines.get(a.size)) for a in found.arms if not a.is_baseline}
    lacking: dict[Place, tuple[Reason | Remark, ...]] = {
        place: (*found.blocks, *arm.blocks, *_lacking(study, arm, baseline))
        for place, (arm, baseline) in pairs.items()
    }
    tested = {place: pair for place, pair in pairs.items() if not lacking[place]}
    judged = decision.judge(
        {place: arm.difference for place, (arm, _) in tested.items()},
        diverged={p: (arm.num_diverged, base.num_diverged) for p, (arm, base) in tested.items()},
        planned=number,
    )
    verdicts = {place: Verdict(Decision.NO_VERDICT, why) for place, why in lacking.items()}
    for place, (arm, baseline) in tested.items():
        reasons = tuple(_outcome(arm, baseline, judged[place]))
        by_tests = Verdict(reasons=reasons, **vars(judged[place]), num_comparisons=number)
        verdicts[place] = _as_tuned(by_tests, arm, baseline)
    return tuple(dataclasses.replace(arm, verdict=verdicts.get(arm.place)) for arm in found.arms)


def _lacking(study: Study, arm: Arm, baseline: Arm | None) -> Iterator[Reason]:
    """The results of arm and baseline that a verdict needs and that are missing."""
    of_baseline = {'baseline': study.baseline}
    if not arm.verdict_trials:
        yield Reason(ReasonCode.NO_VERDICT_TRIALS)
    if baseline is None or not baseline.verdict_trials:
        yield Reason(ReasonCode.NO_BASELINE_TRIALS, of_baseline)
    elif why := baseline.blocks:
        yield Reason(ReasonCode.BASELINE_BLOCKED, of_baseline | {'remarks': why})


def _outcome(arm: Arm, baseline: Arm, judged: Judgement) -> Iterator[Reason]:
    """The reasons of the verdict from the tests alone."""
    difference, p, p_same = arm.difference, judged.p_holm, judged.p_equivalence_holm
    if arm.num_diverged or baseline.num_diverged:
        counts = {'arm': arm.num_diverged, 'baseline': baseline.num_diverged}
        yield Reason(ReasonCode.DIVERGED, counts)
    if difference is None or p is None:
        counts = {'n': difference.n if difference else 0, 'needed': inference.MIN_PAIRS}
        yield Reason(ReasonCode.FEW_PAIRS, counts)
        return
    side = Decision.BETTER if difference.mean < 0 else Decision.WORSE
    differs = p <= 1 - inference.LEVEL
    if judged.decision is Decision.EQUIVALENT:
        yield Reason(ReasonCode.EQUIVALENT, {'p': p_same})
        if differs:
            data = {'side': side, 'margin': difference.margin, 'p': p}
            yield Reason(ReasonCode.DIFFERENT_WITHIN_MARGIN, data)
    elif judged.decision is side:
        yield Reason(ReasonCode.DIFFERENT, {'p': p})
    elif differs:
        yield Reason(ReasonCode.DIFFERENT_BUT_DIVERGED, {'side': side, 'p': p})
    else:
        data = {'p': p, 'p_equivalence': p_same, 'detectable': judged.detectable}
        yield Reason(ReasonCode.NOT_SHOWN, data)


def _as_tuned(verdict: Verdict, arm: Arm, baseline: Arm) -> Verdict:
    """The verdict with its caveats; UNDECIDED if the tuning does not support the decision.

    If a knob is not bracketed, a better value may lie beyond those tried. The arm may then be
    better than measured, which contradicts worse and equivalent; likewise for the baseline.
    """
    whose = {'arm': arm, 'baseline': baseline}
    caveats = [
        Reason(ReasonCode.NOT_BRACKETED, {'whose': name, 'knobs': of.not_bracketed})
        for name, of in whose.items()
        if of.not_bracketed
    ]
    decision = verdict.decision
    forbidden = {Decision.WORSE} if arm.not_bracketed else set()
    forbidden |= {Decision.BETTER} if baseline.not_bracketed else set()
    forbidden |= {Decision.EQUIVALENT} if forbidden else set()
    if decision in forbidden:
        caveats.append(Reason(ReasonCode.BEYOND_GRID, {'decision': decision}))
        decision = Decision.UNDECIDED
    elif decision in (Decision.BETTER, Decision.WORSE):
        caveats += [
            Reason(ReasonCode.IMPRECISE_OPTIMUM, {'whose': name, 'knob': knob, 'nats': nats})
            for name, of in whose.items()
            for knob, sweep in of.sweeps.items()
            if (nats := sweep.at_worst) is not None and nats > abs(arm.difference.mean)
        ]
    return dataclasses.replace(verdict, decision=decision, caveats=tuple(caveats))


def _scaling(study: Study, found: Findings) -> tuple[Scaling, ...]:
    """Scaling fits of all variants that have a size to use."""
    if found.blocks or len(study.sizes) < 2:
        return ()
    curves = {}
    for variant in study.variants:
        if usable := [a for a in found.arms if a.variant == variant and a.not_scaled is None]:
            parameters = [arm.example.parameters['total'] for arm in usable]
            curves[variant] = parameters, [list(_losses(arm).values()) for arm in usable]
    baseline = curves.get(study.baseline)
    return tuple(
        Scaling(
            variant,
            scaling.fit(*curve),
            scaling.multiplier(curve, baseline) if baseline and curve is not baseline else None,
        )
        for variant, curve in curves.items()
    )

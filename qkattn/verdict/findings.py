"""What a study shows: differences to the baseline, verdicts, tuning, what stands in their way.

Computed once from the files, for every table, figure and page; all statistics are those of
`qkattn.stats`.
"""

import dataclasses
from collections.abc import Sequence

from qkattn.stats import inference, scaling
from qkattn.verdict import hygiene
from qkattn.verdict.arms import Arm, arms_of
from qkattn.verdict.codes import Decision, Reason, ReasonCode, Remark, Verdict
from qkattn.verdict.load import Study
from qkattn.verdict.trials import Trial


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss against parameters over the sizes of one variant.

    Each of the two has a `problem`, and then its numbers are not to be shown. `multiplier` is how
    many of the baseline's parameters one of the variant's is worth; None for the baseline and where
    it has no results.
    """

    variant: str
    fit: scaling.Fit
    multiplier: scaling.Multiplier | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that a study shows.

    Attributes:
      arms: size by size, the baseline first.
      remarks: all hygiene findings, the blocking ones first.
      scaling: per variant, in the study's order, over the sizes that are fit for it; empty for
        fewer than two sizes, and where a remark blocks every arm.
      num_comparisons: declared arms but the baselines, which Holm's correction is over; 0 in a
        study without tuning.
    """

    arms: tuple[Arm, ...]
    remarks: tuple[Remark, ...]
    scaling: tuple[Scaling, ...]
    num_comparisons: int

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """Why no arm at all gets a verdict."""
        return tuple(remark for remark in self.remarks if remark.blocks and remark.arm is None)

    @property
    def lacks_scaling(self) -> bool:
        """Whether there are several sizes, and no arm has one that may enter a scaling law."""
        return not self.scaling and len({arm.size for arm in self.arms}) > 1


def find(study: Study) -> Findings:
    """Everything that the files of `study` show."""
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
    """With its differences by seed and what they say; unpaired where no seed is shared."""
    if arm.is_baseline or baseline is None or not arm.chosen or not baseline.chosen:
        return arm
    losses = {trial.seed: trial.val_loss for trial in baseline.chosen}
    own = sorted(arm.chosen, key=lambda trial: trial.seed)
    shared = tuple(t.val_loss - losses[t.seed] for t in own if t.seed in losses)
    if shared:
        difference = inference.paired(shared, study.margin)
    else:
        unpaired = [trial.val_loss for trial in own]
        difference = inference.welch(unpaired, list(losses.values()), study.margin)
    return dataclasses.replace(arm, differences=shared, difference=difference)


def _judged(study: Study, found: Findings) -> tuple[Arm, ...]:
    """All but the baselines with a verdict; all comparisons that are declared are one family."""
    baselines = {arm.size: arm for arm in found.arms if arm.is_baseline}
    reasons = {
        arm.place: (*found.blocks, *arm.blocks, *_lacking(study, arm, baselines.get(arm.size)))
        for arm in found.arms
        if not arm.is_baseline
    }
    tested = {arm.place: arm for arm in found.arms if reasons.get(arm.place) == ()}
    diverged = {
        place: (arm.num_diverged, baselines[arm.size].num_diverged) for place, arm in tested.items()
    }
    judged = inference.judge(
        {place: arm.difference for place, arm in tested.items()},
        diverged=diverged,
        planned=found.num_comparisons,
    )
    verdicts = {
        place: Verdict(Decision.NO_VERDICT, why) for place, why in reasons.items() if why
    } | {
        place: _verdict(arm, baselines[arm.size], judged[place], found.num_comparisons)
        for place, arm in tested.items()
    }
    return tuple(dataclasses.replace(arm, verdict=verdicts.get(arm.place)) for arm in found.arms)


def _lacking(study: Study, arm: Arm, baseline: Arm | None) -> list[Reason]:
    """What a verdict needs of both and is not there."""
    reasons = []
    if not arm.verdict_trials:
        reasons.append(Reason(ReasonCode.NO_VERDICT_TRIALS))
    of_baseline = {'baseline': study.baseline}
    if baseline is None or not baseline.verdict_trials:
        reasons.append(Reason(ReasonCode.NO_BASELINE_TRIALS, of_baseline))
    elif baseline.blocks:
        data = of_baseline | {'remarks': baseline.blocks}
        reasons.append(Reason(ReasonCode.BASELINE_BLOCKED, data))
    return reasons


def _verdict(arm: Arm, baseline: Arm, judged: inference.Judgement, num_comparisons: int) -> Verdict:
    """Of the tests; only such a decision as the tuning leaves.

    Where a knob is not bracketed, a better value may lie beyond those that were tried: then an arm
    may be better than it looks, and the baseline too.
    """
    decision = judged.decision
    reasons = _reasons(arm, baseline, judged)
    whose = {'arm': arm, 'baseline': baseline}
    caveats = [
        Reason(ReasonCode.NOT_BRACKETED, {'whose': name, 'knobs': of.not_bracketed})
        for name, of in whose.items()
        if of.not_bracketed
    ]
    forbidden = {Decision.WORSE} if arm.not_bracketed else set()
    forbidden |= {Decision.BETTER} if baseline.not_bracketed else set()
    forbidden |= {Decision.EQUIVALENT} if forbidden else set()
    if decision in forbidden:
        caveats.append(Reason(ReasonCode.BEYOND_GRID, {'decision': decision}))
        decision = Decision.UNDECIDED
    elif decision in (Decision.BETTER, Decision.WORSE):
        caveats += [
            Reason(
                ReasonCode.IMPRECISE_OPTIMUM, {'whose': name, 'knob': knob, 'nats': sweep.at_worst}
            )
            for name, of in whose.items()
            for knob, sweep in of.sweeps.items()
            if sweep.at_worst is not None and sweep.at_worst > abs(arm.difference.mean)
        ]
    return Verdict(
        decision,
        reasons,
        tuple(caveats),
        judged.p_holm,
        judged.p_equivalence_holm,
        judged.detectable,
        num_comparisons,
    )


def _reasons(arm: Arm, baseline: Arm, judged: inference.Judgement) -> tuple[Reason, ...]:
    """Of the decision that the tests alone come to."""
    difference, p = arm.difference, judged.p_holm
    reasons = []
    if arm.num_diverged or baseline.num_diverged:
        data = {'arm': arm.num_diverged, 'baseline': baseline.num_diverged}
        reasons.append(Reason(ReasonCode.DIVERGED, data))
    if p is None:
        data = {'n': difference.n if difference else 0, 'needed': inference.MIN_PAIRS}
        return (*reasons, Reason(ReasonCode.FEW_PAIRS, data))
    side = Decision.BETTER if difference.mean < 0 else Decision.WORSE
    differs = p <= 1 - inference.LEVEL
    p_same = judged.p_equivalence_holm
    if judged.decision is Decision.EQUIVALENT:
        reasons.append(Reason(ReasonCode.EQUIVALENT, {'p': p_same}))
        if differs:
            data = {'side': side, 'margin': difference.margin, 'p': p}
            reasons.append(Reason(ReasonCode.DIFFERENT_WITHIN_MARGIN, data))
    elif judged.decision is side:
        reasons.append(Reason(ReasonCode.DIFFERENT, {'p': p}))
    elif differs:
        reasons.append(Reason(ReasonCode.DIFFERENT_BUT_DIVERGED, {'side': side, 'p': p}))
    else:
        data = {'p': p, 'p_equivalence': p_same, 'detectable': judged.detectable}
        reasons.append(Reason(ReasonCode.NOT_SHOWN, data))
    return tuple(reasons)


def _scaling(study: Study, found: Findings) -> tuple[Scaling, ...]:
    """Of every variant over the sizes at which it is fit for it."""
    if found.blocks or len(study.sizes) < 2:
        return ()
    points: dict[str, list[Arm]] = {variant: [] for variant in study.variants}
    for arm in found.arms:
        if arm.not_scaled is None:
            points[arm.variant].append(arm)
    curves = {
        variant: (
            [arm.example.parameters['total'] for arm in of],
            [_by_seed(arm.chosen) for arm in of],
        )
        for variant, of in points.items()
        if of
    }
    return tuple(
        Scaling(
            variant,
            scaling.fit(*curve),
            scaling.multiplier(curve, curves[study.baseline])
            if study.baseline in curves and variant != study.baseline
            else None,
        )
        for variant, curve in curves.items()
    )


def _by_seed(trials: Sequence[Trial]) -> list[float]:
    return [trial.val_loss for trial in sorted(trials, key=lambda trial: trial.seed)]

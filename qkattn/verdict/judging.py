"""Decides on families of comparisons.

A family is a set of comparisons whose p values are corrected together: the primary arms, the
positive controls, or the pairs of arms that a claim compares. The test split decides, and the
validation split has to agree.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from qkattn.stats import decision, inference
from qkattn.stats.decision import ABOVE_ZERO, BELOW_ZERO, DECIDED, Decision, Judgement
from qkattn.study.arm_key import ArmKey, Expected, parse_expected
from qkattn.study.family import Family, expected_arms, is_compared, primary_arms
from qkattn.verdict.codes import Comparison, Reason, ReasonCode, Remark, Verdict
from qkattn.verdict.comparing import compare, num_diverged
from qkattn.verdict.trained_arm import TrainedArm, with_baselines
from qkattn.verdict.trained_study import TrainedStudy

Case = tuple[TrainedArm, TrainedArm | None]  # an arm and its baseline, which may be missing

# The decisions with which a positive control passes.
_PASSES = {
    'better': BELOW_ZERO,
    'worse': ABOVE_ZERO,
    'not better': (Decision.EQUIVALENT, *ABOVE_ZERO),
    'not worse': (Decision.EQUIVALENT, *BELOW_ZERO),
}


@dataclasses.dataclass(frozen=True)
class PositiveControl:
    """A known effect that the study should show, at one size and on one corpus."""

    expected: Expected
    arm: TrainedArm
    verdict: Verdict

    @property
    def passed(self) -> bool | None:
        """Whether the arm has the expected verdict; None while it has no verdict."""
        if self.verdict.decision is Decision.NO_VERDICT:
            return None
        return self.verdict.decision in _PASSES[self.expected.decision]


def family_size(study: TrainedStudy) -> int:
    """Counts the primary arms that the study compares, or ever declared, with a baseline.

    The primary arms of earlier studies in its chain count too, because their results may have
    decided which arms the study has.
    """
    questions = {study.question_of(key) for key in primary_arms(study.arms, study.baseline)}
    for earlier in study.earlier:
        questions |= earlier.family
    return max(len(questions), study.ledger.family)


def primary(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> dict[ArmKey, Verdict]:
    """Returns the verdict on each primary arm against its baseline."""
    cases = [
        (arm, baseline)
        for arm, baseline in with_baselines(arms)
        if is_compared(arm.key, study.baseline)
    ]
    verdicts = judge(study, cases, blocks, family_size(study))
    return {arm.key: verdict for (arm, _), verdict in zip(cases, verdicts, strict=True)}


def positive(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> tuple[PositiveControl, ...]:
    """Returns the verdict on each positive control: an arm with an expected effect.

    The family contains all positive controls that the study declares, with or without results. It
    also contains those that only earlier studies of the chain declare, each at every size and on
    every corpus.
    """
    num_comparisons = 0
    case_by_key = {arm.key: (arm, baseline) for arm, baseline in with_baselines(arms)}
    cases: list[Case] = []
    effects: list[Expected] = []  # one for each case
    for text in study.expected:
        effect = parse_expected(text)
        for key in expected_arms(study.arms, effect):
            num_comparisons += 1
            if key in case_by_key:
                cases.append(case_by_key[key])
                effects.append(effect)

    declared_earlier: set[str] = set()
    for earlier in study.earlier:
        declared_earlier.update(earlier.expected)
    declared_only_earlier = declared_earlier.difference(study.expected)
    num_arms_of_effect = len(study.sizes) * len(study.corpora)
    num_comparisons += len(declared_only_earlier) * num_arms_of_effect

    verdicts = judge(study, cases, blocks, num_comparisons)
    controls = []
    for effect, (arm, _), verdict in zip(effects, cases, verdicts, strict=True):
        controls.append(PositiveControl(effect, arm, verdict))
    return tuple(controls)


def pair(
    study: TrainedStudy,
    arm: TrainedArm,
    other: TrainedArm | None,
    blocks: Sequence[Remark],
    num_comparisons: int,
) -> Verdict:
    """Returns the verdict on one arm against another, in a family of `num_comparisons`."""
    if not study.tuned:
        return Verdict(Decision.NO_VERDICT)
    return judge(study, [(arm, other)], blocks, num_comparisons)[0]


def judge(
    study: TrainedStudy, cases: Sequence[Case], blocks: Sequence[Remark], num_comparisons: int
) -> list[Verdict]:
    """Returns the verdict of every case, an arm with its baseline, in one family.

    A case is tested once its arm and its baseline have results of all their seeds.

    Args:
        study: The study of the arms.
        cases: The arms with their baselines.
        blocks: The remarks that withhold every verdict.
        num_comparisons: The number of comparisons in the finished study, for which p values are
            corrected. It may be larger than the number of cases.
    """
    # Collect the cases that can be tested. A case is identified by its index, also in the family.
    family = Family(num_comparisons)
    comparisons: dict[int, Comparison | None] = {}
    withheld: dict[int, tuple[Reason | Remark, ...]] = {}  # why the others have no verdict
    for index, (arm, baseline) in enumerate(cases):
        lacking = _lacking(study, arm, baseline, blocks)
        if baseline is None or lacking:
            withheld[index] = lacking
            continue
        comparison = compare(arm, baseline, study.margin)
        comparisons[index] = comparison
        family.add(
            index,
            comparison.difference if comparison else None,
            diverged=num_diverged(arm, baseline),
            look=study.look(arm.key, baseline.key),
        )

    # Test them together.
    judgements = family.judge()
    verdicts = []
    for index in range(len(cases)):
        if index in withheld:
            verdicts.append(Verdict(Decision.NO_VERDICT, reasons=withheld[index]))
        else:
            verdicts.append(_verdict(family, index, judgements[index], comparisons[index]))
    return verdicts


def _verdict(
    family: Family, index: int, judgement: Judgement, comparison: Comparison | None
) -> Verdict:
    """Turns the judgement of a case, which says what the tests decide, into a verdict.

    There is no verdict if losses by document are missing. If the validation split disagrees with
    the test split, the verdict is undecided. `index` identifies the case in the family.
    """
    arm_diverged, baseline_diverged = family.diverged[index]
    reasons_of_tests = list(_outcome(comparison, judgement, arm_diverged, baseline_diverged))
    if comparison and comparison.num_documents is None:
        final_decision = Decision.NO_VERDICT
        reasons = [Reason(ReasonCode.NO_DOCUMENTS)]
    elif comparison and not _splits_agree(comparison, judgement.decision):
        final_decision = Decision.UNDECIDED
        data = {
            'decision': judgement.decision,
            'test': comparison.difference.mean,
            'validation': comparison.validation,
        }
        reasons = [*reasons_of_tests, Reason(ReasonCode.SPLITS_DISAGREE, data)]
    else:
        final_decision = judgement.decision
        reasons = reasons_of_tests
    return Verdict(
        final_decision,
        p_holm=judgement.p_holm,
        p_margin_holm=judgement.p_margin_holm,
        p_equivalence_holm=judgement.p_equivalence_holm,
        detectable=judgement.detectable,
        reasons=tuple(reasons),
        num_comparisons=family.size,
        look=family.looks[index],
    )


def _lacking(
    study: TrainedStudy, arm: TrainedArm, baseline: TrainedArm | None, blocks: Sequence[Remark]
) -> tuple[Reason | Remark, ...]:
    """Returns why an arm cannot be tested: blocking remarks and missing results. () if it can."""
    lacking: list[Reason | Remark] = [*blocks, *arm.blocks]
    if not arm.verdict_trials:
        lacking.append(Reason(ReasonCode.NO_VERDICT_TRIALS))
    if baseline is None or not baseline.verdict_trials:
        lacking.append(Reason(ReasonCode.NO_BASELINE_TRIALS, {'baseline': study.baseline}))
        return tuple(lacking)
    if baseline.blocks:
        data = {'baseline': baseline.variant, 'remarks': baseline.blocks}
        lacking.append(Reason(ReasonCode.BASELINE_BLOCKED, data))
    if lacking:
        return tuple(lacking)

    # Nothing else is wrong, but the runs may not have ended.
    has_every_seed = _has_every_seed(study, arm) and _has_every_seed(study, baseline)
    return () if has_every_seed else (Reason(ReasonCode.NO_VERDICT_TRIALS),)


def _has_every_seed(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Returns whether an arm has results of all verdict seeds. Diverged trials count as results."""
    seeds = {trial.seed for trial in arm.verdict_trials}
    return seeds.issuperset(study.verdict_seeds(arm.key))


def _splits_agree(comparison: Comparison, decision_on_test: Decision) -> bool:
    """Returns whether the validation split agrees with the decision on the test split.

    The validation difference has to be within the margin if the arms are equivalent, and on the
    same side if one is better.
    """
    if decision_on_test is Decision.EQUIVALENT:
        return abs(comparison.validation) < comparison.difference.margin
    if decision_on_test in BELOW_ZERO:
        return comparison.validation < 0
    if decision_on_test in ABOVE_ZERO:
        return comparison.validation > 0
    return True  # without a decision, there is nothing to disagree with


def _outcome(
    comparison: Comparison | None, judgement: Judgement, arm_diverged: int, baseline_diverged: int
) -> Iterator[Reason]:
    """Yields the reasons for a verdict that follow from the tests alone.

    `arm_diverged` and `baseline_diverged` are the numbers of diverged trials.
    """
    data: dict[str, Any]
    if arm_diverged or baseline_diverged:
        data = {'arm': arm_diverged, 'baseline': baseline_diverged}
        yield Reason(ReasonCode.DIVERGED, data)

    difference = comparison.difference if comparison else None
    p = judgement.p_holm
    if difference is None or p is None:
        num_pairs = difference.n if difference else 0
        yield Reason(ReasonCode.FEW_PAIRS, {'n': num_pairs, 'needed': inference.MIN_PAIRS})
        return

    side = Decision.BETTER if difference.mean < 0 else Decision.WORSE
    margin = difference.margin
    p_margin = judgement.p_margin_holm
    p_equivalence = judgement.p_equivalence_holm
    is_different = p <= decision.ALPHA
    if judgement.decision is Decision.EQUIVALENT:
        yield Reason(ReasonCode.EQUIVALENT, {'p': p_equivalence})
        if is_different:
            data = {'side': side, 'margin': margin, 'p': p}
            yield Reason(ReasonCode.DIFFERENT_WITHIN_MARGIN, data)
    elif judgement.decision in DECIDED:
        yield Reason(ReasonCode.DIFFERENT, {'p': p})
        # The decision is the side itself, or the side below the margin.
        is_beyond_margin = judgement.decision is side
        code = ReasonCode.BEYOND_MARGIN if is_beyond_margin else ReasonCode.NOT_BEYOND_MARGIN
        yield Reason(code, {'margin': margin, 'p': p_margin})
    elif is_different:
        # A difference that is shown gives no decision only if trials diverged.
        yield Reason(ReasonCode.DIFFERENT_BUT_DIVERGED, {'side': side, 'p': p})
    else:
        data = {'p': p, 'p_equivalence': p_equivalence, 'detectable': judgement.detectable}
        yield Reason(ReasonCode.NOT_SHOWN, data)

    typical = difference.typical  # without outlying seeds; None if there are none
    if typical:
        data = {
            'apart': difference.n - typical.n,
            'n': difference.n,
            'mean': difference.mean,
            'typical': typical.mean,
            'p': typical.p,
        }
        yield Reason(ReasonCode.SEEDS_APART, data)

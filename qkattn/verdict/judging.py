"""Verdicts on families of comparisons, whose p values are corrected together.

A family is the primary arms of a study, its positive controls, or the pairs of arms that a claim
compares. A primary arm is neither a baseline nor a control.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from qkattn.stats import decision, inference
from qkattn.stats.decision import ABOVE_ZERO, BELOW_ZERO, DECIDED, Decision, Judgement
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import ArmKey, Expected, parse_expected
from qkattn.study.family import Family, expected_arms, is_compared, primary_arms
from qkattn.verdict.codes import Comparison, Reason, ReasonCode, Remark, Verdict
from qkattn.verdict.comparing import compare, num_diverged
from qkattn.verdict.trained_arm import TrainedArm, with_baselines
from qkattn.verdict.trained_study import TrainedStudy

Case = tuple[TrainedArm, TrainedArm | None]  # an arm and its baseline, which may be missing

# The decisions that confirm what a positive control expects.
_CONFIRMING = {
    'better': BELOW_ZERO,
    'worse': ABOVE_ZERO,
    'not better': (Decision.EQUIVALENT, *ABOVE_ZERO),
    'not worse': (Decision.EQUIVALENT, *BELOW_ZERO),
}


@dataclasses.dataclass(frozen=True)
class PositiveControl:
    """An arm with a known effect, which tests whether the study can show effects."""

    expected: Expected
    arm: TrainedArm
    verdict: Verdict

    @property
    def passed(self) -> bool | None:
        """Whether the arm has the expected verdict; None if it has no verdict."""
        if self.verdict.decision is Decision.NO_VERDICT:
            return None
        confirming_decisions = _CONFIRMING[self.expected.decision]
        return self.verdict.decision in confirming_decisions


def family_size(study: TrainedStudy) -> int:
    """Returns the number of comparisons in the multiple-comparison correction of primary arms.

    Each primary arm of the study, and of the studies that it repeats, is one comparison. An arm
    that several studies share counts once.
    """
    own_keys = primary_arms(study.arms, study.baseline)
    # `question_of` gives an arm the same key in all studies; `family` has such keys.
    compared_arms = {study.question_of(key) for key in own_keys}
    for earlier_study in study.earlier:
        compared_arms |= earlier_study.family
    # The ledger remembers the largest size ever declared, even if arms are removed later.
    largest_declared_size = study.ledger.family
    return max(len(compared_arms), largest_declared_size)


def primary_verdicts(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> dict[ArmKey, Verdict]:
    """Returns the verdict on each primary arm against its baseline.

    Args:
        study: The study.
        arms: All arms of the study.
        blocks: The remarks that withhold every verdict.

    Returns:
        The verdicts by arm key.
    """
    cases: list[Case] = []
    for arm, baseline in with_baselines(arms):
        is_primary = is_compared(arm.key, study.baseline)  # neither a baseline nor a control
        if is_primary:
            cases.append((arm, baseline))
    verdicts = judge(study, cases, blocks, family_size(study))
    keys = [arm.key for arm, _ in cases]
    return dict(zip(keys, verdicts, strict=True))


def positive_controls(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> tuple[PositiveControl, ...]:
    """Returns the verdicts on the positive controls, which are arms with a known effect.

    For example, if a study expects that 'qk/vo?num_heads=1 is worse', it has one positive control
    for each size and corpus. The p values are corrected for all positive controls of the study and
    of the studies that it repeats, with or without results.

    Args:
        study: The study.
        arms: All arms of the study.
        blocks: The remarks that withhold every verdict.
    """
    case_by_key: dict[ArmKey, Case] = {}
    for arm, baseline in with_baselines(arms):
        case_by_key[arm.key] = (arm, baseline)

    # Collect the declared positive controls that have results.
    num_declared = 0
    expectations: list[Expected] = []
    cases: list[Case] = []
    for text in study.expected:
        expected = parse_expected(text)
        for key in expected_arms(study.arms, expected):
            num_declared += 1
            if key in case_by_key:
                expectations.append(expected)
                cases.append(case_by_key[key])

    num_comparisons = num_declared + _num_controls_only_earlier(study)
    verdicts = judge(study, cases, blocks, num_comparisons)
    controls = []
    for expected, (arm, _), verdict in zip(expectations, cases, verdicts, strict=True):
        controls.append(PositiveControl(expected, arm, verdict))
    return tuple(controls)


def _num_controls_only_earlier(study: TrainedStudy) -> int:
    """Counts the positive controls that earlier studies declare, but this study does not.

    Earlier studies are those that this study repeats.
    """
    declared_earlier: set[str] = set()  # such as 'qk/vo?num_heads=1 is worse'
    for earlier in study.earlier:
        declared_earlier.update(earlier.expected)
    only_earlier = declared_earlier.difference(study.expected)
    # Each of them is one comparison at each size on each corpus.
    return len(only_earlier) * len(study.sizes) * len(study.corpora)


def verdict_on_pair(
    study: TrainedStudy,
    arm: TrainedArm,
    other: TrainedArm | None,
    blocks: Sequence[Remark],
    num_comparisons: int,
) -> Verdict:
    """Returns the verdict on one arm against another arm.

    Args:
        study: The study of both arms. Without tuning it has no verdicts.
        arm: The arm.
        other: The arm to compare with; None if it has no results.
        blocks: The remarks that withhold every verdict.
        num_comparisons: The number of comparisons that p values are corrected for.
    """
    if not study.tuned:
        return Verdict(Decision.NO_VERDICT)
    [verdict] = judge(study, [(arm, other)], blocks, num_comparisons)
    return verdict


def judge(
    study: TrainedStudy, cases: Sequence[Case], blocks: Sequence[Remark], num_comparisons: int
) -> list[Verdict]:
    """Returns the verdicts on several arms, with p values corrected for multiple comparisons.

    An arm gets 'no verdict' if a remark withholds its verdict, or if results of the arm or its
    baseline are missing.

    Args:
        study: The study of the arms.
        cases: Pairs of an arm and its baseline. The baseline is None if it has no results.
        blocks: The remarks that withhold every verdict.
        num_comparisons: The number of comparisons in the finished study, which may exceed the
            number of cases.

    Returns:
        One verdict for each case.
    """
    # Compare the arms that can be tested.
    family = Family(num_comparisons)
    comparisons: dict[int, Comparison | None] = {}  # by index of the case
    reasons_untested: dict[int, tuple[Reason | Remark, ...]] = {}  # by index of the case
    for index, (arm, baseline) in enumerate(cases):
        reasons = _why_untested(study, arm, baseline, blocks)
        if baseline is None or reasons:
            reasons_untested[index] = reasons
            continue
        comparison = compare(arm, baseline, study.margin)  # None if they share no seed
        comparisons[index] = comparison
        family.add(
            index,
            comparison.difference if comparison else None,
            diverged=num_diverged(arm, baseline),
            # How many studies, with this one, have made the comparison.
            look=study.look(arm.key, baseline.key),
        )

    # Test all of them together.
    judgements = family.judge()
    verdicts = []
    for index in range(len(cases)):
        if index in reasons_untested:
            verdicts.append(Verdict(Decision.NO_VERDICT, reasons=reasons_untested[index]))
        else:
            verdicts.append(_verdict(family, index, judgements[index], comparisons[index]))
    return verdicts


def _verdict(
    family: Family, index: int, judgement: Judgement, comparison: Comparison | None
) -> Verdict:
    """Returns the verdict on an arm: the decision of the tests, except for two cases.

    Without losses by document, there is no verdict. If the validation split disagrees with the test
    split, the verdict is 'undecided'.

    Args:
        family: The comparisons that were tested together.
        index: The index of the arm's comparison in the family.
        judgement: What the tests decide on the arm.
        comparison: The arm's difference from its baseline; None if they share no seed.
    """
    final_decision = judgement.decision
    arm_diverged, baseline_diverged = family.diverged[index]  # numbers of diverged trials
    reasons = list(_test_reasons(comparison, judgement, arm_diverged, baseline_diverged))
    lacks_documents = comparison is not None and comparison.num_documents is None
    if lacks_documents:
        final_decision = Decision.NO_VERDICT
        reasons = [Reason(ReasonCode.NO_DOCUMENTS)]
    elif comparison and not _splits_agree(comparison, judgement.decision):
        final_decision = Decision.UNDECIDED
        data = {
            'decision': judgement.decision,
            'test': comparison.difference.mean,
            'validation': comparison.validation,
        }
        reasons.append(Reason(ReasonCode.SPLITS_DISAGREE, data))
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


def _why_untested(
    study: TrainedStudy, arm: TrainedArm, baseline: TrainedArm | None, blocks: Sequence[Remark]
) -> tuple[Reason | Remark, ...]:
    """Returns the reasons why an arm cannot be tested against its baseline; () if it can.

    `blocks` are the remarks that withhold every verdict of the study.
    """
    reasons: list[Reason | Remark] = [*blocks, *arm.blocks]
    if not arm.verdict_trials:
        reasons.append(Reason(ReasonCode.NO_VERDICT_TRIALS))
    if baseline is None or not baseline.verdict_trials:
        reasons.append(Reason(ReasonCode.NO_BASELINE_TRIALS, {'baseline': study.baseline}))
    elif baseline.blocks:
        data = {'baseline': baseline.variant, 'remarks': baseline.blocks}
        reasons.append(Reason(ReasonCode.BASELINE_BLOCKED, data))
    if baseline is None or reasons:
        return tuple(reasons)

    # Results of some seeds may still be missing.
    if not _has_every_seed(study, arm) or not _has_every_seed(study, baseline):
        return (Reason(ReasonCode.NO_VERDICT_TRIALS),)
    return ()


def _has_every_seed(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Returns whether an arm has results of all verdict seeds. Divergence counts as a result."""
    seeds_with_results = {trial.seed for trial in arm.verdict_trials}
    declared_seeds = study.verdict_seeds(arm.key)
    return seeds_with_results.issuperset(declared_seeds)


def _splits_agree(comparison: Comparison, decision_on_test: Decision) -> bool:
    """Returns whether the validation split agrees with the decision on the test split.

    For example, if an arm is better on the test split, its mean validation loss has to be lower
    than the baseline's.
    """
    validation_difference = comparison.validation
    if decision_on_test is Decision.EQUIVALENT:
        return abs(validation_difference) < comparison.difference.margin
    if decision_on_test in BELOW_ZERO:  # better, also with the margin open
        return validation_difference < 0
    if decision_on_test in ABOVE_ZERO:  # worse, also with the margin open
        return validation_difference > 0
    return True  # undecided


def _test_reasons(
    comparison: Comparison | None, judgement: Judgement, arm_diverged: int, baseline_diverged: int
) -> Iterator[Reason]:
    """Yields the reasons for what the tests decide on an arm.

    Args:
        comparison: The arm's difference from its baseline; None if they share no seed.
        judgement: The decision of the tests, with p values.
        arm_diverged: The number of diverged trials of the arm.
        baseline_diverged: The number of diverged trials of the baseline.
    """
    if arm_diverged or baseline_diverged:
        data = {'arm': arm_diverged, 'baseline': baseline_diverged}
        yield Reason(ReasonCode.DIVERGED, data)

    difference = comparison.difference if comparison else None
    is_tested = judgement.p_holm is not None
    if difference is None or not is_tested:
        num_pairs = difference.n if difference else 0  # pairs of trials with the same seed
        yield Reason(ReasonCode.FEW_PAIRS, {'n': num_pairs, 'needed': inference.MIN_PAIRS})
        return

    yield from _decision_reasons(difference, judgement)
    typical = difference.typical  # the difference without outlying seeds; None if there are none
    if typical:
        yield Reason(
            ReasonCode.SEEDS_APART,
            {
                'apart': difference.n - typical.n,
                'n': difference.n,
                'mean': difference.mean,
                'typical': typical.mean,
                'p': typical.p,
            },
        )


def _decision_reasons(difference: Difference, judgement: Judgement) -> Iterator[Reason]:
    """Yields which tests lead to the decision on an arm, with their p values.

    Args:
        difference: The arm's difference from its baseline.
        judgement: The decision of the tests, with p values.
    """
    data: dict[str, Any]
    p = judgement.p_holm  # tests for any difference
    p_margin = judgement.p_margin_holm  # tests for a difference of more than the margin
    p_equivalence = judgement.p_equivalence_holm  # tests for a difference of less than the margin
    margin = difference.margin
    side = Decision.BETTER if difference.mean < 0 else Decision.WORSE
    is_different = p is not None and p <= decision.ALPHA
    if judgement.decision is Decision.EQUIVALENT:
        yield Reason(ReasonCode.EQUIVALENT, {'p': p_equivalence})
        if is_different:
            data = {'side': side, 'margin': margin, 'p': p}
            yield Reason(ReasonCode.DIFFERENT_WITHIN_MARGIN, data)
    elif judgement.decision in DECIDED:
        yield Reason(ReasonCode.DIFFERENT, {'p': p})
        # 'better' or 'worse', not 'better (margin open)' or 'worse (margin open)'.
        is_beyond_margin = judgement.decision is side
        code = ReasonCode.BEYOND_MARGIN if is_beyond_margin else ReasonCode.NOT_BEYOND_MARGIN
        yield Reason(code, {'margin': margin, 'p': p_margin})
    elif is_different:
        # Only diverged trials leave a significant difference undecided.
        yield Reason(ReasonCode.DIFFERENT_BUT_DIVERGED, {'side': side, 'p': p})
    else:
        data = {'p': p, 'p_equivalence': p_equivalence, 'detectable': judgement.detectable}
        yield Reason(ReasonCode.NOT_SHOWN, data)

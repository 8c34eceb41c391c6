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


def primary_verdicts(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> dict[ArmKey, Verdict]:
    """Returns the verdict on each primary arm against its baseline, by the key of the arm.

    A primary arm is one that the study is about: neither a control nor a baseline. `blocks` are the
    remarks that withhold every verdict.
    """
    cases: list[Case] = []
    for arm, baseline in with_baselines(arms):
        if is_compared(arm.key, study.baseline):
            cases.append((arm, baseline))
    verdicts = judge(study, cases, blocks, family_size(study))
    return {arm.key: verdict for (arm, _), verdict in zip(cases, verdicts, strict=True)}


def positive_controls(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> tuple[PositiveControl, ...]:
    """Returns the verdict on each positive control: an arm with a known effect.

    A study that expects 'qk/vo?num_heads=1 is worse' has one positive control at each of its sizes
    and on each of its corpora.

    The p values are corrected for all positive controls of the study, with or without results. They
    are also corrected for those that only earlier studies of its chain declare. Their arms are not
    known here, so each is counted at every size and on every corpus.

    `blocks` are the remarks that withhold every verdict.
    """
    # The arms that the study declares as positive controls. Those with results are judged.
    num_declared = 0
    case_by_key = {arm.key: (arm, baseline) for arm, baseline in with_baselines(arms)}
    expected_cases: list[tuple[Expected, Case]] = []
    for text in study.expected:
        expected = parse_expected(text)
        for key in expected_arms(study.arms, expected):
            num_declared += 1
            if key in case_by_key:
                expected_cases.append((expected, case_by_key[key]))

    # The arms that only earlier studies declare as positive controls.
    declared_earlier: set[str] = set()
    for earlier in study.earlier:
        declared_earlier.update(earlier.expected)
    only_earlier = declared_earlier.difference(study.expected)
    num_only_earlier = len(only_earlier) * len(study.sizes) * len(study.corpora)

    cases = [case for _, case in expected_cases]
    verdicts = judge(study, cases, blocks, num_declared + num_only_earlier)
    controls = []
    for (expected, (arm, _)), verdict in zip(expected_cases, verdicts, strict=True):
        controls.append(PositiveControl(expected, arm, verdict))
    return tuple(controls)


def verdict_on_pair(
    study: TrainedStudy,
    arm: TrainedArm,
    other: TrainedArm | None,
    blocks: Sequence[Remark],
    num_comparisons: int,
) -> Verdict:
    """Returns the verdict on one arm against another one, which may be missing.

    The p values are corrected for `num_comparisons` comparisons. `blocks` are the remarks that
    withhold every verdict of the study. A study without tuning has no verdicts.
    """
    if not study.tuned:
        return Verdict(Decision.NO_VERDICT)
    return judge(study, [(arm, other)], blocks, num_comparisons)[0]


def judge(
    study: TrainedStudy, cases: Sequence[Case], blocks: Sequence[Remark], num_comparisons: int
) -> list[Verdict]:
    """Returns the verdicts on several arms, with p values that are corrected for all of them.

    An arm is tested once it and its baseline have results of all their seeds, unless a remark
    withholds its verdict. Otherwise its verdict is 'no verdict', with the reasons.

    Args:
        study: The study of the arms.
        cases: The arms, each with its baseline, which may be missing.
        blocks: The remarks that withhold every verdict.
        num_comparisons: The number of comparisons in the finished study, for which p values are
            corrected. It may be larger than the number of cases.

    Returns:
        The verdict of each case.
    """
    # Compare the arms that can be tested. The index of a case identifies it in the family.
    family = Family(num_comparisons)
    comparisons: dict[int, Comparison | None] = {}
    reasons_untested: dict[int, tuple[Reason | Remark, ...]] = {}
    for index, (arm, baseline) in enumerate(cases):
        reasons = _why_untested(study, arm, baseline, blocks)
        if baseline is None or reasons:
            reasons_untested[index] = reasons
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
        if index in reasons_untested:
            verdicts.append(Verdict(Decision.NO_VERDICT, reasons=reasons_untested[index]))
        else:
            verdicts.append(_verdict(family, index, judgements[index], comparisons[index]))
    return verdicts


def _verdict(
    family: Family, index: int, judgement: Judgement, comparison: Comparison | None
) -> Verdict:
    """Returns the verdict on an arm, given the decision of the tests.

    The verdict is the decision of the tests (`judgement`), with two exceptions. Without losses by
    document there is no verdict, because the tests need them. If the validation split disagrees
    with the test split, the verdict is 'undecided'.

    Args:
        family: The comparisons that were tested together.
        index: Identifies the arm in the family.
        judgement: What the tests decide on the arm.
        comparison: The arm's difference from its baseline; None if they share no seed.
    """
    arm_diverged, baseline_diverged = family.diverged[index]
    reasons_of_tests = list(_outcome(comparison, judgement, arm_diverged, baseline_diverged))
    if comparison and comparison.num_documents is None:
        decision_of_verdict = Decision.NO_VERDICT
        reasons = [Reason(ReasonCode.NO_DOCUMENTS)]
    elif comparison and not _splits_agree(comparison, judgement.decision):
        decision_of_verdict = Decision.UNDECIDED
        data = {
            'decision': judgement.decision,
            'test': comparison.difference.mean,
            'validation': comparison.validation,
        }
        reasons = [*reasons_of_tests, Reason(ReasonCode.SPLITS_DISAGREE, data)]
    else:
        decision_of_verdict = judgement.decision
        reasons = reasons_of_tests
    return Verdict(
        decision_of_verdict,
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

    The reasons are remarks that withhold the verdict, and missing results. `blocks` are the remarks
    that withhold every verdict of the study.
    """
    reasons: list[Reason | Remark] = [*blocks, *arm.blocks]
    if not arm.verdict_trials:
        reasons.append(Reason(ReasonCode.NO_VERDICT_TRIALS))
    if baseline is None or not baseline.verdict_trials:
        reasons.append(Reason(ReasonCode.NO_BASELINE_TRIALS, {'baseline': study.baseline}))
    elif baseline.blocks:
        data = {'baseline': baseline.variant, 'remarks': baseline.blocks}
        reasons.append(Reason(ReasonCode.BASELINE_BLOCKED, data))
    if reasons or baseline is None:
        return tuple(reasons)

    # Both have results, but a verdict run may not have ended.
    if _has_every_seed(study, arm) and _has_every_seed(study, baseline):
        return ()
    return (Reason(ReasonCode.NO_VERDICT_TRIALS),)


def _has_every_seed(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Returns whether an arm has results of all verdict seeds. Diverged trials count as results."""
    seeds = {trial.seed for trial in arm.verdict_trials}
    return seeds.issuperset(study.verdict_seeds(arm.key))


def _splits_agree(comparison: Comparison, decision_on_test: Decision) -> bool:
    """Returns whether the validation split agrees with the decision on the test split.

    For example, an arm that is better on the test split has to have a lower validation loss than
    the baseline. An equivalent arm has to have a validation difference within the margin.
    """
    if decision_on_test is Decision.EQUIVALENT:
        return abs(comparison.validation) < comparison.difference.margin
    # BELOW_ZERO and ABOVE_ZERO hold the decisions 'better' and 'worse', below the margin or not.
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

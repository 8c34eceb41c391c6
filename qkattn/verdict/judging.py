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

    The family contains all positive controls that the study declares. It also contains those of
    earlier studies of the chain, each at every size and on every corpus.
    """
    cases_by_key = {arm.key: (arm, baseline) for arm, baseline in with_baselines(arms)}
    num_comparisons = 0
    expected_of_case: list[Expected] = []
    cases: list[Case] = []
    for text in study.expected:
        expected = parse_expected(text)
        for key in expected_arms(study.arms, expected):
            num_comparisons += 1
            if key in cases_by_key:
                expected_of_case.append(expected)
                cases.append(cases_by_key[key])

    expected_earlier: set[str] = set()
    for earlier in study.earlier:
        expected_earlier.update(earlier.expected)
    only_earlier = expected_earlier.difference(study.expected)
    num_comparisons += len(only_earlier) * len(study.sizes) * len(study.corpora)

    verdicts = judge(study, cases, blocks, num_comparisons)
    controls = []
    for expected, (arm, _), verdict in zip(expected_of_case, cases, verdicts, strict=True):
        controls.append(PositiveControl(expected, arm, verdict))
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
    family = Family(num_comparisons)
    # The index of a case identifies it in the family.
    withheld: dict[int, tuple[Reason | Remark, ...]] = {}
    comparisons: dict[int, Comparison | None] = {}
    for index, (arm, baseline) in enumerate(cases):
        lacking = _lacking(study, arm, baseline, blocks)
        if baseline is None or lacking:
            withheld[index] = lacking
            continue
        comparison = compare(arm, baseline, study.margin)
        comparisons[index] = comparison
        difference = comparison.difference if comparison else None
        look = study.look(arm.key, baseline.key)
        family.add(index, difference, num_diverged(arm, baseline), look)

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
    """Turns the judgement of a case into a verdict.

    There is no verdict if losses by document are missing. If the validation split disagrees with
    the test split, the verdict is undecided. `index` identifies the case in the family.
    """
    decided = judgement.decision
    arm_diverged, baseline_diverged = family.diverged[index]
    reasons = list(_outcome(comparison, judgement, arm_diverged, baseline_diverged))
    if comparison and comparison.num_documents is None:
        reasons = [Reason(ReasonCode.NO_DOCUMENTS)]
        decided = Decision.NO_VERDICT
    elif comparison and not _splits_agree(comparison, decided):
        data = {
            'decision': decided,
            'test': comparison.difference.mean,
            'validation': comparison.validation,
        }
        reasons.append(Reason(ReasonCode.SPLITS_DISAGREE, data))
        decided = Decision.UNDECIDED
    return Verdict(
        decided,
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
    """Returns why an arm has no verdict: blocking remarks and missing results. () if it has one."""
    lacking: list[Reason | Remark] = [*blocks, *arm.blocks]
    if not arm.verdict_trials:
        lacking.append(Reason(ReasonCode.NO_VERDICT_TRIALS))

    if baseline is None or not baseline.verdict_trials:
        lacking.append(Reason(ReasonCode.NO_BASELINE_TRIALS, {'baseline': study.baseline}))
    elif baseline.blocks:
        data = {'baseline': baseline.variant, 'remarks': baseline.blocks}
        lacking.append(Reason(ReasonCode.BASELINE_BLOCKED, data))
    elif not lacking:
        has_every_seed = _has_every_seed(study, arm) and _has_every_seed(study, baseline)
        if not has_every_seed:
            lacking.append(Reason(ReasonCode.NO_VERDICT_TRIALS))
    return tuple(lacking)


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
    p_margin = judgement.p_margin_holm
    p_same = judgement.p_equivalence_holm
    if difference is None or p is None:
        num_pairs = difference.n if difference else 0
        yield Reason(ReasonCode.FEW_PAIRS, {'n': num_pairs, 'needed': inference.MIN_PAIRS})
        return
    side = Decision.BETTER if difference.mean < 0 else Decision.WORSE
    margin = difference.margin
    if judgement.decision is Decision.EQUIVALENT:
        yield Reason(ReasonCode.EQUIVALENT, {'p': p_same})
        if p <= decision.ALPHA:
            data = {'side': side, 'margin': margin, 'p': p}
            yield Reason(ReasonCode.DIFFERENT_WITHIN_MARGIN, data)
    elif judgement.decision in DECIDED:
        yield Reason(ReasonCode.DIFFERENT, {'p': p})
        # The decision is the side itself, or the side below the margin.
        is_beyond = judgement.decision is side
        code = ReasonCode.BEYOND_MARGIN if is_beyond else ReasonCode.NOT_BEYOND_MARGIN
        yield Reason(code, {'margin': margin, 'p': p_margin})
    elif p <= decision.ALPHA:
        yield Reason(ReasonCode.DIFFERENT_BUT_DIVERGED, {'side': side, 'p': p})
    else:
        data = {'p': p, 'p_equivalence': p_same, 'detectable': judgement.detectable}
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

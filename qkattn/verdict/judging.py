"""Decides on families of comparisons, on the test split; validation has to agree.

A family is a set of comparisons that are corrected together: the primary arms, the positive
controls, and pairs of arms that a claim compares.
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
    """How many primary arms are, or ever were, declared for comparison with a baseline.

    In any study of the chain: which arms a repeat has may depend on what earlier ones found.
    """
    questions = {study.question_of(key) for key in primary_arms(study.arms, study.baseline)}
    for earlier in study.earlier:
        questions |= earlier.family
    return max(len(questions), study.ledger.family)


def primary(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> dict[ArmKey, Verdict]:
    """The verdicts of the primary arms, against their baselines."""
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
    """The verdict of every arm with an expected effect, in the family of all declared ones.

    Those of earlier studies of the chain belong to the family, too, at each size and corpus.
    """
    cases_by_key = {arm.key: (arm, baseline) for arm, baseline in with_baselines(arms)}
    size = 0
    effects: list[Expected] = []  # of each case
    cases: list[Case] = []
    for text in study.expected:
        expected = parse_expected(text)
        for key in expected_arms(study.arms, expected):
            size += 1
            if key in cases_by_key:
                effects.append(expected)
                cases.append(cases_by_key[key])
    of_earlier = {text for earlier in study.earlier for text in earlier.expected}
    others = of_earlier - set(study.expected)
    size += len(others) * len(study.sizes) * len(study.corpora)
    verdicts = judge(study, cases, blocks, size)
    return tuple(
        PositiveControl(expected, arm, verdict)
        for expected, (arm, _), verdict in zip(effects, cases, verdicts, strict=True)
    )


def pair(
    study: TrainedStudy,
    arm: TrainedArm,
    other: TrainedArm | None,
    blocks: Sequence[Remark],
    num_comparisons: int,
) -> Verdict:
    """The verdict of one arm against another, one of `num_comparisons` of a family."""
    if not study.tuned:
        return Verdict(Decision.NO_VERDICT)
    return judge(study, [(arm, other)], blocks, num_comparisons)[0]


def judge(
    study: TrainedStudy, cases: Sequence[Case], blocks: Sequence[Remark], num_comparisons: int
) -> list[Verdict]:
    """The verdict of every case, corrected for `num_comparisons`; `blocks` withhold all.

    A case is tested once the arm and its baseline have results of all their seeds. The finished
    study has `num_comparisons`, which may be more than the cases that have results.
    """
    family = Family(num_comparisons)
    # By the place of a case among `cases`.
    withheld: dict[int, tuple[Reason | Remark, ...]] = {}
    comparisons: dict[int, Comparison | None] = {}
    for number, (arm, baseline) in enumerate(cases):
        lacking = _lacking(study, arm, baseline, blocks)
        if baseline is None or lacking:
            withheld[number] = lacking
            continue
        comparison = compare(arm, baseline, study.margin)
        comparisons[number] = comparison
        difference = comparison.difference if comparison else None
        look = study.look(arm.key, baseline.key)
        family.add(number, difference, num_diverged(arm, baseline), look)
    judgements = family.judge()
    verdicts = []
    for number in range(len(cases)):
        if number in withheld:
            verdicts.append(Verdict(Decision.NO_VERDICT, reasons=withheld[number]))
        else:
            verdicts.append(_verdict(family, number, judgements[number], comparisons[number]))
    return verdicts


def _verdict(
    family: Family, number: int, judgement: Judgement, comparison: Comparison | None
) -> Verdict:
    """The verdict from the tests of a case, if it has losses by document and its splits agree."""
    decided = judgement.decision
    reasons = list(_outcome(comparison, judgement, *family.diverged[number]))
    if comparison and comparison.num_documents is None:
        reasons = [Reason(ReasonCode.NO_DOCUMENTS)]
        decided = Decision.NO_VERDICT
    elif comparison and not _splits_agree(comparison, decided):
        means = {'test': comparison.difference.mean, 'validation': comparison.validation}
        reasons.append(Reason(ReasonCode.SPLITS_DISAGREE, {'decision': decided} | means))
        decided = Decision.UNDECIDED
    return Verdict(
        decided,
        judgement.p_holm,
        judgement.p_margin_holm,
        judgement.p_equivalence_holm,
        judgement.detectable,
        reasons=tuple(reasons),
        num_comparisons=family.size,
        look=family.looks[number],
    )


def _lacking(
    study: TrainedStudy, arm: TrainedArm, baseline: TrainedArm | None, blocks: Sequence[Remark]
) -> tuple[Reason | Remark, ...]:
    """Remarks that block the arm or its baseline, and the results that the verdict lacks."""
    lacking: list[Reason | Remark] = [*blocks, *arm.blocks]
    if not arm.verdict_trials:
        lacking.append(Reason(ReasonCode.NO_VERDICT_TRIALS))
    if baseline is None or not baseline.verdict_trials:
        lacking.append(Reason(ReasonCode.NO_BASELINE_TRIALS, {'baseline': study.baseline}))
    elif baseline.blocks:
        data = {'baseline': baseline.variant, 'remarks': baseline.blocks}
        lacking.append(Reason(ReasonCode.BASELINE_BLOCKED, data))
    elif not lacking and not (_has_every_seed(study, arm) and _has_every_seed(study, baseline)):
        lacking.append(Reason(ReasonCode.NO_VERDICT_TRIALS))
    return tuple(lacking)


def _has_every_seed(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Whether an arm has results of all declared seeds of its verdict, diverged ones included."""
    seeds = {trial.seed for trial in arm.verdict_trials}
    return seeds.issuperset(study.verdict_seeds(arm.key))


def _splits_agree(comparison: Comparison, decision_on_test: Decision) -> bool:
    """Whether the validation split agrees: on the same side, or within the margin."""
    if decision_on_test is Decision.EQUIVALENT:
        return abs(comparison.validation) < comparison.difference.margin
    if decision_on_test in BELOW_ZERO:
        return comparison.validation < 0
    if decision_on_test in ABOVE_ZERO:
        return comparison.validation > 0
    return True  # nothing is decided


def _outcome(
    comparison: Comparison | None, judgement: Judgement, arm_diverged: int, baseline_diverged: int
) -> Iterator[Reason]:
    """The reasons of a verdict from the tests alone.

    `arm_diverged` and `baseline_diverged` are numbers of trials.
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
        is_beyond = judgement.decision is side  # else it is that side, below the margin
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

"""Decides on the arms of a study, look by look, on the test split; validation has to agree."""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from qkattn.stats import decision, inference
from qkattn.stats.decision import Judgement
from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import Comparison, Decision, Reason, ReasonCode, Remark, Verdict
from qkattn.verdict.comparison import Pair, compare
from qkattn.verdict.load import Study

Key = TypeVar('Key', bound=Hashable)
# An arm and its baseline, which may be missing, on each of the corpora that count together.
Case = Sequence[tuple[Arm, Arm | None]]

BELOW_ZERO = (Decision.BETTER, Decision.BETTER_BELOW_MARGIN)
ABOVE_ZERO = (Decision.WORSE, Decision.WORSE_BELOW_MARGIN)
WORDS = (*BELOW_ZERO, Decision.EQUIVALENT, *ABOVE_ZERO)


def judge(
    study: Study, cases: Mapping[Key, Case], blocks: Sequence[Remark], family: int
) -> dict[Key, Verdict]:
    """The verdict of every case; `blocks` withhold all of them.

    Each look is tested at its share of the error rate (`decision.spending`), corrected for `family`
    comparisons, and the first look that gives a word decides. An arm is tested at the looks for
    whose seeds it and its baseline have results.
    """
    verdicts: dict[Key, Verdict] = {}
    tested: dict[Key, list[Pair]] = {}
    for key, case in cases.items():
        if why := [*blocks, *(reason for pair in case for reason in _lacking(study, *pair))]:
            distinct = tuple(of for place, of in enumerate(why) if of not in why[:place])
            verdicts[key] = Verdict(Decision.NO_VERDICT, distinct)
        else:
            tested[key] = [(arm, baseline) for arm, baseline in case if baseline is not None]
    for count, alpha in zip(study.looks, decision.spending(study.looks), strict=True):
        seeds = study.seeds[:count]
        at_look = {
            key: [(arm.at(seeds), baseline.at(seeds)) for arm, baseline in pairs]
            for key, pairs in tested.items()
            if all(arm.reached(seeds) for pair in pairs for arm in pair)
        }
        for key, verdict in _of_look(study, at_look, family, alpha):
            if key not in verdicts or verdicts[key].decision not in WORDS:
                verdicts[key] = dataclasses.replace(verdict, num_seeds=count)
    waiting = Verdict(Decision.NO_VERDICT, (Reason(ReasonCode.NO_VERDICT_TRIALS),))
    return {key: verdicts.get(key, waiting) for key in cases}


def _lacking(study: Study, arm: Arm, baseline: Arm | None) -> Iterator[Reason | Remark]:
    """What blocks the arm or its baseline, and the results that a verdict needs of them."""
    of_baseline = {'baseline': study.baseline}
    yield from arm.blocks
    if not arm.verdict_trials:
        yield Reason(ReasonCode.NO_VERDICT_TRIALS)
    if baseline is None or not baseline.verdict_trials:
        yield Reason(ReasonCode.NO_BASELINE_TRIALS, of_baseline)
    elif why := baseline.blocks:
        yield Reason(ReasonCode.BASELINE_BLOCKED, of_baseline | {'remarks': why})


def _of_look(
    study: Study, cases: Mapping[Key, list[Pair]], family: int, alpha: float
) -> Iterator[tuple[Key, Verdict]]:
    """The verdicts of the arms that have results at this look, and of these results alone."""
    compared = {key: compare(pairs, study, None) for key, pairs in cases.items()}
    diverged = {
        key: (sum(a.num_diverged for a, _ in pairs), sum(b.num_diverged for _, b in pairs))
        for key, pairs in cases.items()
    }
    judged = decision.judge(
        {key: of.difference if of else None for key, of in compared.items()},
        diverged=diverged,
        planned=family,
        alpha_of_look=alpha,
    )
    for key, of in judged.items():
        reasons = list(_outcome(compared[key], of, alpha, *diverged[key]))
        word, found = of.decision, compared[key]
        if found and found.num_documents is None:
            reasons, word = [Reason(ReasonCode.NO_DOCUMENTS)], Decision.NO_VERDICT
        elif found and not _agree(found, word):
            means = {'test': found.difference.mean, 'validation': found.validation}
            reasons.append(Reason(ReasonCode.SPLITS_DISAGREE, {'decision': word} | means))
            word = Decision.UNDECIDED
        numbers = vars(of) | {'decision': word, 'num_comparisons': family, 'alpha': alpha}
        yield key, Verdict(reasons=tuple(reasons), **numbers)


def _agree(compared: Comparison, word: Decision) -> bool:
    """Whether the validation split supports the word: the same side, or within the margin."""
    if word in BELOW_ZERO:
        return compared.validation < 0
    if word in ABOVE_ZERO:
        return compared.validation > 0
    return word is not Decision.EQUIVALENT or (
        abs(compared.validation) < compared.difference.margin
    )


def _outcome(
    compared: Comparison | None, judged: Judgement, alpha: float, arm: int, baseline: int
) -> Iterator[Reason]:
    """The reasons of the verdict from the tests alone; `arm` and `baseline` trials diverged."""
    if arm or baseline:
        yield Reason(ReasonCode.DIVERGED, {'arm': arm, 'baseline': baseline})
    difference = compared.difference if compared else None
    p, p_margin, p_same = judged.p_holm, judged.p_margin_holm, judged.p_equivalence_holm
    if difference is None or p is None:
        counts = {'n': difference.n if difference else 0, 'needed': inference.MIN_PAIRS}
        yield Reason(ReasonCode.FEW_PAIRS, counts)
        return
    side = Decision.BETTER if difference.mean < 0 else Decision.WORSE
    margin = difference.margin
    if judged.decision is Decision.EQUIVALENT:
        yield Reason(ReasonCode.EQUIVALENT, {'p': p_same})
        if p <= alpha:
            data = {'side': side, 'margin': margin, 'p': p}
            yield Reason(ReasonCode.DIFFERENT_WITHIN_MARGIN, data)
    elif judged.decision in WORDS:
        yield Reason(ReasonCode.DIFFERENT, {'p': p})
        beyond = judged.decision is side
        code = ReasonCode.BEYOND_MARGIN if beyond else ReasonCode.NOT_BEYOND_MARGIN
        yield Reason(code, {'margin': margin, 'p': p_margin})
    elif p <= alpha:
        yield Reason(ReasonCode.DIFFERENT_BUT_DIVERGED, {'side': side, 'p': p})
    else:
        data = {'p': p, 'p_equivalence': p_same, 'detectable': judged.detectable}
        yield Reason(ReasonCode.NOT_SHOWN, data)
    if others := difference.typical:
        data = {'apart': difference.n - others.n, 'n': difference.n, 'mean': difference.mean}
        yield Reason(ReasonCode.SEEDS_APART, data | {'typical': others.mean, 'p': others.p})

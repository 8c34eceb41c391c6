"""Derives the truth of a claim in each context from the verdicts of arms, and then its verdict.

`RELATIONS`, the table in docs/claims.md, says which decisions of `qkattn.stats` and which one-sided
findings make a relation true or false. All others leave it open. "Better" and "worse" mean by more
than the margin. "Better (below margin)" leaves both "better" and "equivalent" open: the sign of the
difference is known, but with more seeds the arm may turn out to be either.
"""

from collections.abc import Iterable

from experiments.claims.claim import (
    AS_REPORTED,
    NOT_BETTER,
    NOT_WORSE,
    RELATIONS,
    ClaimVerdict,
    Kind,
    Row,
    Speaks,
)
from qkattn.stats.decision import Decision, level
from qkattn.verdict.codes import Comparison, ReasonCode, Verdict

# Pairs of a factor and its value, in the order of the row.
Context = tuple[tuple[str, str], ...]
# The context of rows that have none, such as checks.
CHECKS: Context = (('part', 'checks'),)
# Contexts with other values of these factors are different settings.
SETTING = ('size', 'corpus', 'steps')


def decide_relation(
    row: Row, relation: str, verdict: Verdict, comparison: Comparison
) -> tuple[str, Speaks]:
    """Decides whether an arm is as the claim expects; returns the reason, and FOR, AGAINST or OPEN.

    The reason is the decision of the verdict: an arm that is 'worse' speaks FOR the relation
    'worse' and AGAINST 'better'. An arm whose verdict is 'undecided' may still be, for example,
    'not worse by the margin', which speaks AGAINST 'worse'. Such a one-sided finding does not count
    if trials diverged.

    Args:
        row: The row of the arm.
        relation: What the claim expects of the arm, such as 'not_better'.
        verdict: The verdict on the arm.
        comparison: The difference behind the verdict.
    """
    decision = verdict.decision
    has_diverged = any(reason.code is ReasonCode.DIVERGED for reason in verdict.reasons)
    if relation == AS_REPORTED:
        if has_diverged or decision is Decision.NO_VERDICT:
            return decision.value, Speaks.OPEN
        return decision.value, _as_reported(row, comparison)
    if decision is Decision.UNDECIDED and not has_diverged:
        for one_sided in _one_sided_findings(verdict, comparison):
            speaks = _truth(relation, one_sided)
            if speaks is not Speaks.OPEN:
                return one_sided, speaks
    return decision.value, _truth(relation, decision)


def _truth(relation: str, result: Decision | str) -> Speaks:
    """Returns FOR if a decision or finding makes a relation true, AGAINST if false, else OPEN."""
    if result in RELATIONS[relation].true:
        return Speaks.FOR
    if result in RELATIONS[relation].false:
        return Speaks.AGAINST
    return Speaks.OPEN


def _one_sided_findings(verdict: Verdict, comparison: Comparison) -> list[str]:
    """Returns which of NOT_BETTER and NOT_WORSE are shown for an arm, if any.

    With a margin of 0.01, NOT_WORSE says that the difference is below +0.01, and NOT_BETTER that it
    is above -0.01. An arm is equivalent if both hold. Each of the two tests is used alone here, and
    the mean on the validation split has to lie on the same side of the margin.

    If a finding is false, then 'equivalent' would be false as well, because the true difference
    lies beyond the margin. So the error rate of the verdicts holds for findings, too.
    """
    difference = comparison.difference
    margin = difference.margin
    # The error rate is shared by all comparisons (Bonferroni).
    alpha = level(verdict.look) / max(1, verdict.num_comparisons)
    findings = []
    p_not_better = difference.p_not_better
    if p_not_better is not None and p_not_better <= alpha and comparison.validation > -margin:
        findings.append(NOT_BETTER)
    p_not_worse = difference.p_not_worse
    if p_not_worse is not None and p_not_worse <= alpha and comparison.validation < margin:
        findings.append(NOT_WORSE)
    return findings


def _as_reported(row: Row, comparison: Comparison) -> Speaks:
    """Compares the interval of a row with the range that a source reports.

    Returns FOR if the interval lies within the range and AGAINST if it lies outside, provided that
    the mean on the validation split does the same. Otherwise returns OPEN.
    """
    if None in (row.low, row.high, row.expected, row.tolerance):
        return Speaks.OPEN
    reported_low = row.expected - row.tolerance
    reported_high = row.expected + row.tolerance
    differences = (row.low, row.high, comparison.validation)
    if all(reported_low <= difference <= reported_high for difference in differences):
        return Speaks.FOR
    is_below = all(difference < reported_low for difference in differences)
    is_above = all(difference > reported_high for difference in differences)
    if is_below or is_above:
        return Speaks.AGAINST
    return Speaks.OPEN


def truths_by_context(rows: Iterable[Row]) -> dict[Context, Speaks]:
    """Returns whether a claim is true in each context, such as one size and corpus.

    In a context whose rows all support the claim, the result is FOR. It is AGAINST if any row is
    against the claim, and otherwise OPEN. Rows that are only shown (BESIDE) do not count.
    """
    speaks_by_context: dict[Context, set[str]] = {}
    for row in rows:
        if row.speaks != Speaks.BESIDE:
            context = tuple(row.context.items()) or CHECKS
            speaks_by_context.setdefault(context, set()).add(row.speaks)

    truth_by_context = {}
    for context, speaks_of_rows in speaks_by_context.items():
        if Speaks.AGAINST in speaks_of_rows:
            truth_by_context[context] = Speaks.AGAINST
        elif Speaks.OPEN in speaks_of_rows:
            truth_by_context[context] = Speaks.OPEN
        else:
            truth_by_context[context] = Speaks.FOR
    return truth_by_context


def verdict_on(rows: Iterable[Row], complete: bool = True) -> ClaimVerdict:
    """Returns the verdict on a claim from its rows.

    A claim holds if it is true in all contexts, and fails if it is false in all. If it is true in
    some and false in others, it 'holds only if'. Unless all contexts have results (`complete`), it
    neither holds nor fails.

    A claim that training decides has to be tested in two settings (size, corpus, length of
    training). With one setting, the verdict is 'holds in this setting' or 'fails in this setting'.
    """
    deciding = [row for row in rows if row.speaks != Speaks.BESIDE]
    truth_values = set(truths_by_context(deciding).values())
    if {Speaks.FOR, Speaks.AGAINST} <= truth_values:
        return ClaimVerdict.HOLDS_ONLY_IF
    is_decided = truth_values == {Speaks.FOR} or truth_values == {Speaks.AGAINST}
    if not is_decided or not complete:
        return ClaimVerdict.UNDECIDED
    settings = {tuple(row.context.get(factor) for factor in SETTING) for row in deciding}
    # Checks have none of these factors, so they are not a setting.
    settings.discard((None,) * len(SETTING))
    is_exact = all(row.kind == Kind.EXACT for row in deciding)
    has_enough_settings = is_exact or len(settings) > 1
    if truth_values == {Speaks.FOR}:
        return ClaimVerdict.HOLDS if has_enough_settings else ClaimVerdict.HOLDS_HERE
    return ClaimVerdict.FAILS if has_enough_settings else ClaimVerdict.FAILS_HERE


def condition_of(rows: Iterable[Row]) -> str:
    """Describes the contexts in which a claim is true, for a claim that is true in some of them.

    If one factor alone tells these contexts from the others, only its values are named: 'size:
    d_model=64; d_model=128'. Otherwise the contexts are listed: 'size: 8, corpus: a; size: 1,
    corpus: b'. Factors that have the same value in all contexts are left out.
    """
    truth_by_context = truths_by_context(rows)
    true_contexts: list[dict[str, str]] = []
    other_contexts: list[dict[str, str]] = []
    for context, truth in truth_by_context.items():
        if truth == Speaks.FOR:
            true_contexts.append(dict(context))
        else:
            other_contexts.append(dict(context))

    for factor in true_contexts[0]:
        true_values = [factors.get(factor) for factors in true_contexts]
        other_values = [factors.get(factor) for factors in other_contexts]
        if None not in true_values and set(true_values).isdisjoint(other_values):
            distinct = dict.fromkeys(str(value) for value in true_values)
            return f'{factor}: {"; ".join(distinct)}'

    shared = set.intersection(*(set(context) for context in truth_by_context))
    descriptions = []
    for factors in true_contexts:
        differing = [item for item in factors.items() if item not in shared]
        descriptions.append(', '.join(f'{factor}: {value}' for factor, value in differing))
    return '; '.join(descriptions)

"""From the verdicts of arms to the truth of a claim in each context, and from these to its verdict.

`RELATIONS` is the table of docs/claims.md: the decisions (of `qkattn.stats`) and one-sided findings
for which a relation is true or false; all others leave it open. "Better" and "worse" mean by more
than the margin. Below the margin the side of zero is known, but not that of the margin: with more
seeds such an arm may turn out either better or equivalent.
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

# The factors of a row with their values, in the order of the row.
Context = tuple[tuple[str, str], ...]
# The context of checks that name none.
CHECKS: Context = (('part', 'checks'),)
# The factors whose values make another setting.
SETTING = ('size', 'corpus', 'steps')


def finding(
    row: Row, relation: str, verdict: Verdict, comparison: Comparison
) -> tuple[str, Speaks]:
    """The decision or one-sided finding on the arm of a row, and whether it supports the claim.

    `relation` is what the claim expects of the arm, `verdict` is the arm's, and `comparison` its
    difference from what it is compared with. A one-sided finding decides the relation of an
    undecided arm, unless trials diverged.
    """
    decision = verdict.decision
    has_diverged = any(reason.code is ReasonCode.DIVERGED for reason in verdict.reasons)
    if relation == AS_REPORTED:
        is_withheld = has_diverged or decision is Decision.NO_VERDICT
        return decision.value, Speaks.OPEN if is_withheld else _as_reported(row, comparison)
    if decision is Decision.UNDECIDED and not has_diverged:
        for one_sided in _one_sided_findings(verdict, comparison):
            speaks = _truth(relation, one_sided)
            if speaks is not Speaks.OPEN:
                return one_sided, speaks
    return decision.value, _truth(relation, decision)


def _truth(relation: str, found: Decision | str) -> Speaks:
    """Whether a decision or one-sided finding makes a relation true, false or leaves it open."""
    if found in RELATIONS[relation].true:
        return Speaks.FOR
    if found in RELATIONS[relation].false:
        return Speaks.AGAINST
    return Speaks.OPEN


def _one_sided_findings(verdict: Verdict, comparison: Comparison) -> list[str]:
    """Which of NOT_BETTER and NOT_WORSE one of the two tests of equivalence shows by itself.

    A test is at the arm's share of the error rate, that of its look over the comparisons
    (Bonferroni), and the mean of the validation split has to lie on the same side of the margin.
    A finding errs only where the difference truly lies beyond the margin, where equivalence would
    err too: its error rate is that of the verdicts.
    """
    difference = comparison.difference
    margin = difference.margin
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
    """FOR where the interval of a row lies within the reported range, AGAINST where outside of it.

    OPEN where the interval crosses an end of the range, and where the mean of the validation split
    lies on another side of an end than the interval.
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
    return Speaks.AGAINST if is_below or is_above else Speaks.OPEN


def truths(rows: Iterable[Row]) -> dict[Context, Speaks]:
    """Truth of a claim by context: false if any row is against it, else open if any is open.

    Rows that stand BESIDE others have no part in it.
    """
    spoken: dict[Context, set[str]] = {}
    for row in rows:
        if row.speaks != Speaks.BESIDE:
            context = tuple(row.context.items()) or CHECKS
            spoken.setdefault(context, set()).add(row.speaks)
    truth_by_context = {}
    for context, of_rows in spoken.items():
        if Speaks.AGAINST in of_rows:
            truth_by_context[context] = Speaks.AGAINST
        elif Speaks.OPEN in of_rows:
            truth_by_context[context] = Speaks.OPEN
        else:
            truth_by_context[context] = Speaks.FOR
    return truth_by_context


def verdict_on(rows: Iterable[Row], complete: bool = True) -> ClaimVerdict:
    """Holds if true in all contexts, fails if false in all; holds only if, if both occur.

    A claim that training decides needs two settings (sizes, corpora, lengths of training) to hold
    or fail; with one, it holds or fails in this setting. Unless all contexts have results
    (`complete`), a claim neither holds nor fails.
    """
    deciding = [row for row in rows if row.speaks != Speaks.BESIDE]
    truth_values = set(truths(deciding).values())
    if {Speaks.FOR, Speaks.AGAINST} <= truth_values:
        return ClaimVerdict.HOLDS_ONLY_IF
    is_decided = truth_values == {Speaks.FOR} or truth_values == {Speaks.AGAINST}
    if not is_decided or not complete:
        return ClaimVerdict.UNDECIDED
    settings = {tuple(row.context.get(factor) for factor in SETTING) for row in deciding}
    settings.discard((None,) * len(SETTING))  # of checks, which have none of these factors
    is_exact = all(row.kind == Kind.EXACT for row in deciding)
    has_enough_settings = is_exact or len(settings) > 1
    if truth_values == {Speaks.FOR}:
        return ClaimVerdict.HOLDS if has_enough_settings else ClaimVerdict.HOLDS_HERE
    return ClaimVerdict.FAILS if has_enough_settings else ClaimVerdict.FAILS_HERE


def condition_of(rows: Iterable[Row]) -> str:
    """Where a claim that is true in some contexts is true, 'size: d_model=64; d_model=128'.

    Named by one factor whose values tell these contexts from the others, if there is one. Else all
    of these contexts are written out, without what every context shares:
    'size: 8, corpus: a; size: 1, corpus: b'.
    """
    truth_by_context = truths(rows)
    true_contexts: list[dict[str, str]] = []
    other_contexts: list[dict[str, str]] = []
    for context, truth in truth_by_context.items():
        contexts = true_contexts if truth == Speaks.FOR else other_contexts
        contexts.append(dict(context))
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

"""Derives the truth of a claim in each context, and its verdict, from the verdicts of arms.

`RELATIONS` says which decisions of `qkattn.stats` make a relation true or false. "Better" and
"worse" mean by more than the margin. "Better (margin open)" leaves "better" and "equivalent" open,
because more seeds may show either.
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
    """Decides whether an arm is as the claim expects.

    Example:
      An arm with the decision 'worse' is FOR the relation 'worse' and AGAINST 'better'.

    Args:
        row: The row of the arm.
        relation: What the claim expects of the arm, such as 'not_better'.
        verdict: The verdict on the arm.
        comparison: The difference behind the verdict.

    Returns:
        The decision or one-sided finding that settles the relation, and FOR, AGAINST or OPEN.
    """
    decision = verdict.decision
    has_diverged = any(reason.code is ReasonCode.DIVERGED for reason in verdict.reasons)
    if relation == AS_REPORTED:
        if has_diverged or decision is Decision.NO_VERDICT:
            return decision.value, Speaks.OPEN
        return decision.value, _as_reported(row, comparison)
    if decision is Decision.UNDECIDED and not has_diverged:
        # An undecided arm may still be, for example, 'not worse by the margin'.
        for finding in _one_sided_findings(verdict, comparison):
            speaks = _truth(relation, finding)
            if speaks is not Speaks.OPEN:
                return finding, speaks
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

    NOT_BETTER means that the difference is above -margin. NOT_WORSE means that the difference is
    below +margin. The difference on the validation split has to agree.
    """
    difference = comparison.difference
    margin = difference.margin
    validation_difference = comparison.validation
    # Bonferroni corrects for the comparisons. A wrong finding would also make 'equivalent' wrong,
    # so the findings do not add to the error rate.
    alpha = level(verdict.look) / max(1, verdict.num_comparisons)
    findings = []
    is_above = difference.p_not_better is not None and difference.p_not_better <= alpha
    if is_above and validation_difference > -margin:
        findings.append(NOT_BETTER)
    is_below = difference.p_not_worse is not None and difference.p_not_worse <= alpha
    if is_below and validation_difference < margin:
        findings.append(NOT_WORSE)
    return findings


def _as_reported(row: Row, comparison: Comparison) -> Speaks:
    """Returns FOR if the interval lies within the reported range, AGAINST if outside, else OPEN.

    The mean on the validation split has to agree.
    """
    if None in (row.low, row.high, row.expected, row.tolerance):
        return Speaks.OPEN
    reported_low = row.expected - row.tolerance
    reported_high = row.expected + row.tolerance
    differences = (row.low, row.high, comparison.validation)
    is_within = all(reported_low <= difference <= reported_high for difference in differences)
    if is_within:
        return Speaks.FOR
    is_below = all(difference < reported_low for difference in differences)
    is_above = all(difference > reported_high for difference in differences)
    if is_below or is_above:
        return Speaks.AGAINST
    return Speaks.OPEN


def truths_by_context(rows: Iterable[Row]) -> dict[Context, Speaks]:
    """Returns whether a claim is true in each context, such as one size and corpus.

    The value is AGAINST if any row of the context is AGAINST, FOR if all are FOR, and otherwise
    OPEN. Rows that are only shown (BESIDE) do not count.
    """
    speaks_by_context: dict[Context, set[str]] = {}
    for row in rows:
        if row.speaks != Speaks.BESIDE:
            context = tuple(row.context.items()) or CHECKS  # exact checks may have no context
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

    - 'holds' if the claim is true in all contexts, and 'fails' if false in all;
    - 'holds in this setting' or 'fails in this setting' instead, if training decides the claim and
      only one setting (size, corpus, steps) was trained;
    - 'holds only if' if the claim is true in some contexts and false in others;
    - 'undecided' in all other cases, and instead of 'holds' and 'fails' if results are missing.

    Args:
        rows: All rows of the claim.
        complete: Whether no results are missing.
    """
    deciding = [row for row in rows if row.speaks != Speaks.BESIDE]
    truth_by_context = truths_by_context(deciding)
    truths = set(truth_by_context.values())
    if Speaks.FOR in truths and Speaks.AGAINST in truths:
        return ClaimVerdict.HOLDS_ONLY_IF
    is_true = truths == {Speaks.FOR}
    is_false = truths == {Speaks.AGAINST}
    if not complete or not (is_true or is_false):
        return ClaimVerdict.UNDECIDED

    in_one_setting = is_of_one_setting(deciding)
    if is_true:
        return ClaimVerdict.HOLDS_HERE if in_one_setting else ClaimVerdict.HOLDS
    return ClaimVerdict.FAILS_HERE if in_one_setting else ClaimVerdict.FAILS


def is_of_one_setting(rows: Iterable[Row]) -> bool:
    """Returns whether training decides a claim, and only one setting was trained."""
    deciding = [row for row in rows if row.speaks != Speaks.BESIDE]
    are_all_exact = all(row.kind == Kind.EXACT for row in deciding)
    if are_all_exact:
        return False
    settings = set()
    for row in deciding:
        setting = tuple(row.context.get(factor) for factor in SETTING)  # size, corpus and steps
        is_exact_check = set(setting) == {None}
        if not is_exact_check:
            settings.add(setting)
    return len(settings) <= 1


def condition_of(rows: Iterable[Row]) -> str:
    """Describes the contexts in which a claim is true, if it is true in some but not all of them.

    If a single factor separates the true contexts from the rest, only its values are listed:

        size: d_model=64; d_model=128

    Otherwise every true context is listed, without factors whose value is the same everywhere:

        size: 8, corpus: a; size: 1, corpus: b
    """
    truth_by_context = truths_by_context(rows)
    true_contexts: list[dict[str, str]] = []
    other_contexts: list[dict[str, str]] = []
    for context_items, truth in truth_by_context.items():
        if truth == Speaks.FOR:
            true_contexts.append(dict(context_items))
        else:
            other_contexts.append(dict(context_items))

    for factor in true_contexts[0]:
        true_values = [context.get(factor) for context in true_contexts]
        other_values = [context.get(factor) for context in other_contexts]
        separates = set(true_values).isdisjoint(other_values)
        if None not in true_values and separates:
            distinct_values = dict.fromkeys(str(value) for value in true_values)
            return f'{factor}: {"; ".join(distinct_values)}'

    # Pairs of a factor and its value that all contexts have.
    shared_items = set.intersection(*map(set, truth_by_context))
    descriptions = []
    for context in true_contexts:
        differing_items = [item for item in context.items() if item not in shared_items]
        descriptions.append(', '.join(f'{factor}: {value}' for factor, value in differing_items))
    return '; '.join(descriptions)

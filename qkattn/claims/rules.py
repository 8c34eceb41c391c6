"""Rules from the verdicts of arms to the truth of a claim in each context, and to its verdict.

RELATIONS and ONE_SIDED hold the table of docs/claims.md: the decisions (of `qkattn.stats`) and
one-sided findings for which a relation is true or false; all others leave it open. "Better" and
"worse" mean by more than the margin. Below the margin the side of zero is known, but not that
of the margin: with more seeds such an arm may turn out either better or equivalent.

A claim is one family. "True in every context" and "false in every context" are shown if every row
rejects at the error rate, without correction: the null hypothesis is a union, that of some context,
so the test of their intersection errs at most at that rate (Berger 1982, Technometrics 24:295).
"True here, false there" selects rows, so each is tested at the error rate over their number.
"""

from collections.abc import Iterable

from qkattn.claims.claim import AS_REPORTED, RELATIONS, ClaimResult, ClaimVerdict, Kind, Row, Speaks
from qkattn.stats.decision import ALPHA
from qkattn.verdict import Decision
from qkattn.verdict.codes import Comparison, ReasonCode, Verdict

# Factors with their values, in the order of a row.
Context = tuple[tuple[str, str], ...]
SETTING = ('size', 'corpus', 'steps')  # the factors whose values make another setting

NOT_BETTER, NOT_WORSE = 'not better by the margin', 'not worse by the margin'
# By relation, the one-sided finding that decides it, and for which side.
ONE_SIDED = {
    'better': (NOT_BETTER, Speaks.AGAINST),
    'worse': (NOT_WORSE, Speaks.AGAINST),
    'not_better': (NOT_BETTER, Speaks.FOR),
    'not_worse': (NOT_WORSE, Speaks.FOR),
}


def finding(
    row: Row, relation: str, verdict: Verdict, comparison: Comparison
) -> tuple[str, Speaks]:
    """The decision or one-sided finding on the arm of a row, and whether it supports the claim.

    A one-sided finding decides the relation of an undecided arm. It is tested at the arm's share of
    the error rate, ALPHA / comparisons (Bonferroni), and the mean of the validation split has to
    lie on the same side of the margin. A false one needs a difference beyond the margin, where
    equivalence would be false too: its error rate is that of the verdicts.
    """
    decision = verdict.decision
    diverged = any(reason.code is ReasonCode.DIVERGED for reason in verdict.reasons)
    if relation == AS_REPORTED:
        withheld = diverged or decision is Decision.NO_VERDICT
        return decision.value, Speaks.OPEN if withheld else _as_reported(row, comparison)
    if decision is Decision.UNDECIDED and relation in ONE_SIDED and not diverged:
        side, speaks = ONE_SIDED[relation]
        difference = comparison.difference
        p, sign = difference.p_not_better, -1
        if side == NOT_WORSE:
            p, sign = difference.p_not_worse, 1
        shown = p is not None and p <= ALPHA / max(1, verdict.num_comparisons)
        if shown and sign * comparison.validation < difference.margin:
            return side, speaks
    true, false = RELATIONS[relation]
    against = Speaks.AGAINST if decision in false else Speaks.OPEN
    return decision.value, Speaks.FOR if decision in true else against


def _as_reported(row: Row, comparison: Comparison) -> Speaks:
    """Whether the interval of a row lies within or outside the reported range.

    Open where the mean of the validation split lies on the other side of a reported bound.
    """
    if None in (row.low, row.high, row.expected, row.tolerance):
        return Speaks.OPEN
    low, high = row.expected - row.tolerance, row.expected + row.tolerance
    values = row.low, row.high, comparison.validation
    sides = {(value > high) - (value < low) for value in values}
    if len(sides) > 1:
        return Speaks.OPEN
    return Speaks.FOR if sides == {0} else Speaks.AGAINST


def truths(rows: Iterable[Row]) -> dict[Context, Speaks]:
    """Truth of a claim by context: false if any row is against it, else open if any is open."""
    spoken: dict[Context, set[str]] = {}
    for row in rows:
        if row.speaks != Speaks.BESIDE:
            spoken.setdefault(tuple(row.context.items()), set()).add(row.speaks)
    order = (Speaks.AGAINST, Speaks.OPEN, Speaks.FOR)
    return {context: next(s for s in order if s in each) for context, each in spoken.items()}


def verdict(rows: Iterable[Row], complete: bool = True) -> ClaimVerdict:
    """Holds if true in all contexts, fails if false in all; holds only if, if both occur.

    A claim that training decides needs two settings (sizes, corpora, lengths of training) to hold
    or fail; with one, it holds or fails in this setting. Unless all contexts have results
    (`complete`), a claim neither holds nor fails.
    """
    rows = [row for row in rows if row.speaks != Speaks.BESIDE]
    spoken = set(truths(rows).values())
    if {Speaks.FOR, Speaks.AGAINST} <= spoken:
        return ClaimVerdict.HOLDS_ONLY_IF
    if not complete or len(spoken) != 1 or Speaks.OPEN in spoken:
        return ClaimVerdict.UNDECIDED
    settings = {tuple(row.context.get(name) for name in SETTING) for row in rows}
    enough = len(settings) > 1 or all(row.kind == Kind.EXACT for row in rows)
    if spoken == {Speaks.FOR}:
        return ClaimVerdict.HOLDS if enough else ClaimVerdict.HOLDS_HERE
    return ClaimVerdict.FAILS if enough else ClaimVerdict.FAILS_HERE


def condition(rows: Iterable[Row]) -> str:
    """Where a claim is true: by one factor that tells these contexts, else by all that differ."""
    by_context = truths(rows)
    true = [dict(context) for context, speaks in by_context.items() if speaks == Speaks.FOR]
    other = [dict(context) for context, speaks in by_context.items() if speaks != Speaks.FOR]
    for factor in true[0]:
        holds = [context.get(factor) for context in true]
        if None not in holds and not {*holds} & {context.get(factor) for context in other}:
            values = list(dict.fromkeys(map(str, holds)))
            return f'{factor}: {"; ".join(values)}'
    shared = set.intersection(*map(set, by_context))
    places = ([item for item in context.items() if item not in shared] for context in true)
    return '; '.join(', '.join(f'{name}: {value}' for name, value in place) for place in places)


def decisive(claim: ClaimResult) -> Row | None:
    """The first row that speaks as the verdict does, whose number stands for the claim."""
    speaks = Speaks.OPEN if claim.verdict == ClaimVerdict.UNDECIDED else Speaks.FOR
    if claim.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
        speaks = Speaks.AGAINST
    return next((row for row in claim.rows if row.speaks == speaks), None)

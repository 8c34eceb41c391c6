"""Decides a claim from its checks and from the studies of a directory.

From the verdicts of arms follows the truth of a claim in each context, and from these its verdict.
RELATIONS is the table of docs/claims.md: the decisions (of `qkattn.stats`) and one-sided findings
for which a relation is true or false; all others leave it open. "Better" and "worse" mean by more
than the margin. Below the margin the side of zero is known, but not that of the margin: with more
seeds such an arm may turn out either better or equivalent.

A claim is one family. "True in every context" and "false in every context" are shown if every row
rejects at the error rate, without correction: the null hypothesis is a union, that of some context,
so the test of their intersection errs at most at that rate (Berger 1982, Technometrics 24:295).
Rows of one context, any of which makes it false, share the rate for "false".
"True here, false there" selects rows, so each is tested at the error rate over their number.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax

from experiments.claims.claim import (
    AS_REPORTED,
    NOT_BETTER,
    NOT_WORSE,
    RELATIONS,
    Claim,
    ClaimResult,
    ClaimVerdict,
    Expectation,
    Kind,
    Row,
    Speaks,
    Statement,
    difference_row,
)
from experiments.claims.protocol import pick
from experiments.claims.studies import Results, context_of
from qkattn.config.calls import called
from qkattn.errors import ConfigError
from qkattn.report.prose import NOT_RECORDED, SPLITS, device, length, reasons
from qkattn.stats.decision import level
from qkattn.stats.inference import LEVEL, to_find
from qkattn.storage.records import flat
from qkattn.storage.run_directory import describe_start
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.verdict import Decision, Findings, judging
from qkattn.verdict.codes import Comparison, ReasonCode, Remark, Verdict
from qkattn.verdict.comparing import compare
from qkattn.verdict.rules import baselines
from qkattn.verdict.settling import Length
from qkattn.verdict.trained_arm import TrainedArm

# Factors with their values, in the order of a row.
Context = tuple[tuple[str, str], ...]
SETTING = ('size', 'corpus', 'steps')  # the factors whose values make another setting


class Case(NamedTuple):
    """An arm that an expectation is about, and its reference; None without results."""

    expected: Expectation
    loaded: Findings
    key: ArmKey
    arm: TrainedArm | None  # its comparison is that with `other`
    other: TrainedArm | None
    blocks: tuple[Remark, ...]  # that withhold the verdict

    @property
    def name(self) -> str:
        """The name of its study."""
        return self.loaded.study.directory.name


def decide(claim: Claim, scale: str, results: Results) -> ClaimResult:
    """Decides a claim from the results in a directory and names the missing ones.

    ConfigError if the claim expects an arm that its study does not declare.
    """
    started = time.perf_counter()
    with jax.enable_x64(True):
        checks = claim.checks
        checked = called('claim', claim.name, lambda: [row for check in checks for row in check()])
    decisive = scale != 'smoke'  # whose studies only show that they run
    read = (results.rows(measure, decisive) for measure in claim.measures)
    measured = called('claim', claim.name, lambda: [row for rows in read for row in rows])
    studies = {name: study for name in claim.studies if (study := results.study(name))}
    expected = claim.expected_at(scale)
    trained = [(e, studies[e.study]) for e in expected if e.study in studies]
    every = [case for pair in trained for case in cases(*pair, results)]
    # A row says what its study found, pooled or not, so its parts are of the same study.
    sources = {(id(case.expected), case.name): case for case in every}.values()
    beside = [row for case in sources for row in _beside(case.expected, case.loaded)]
    studies |= {case.name: case.loaded for case in every}
    beside = [row for place, row in enumerate(beside) if row not in beside[:place]]
    names = dict.fromkeys([*claim.studies, *studies])
    problems = {name: problem for name in names if (problem := results.problem(name))}
    missing = [f'study {name} {problem.removesuffix(".")}' for name, problem in problems.items()]
    missing += [
        f'study {case.name}: {case.key.variant} at {case.key.size} on {case.key.corpus} '
        f'has no difference from {case.expected.versus or "the baseline"} yet'
        for case in every
        if not (case.arm and case.arm.comparison)
    ]
    missing += [
        f'study {one.study}: {one.variant} has no control at the same shape, as it is not tuned'
        for one, loaded in trained
        if decisive and one.at == Kind.SAME_SHAPE and not loaded.study.tuned
    ]

    def judged(family: int) -> tuple[list[Row], list[tuple[Row, TrainedArm]], ClaimVerdict]:
        items = list(evidence(every, family))
        rows = [*checked, *(row for row, _ in items), *beside, *measured]
        return rows, items, verdict_on(rows, complete=not missing)

    # All contexts together are one test at the error rate, shared by rows that can make one false;
    # single rows are tested at their share, each expectation whose study has no results as one.
    rows, items, verdict = judged(1)
    if items and verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
        rows_of = Counter(tuple(row.context.items()) for row, _ in items)
        rows, items, verdict = judged(max(rows_of.values()))
    if verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        rows, items, verdict = judged(max(1, len(every) + len(expected) - len(trained)))
    condition: str | None = None
    needs: str | None = None
    if verdict == ClaimVerdict.HOLDS_ONLY_IF:
        condition = condition_of(rows)
        condition = claim.conditions.get(condition, condition)
    elif verdict == ClaimVerdict.UNDECIDED:
        larger = pick(scale, smoke='cpu', cpu='gpu', gpu='gpu')
        needs = f'--scale={larger}: {", ".join(claim.studies)}'
        if problems:
            needs = f'the results of {", ".join(problems)} at scale {scale}'
        elif open_ones := [needed(row, arm) for row, arm in items if row.speaks == Speaks.OPEN]:
            needs = max(open_ones)[1]
    commit, hardware, seconds = _provenance(studies.values())
    return ClaimResult(
        **{field.name: getattr(claim, field.name) for field in fields(Statement)},
        scale=scale,
        verdict=verdict,
        rows=tuple(rows),
        condition=condition,
        needed=needs,
        missing=tuple(dict.fromkeys(missing)),
        studies=tuple(studies),
        commit=commit,
        hardware=hardware,
        seconds=round(seconds + time.perf_counter() - started, 1),
        models=tuple(text for pair in studies.items() for text in _models(*pair)),
    )


def finding(
    row: Row, relation: str, verdict: Verdict, comparison: Comparison
) -> tuple[str, Speaks]:
    """The decision or one-sided finding on the arm of a row, and whether it supports the claim.

    A one-sided finding decides the relation of an undecided arm. It is tested at the arm's share of
    the error rate, that of its look over the comparisons (Bonferroni), and the mean of the
    validation split has to lie on the same side of the margin. A false one needs a difference
    beyond the margin, where equivalence would be false too: its error rate is that of the verdicts.
    """
    decision = verdict.decision
    difference = comparison.difference
    diverged = any(reason.code is ReasonCode.DIVERGED for reason in verdict.reasons)
    if relation == AS_REPORTED:
        withheld = diverged or decision is Decision.NO_VERDICT
        return decision.value, Speaks.OPEN if withheld else _as_reported(row, comparison)
    decisive = dict.fromkeys(RELATIONS[relation][0], Speaks.FOR)
    decisive |= dict.fromkeys(RELATIONS[relation][1], Speaks.AGAINST)
    if decision is Decision.UNDECIDED and not diverged:
        for side, p, sign in (
            (NOT_BETTER, difference.p_not_better, -1),
            (NOT_WORSE, difference.p_not_worse, 1),
        ):
            alpha = level(verdict.look) / max(1, verdict.num_comparisons)
            shown = p is not None and p <= alpha
            if side in decisive and shown and sign * comparison.validation < difference.margin:
                return side, decisive[side]
    return decision.value, decisive.get(decision, Speaks.OPEN)


def _as_reported(row: Row, comparison: Comparison) -> Speaks:
    """Whether the interval of a row lies within or outside the reported range.

    Open where the mean of the validation split lies on the other side of a reported bound.
    """
    if None in (row.low, row.high, row.expected, row.tolerance):
        return Speaks.OPEN
    low = row.expected - row.tolerance
    high = row.expected + row.tolerance
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
            context = tuple(row.context.items()) or (('part', 'checks'),)
            spoken.setdefault(context, set()).add(row.speaks)
    order = (Speaks.AGAINST, Speaks.OPEN, Speaks.FOR)
    return {context: next(s for s in order if s in each) for context, each in spoken.items()}


def verdict_on(rows: Iterable[Row], complete: bool = True) -> ClaimVerdict:
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
    settings.discard((None,) * len(SETTING))  # of checks
    enough = len(settings) > 1 or all(row.kind == Kind.EXACT for row in rows)
    if spoken == {Speaks.FOR}:
        return ClaimVerdict.HOLDS if enough else ClaimVerdict.HOLDS_HERE
    return ClaimVerdict.FAILS if enough else ClaimVerdict.FAILS_HERE


def condition_of(rows: Iterable[Row]) -> str:
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


def cases(expected: Expectation, loaded: Findings, results: Results) -> Iterator[Case]:
    """One for each size and corpus that decide an expectation once its study is finished.

    Each is of the last study of `results` that repeats the question of its arm, else of `loaded`.
    What a baseline lacks, such as its yardstick, also withholds the verdicts on pairs of the arms
    beside it. ConfigError if the study does not declare the arm.
    """
    study = loaded.study
    if not study.tuned and expected.at == Kind.SAME_SHAPE:
        return  # a study without tuning has no controls
    # Without a match, variants are at the baseline's shape.
    is_control = expected.at == Kind.SAME_SHAPE and study.match is not None
    keys = [key for key in study.arms if key.control == (SAME_SHAPE if is_control else None)]
    for variant in expected.variants:
        if not any(loaded.study.is_variant(key.variant, variant) for key in keys):
            variants = dict.fromkeys(key.variant for key in keys)
            raise ConfigError(
                f'study {expected.study!r} has no {expected.at} arm of variant {variant!r}; it has '
                f'{", ".join(variants) or "none"}'
            )
    keys = [key for key in keys if loaded.study.is_variant(key.variant, expected.variant)]
    keys.sort(key=lambda key: (study.sizes.index(key.size), study.corpora.index(key.corpus)))
    for key in keys:
        yield _case(expected, *_last(key, loaded, expected, results))


def _last(
    key: ArmKey, loaded: Findings, expected: Expectation, results: Results
) -> tuple[Findings, ArmKey]:
    """The last repeat of a study with an arm, and with what it is compared with; its key there."""
    question = loaded.study.question_of(key)
    for name in results.newest_first(expected.study):
        if name == expected.study or (repeat := results.study(name)) is None:
            continue
        arms = {repeat.study.question_of(one): one for one in repeat.study.arms}
        variants = {one.variant for one in repeat.study.arms}
        has_other = not expected.versus or any(
            repeat.study.is_variant(variant, expected.versus) for variant in variants
        )
        if question in arms and has_other:
            return repeat, arms[question]
    return loaded, key


def _case(expected: Expectation, loaded: Findings, key: ArmKey) -> Case:
    study = loaded.study
    arms = {arm.key: arm for arm in loaded.every_arm}
    arm = arms.get(key)
    blocks = loaded.blocks
    other = arms.get(arm.group) if arm else None
    if arm and expected.versus:
        blocks += other.blocks if other else ()
        named = (o for o in arms.values() if loaded.study.is_variant(o.variant, expected.versus))
        other = next((o for o in named if o.key._replace(variant=key.variant) == key), None)
        arm = replace(arm, comparison=compare(arm, other, study.margin) if other else None)
    return Case(expected, loaded, key, arm, other, blocks)


def evidence(every: Iterable[Case], family: int = 1) -> Iterator[tuple[Row, TrainedArm]]:
    """A row for each case that has results, and its arm with the verdict among `family` ones."""
    for expected, loaded, _, arm, other, blocks in every:
        if arm is None or arm.comparison is None:
            continue
        study = loaded.study
        # Without matching, neither at the same shape nor at equal parameter count.
        is_at_shape = study.match is None and expected.at != Kind.SAME_SHAPE
        kind = Kind.MEASURED if is_at_shape else Kind(expected.at)
        verdict = judging.pair(study, arm, other, blocks, family)
        row = _row(arm, arm.comparison, kind, expected, loaded)
        decision, speaks = finding(row, expected.relation, verdict, arm.comparison)
        row = replace(row, relation=expected.relation, decision=decision, speaks=speaks)
        yield row, replace(arm, verdict=verdict)


def _beside(expected: Expectation, loaded: Findings) -> Iterator[Row]:
    """The other parts of the difference, which has three; of a pair, all of both."""
    study = loaded.study
    for arm in loaded.arms:
        if not any(loaded.study.is_variant(arm.variant, variant) for variant in expected.variants):
            continue
        shown = expected
        if expected.versus:
            shown = Expectation(expected.study, study.bare(arm.variant), expected.relation)
        comparisons = {
            Kind.SAME_SHAPE: arm.parts.same_shape,
            Kind.REINVESTED: arm.parts.reinvesting,
            Kind.MATCHED: arm.comparison if study.match is not None else None,
        }
        for kind, comparison in comparisons.items():
            if comparison and (expected.versus or kind != expected.at):
                yield _row(arm, comparison, kind, shown, loaded)


def _row(
    arm: TrainedArm, comparison: Comparison, kind: Kind, expected: Expectation, loaded: Findings
) -> Row:
    reported: dict[str, float] = {}
    if expected.reported:
        low, high = expected.reported
        reported = {'expected': (low + high) / 2, 'tolerance': (high - low) / 2}
    return difference_row(
        expected.label or ' - '.join(expected.variants),
        kind,
        context_of(loaded, arm) | dict(expected.context),
        comparison.difference,
        study=loaded.study.directory.name,
        **reported,
        **_state(arm, comparison, loaded),
    )


def _state(arm: TrainedArm, comparison: Comparison, loaded: Findings) -> dict[str, Any]:
    """How well the models behind a difference are trained, and whether it is settled."""
    state: dict[str, Any] = {
        'tokens': arm.example.num_tokens,
        'length': Length.ONE_LENGTH.value,
    }
    if comparison is not arm.comparison:  # a part of the arm's difference
        return state
    state |= {'loss': arm.loss.mean if arm.loss else None, 'is_short': bool(arm.shortfalls)}
    state['yardstick'] = yardstick_text(loaded, arm)
    if arm.settling and arm.settling.short == comparison.difference.mean:
        state['length'] = length(arm.settling)
    return state


def yardstick_text(loaded: Findings, arm: TrainedArm) -> str | None:
    """What the baseline of an arm has to beat: '5-gram 1.457', 'IBM model 1: BLEU 16.5'."""
    yardstick = (loaded.study.yardsticks or {}).get(arm.group)
    if yardstick is None:
        return None
    if (word_by_word := yardstick.bleu.get(arm.split)) is not None:
        return f'IBM model 1: BLEU {word_by_word:.1f}'
    best = yardstick.best(arm.split)
    return f'{best[0]} {best[1]:.3f}' if best else None


def needed(row: Row, arm: TrainedArm) -> tuple[float, str]:
    """What would decide an arm, in short before the first comma; behind a number to sort by.

    The seeds tell the measured difference, at the errors measured, with probability 0.8 from the
    bound on which the relation turns: the margin, on the nearer side where both sides count.
    """
    trial = arm.example
    verdict = arm.verdict
    difference = arm.difference
    where = (
        f'{row.quantity} at {arm.size} on {arm.corpus}, {trial.parameters["total"]:,} '
        f'parameters and {trial.num_tokens:,} tokens a run'
    )
    if verdict.decision is Decision.NO_VERDICT:
        why = reasons(arm) or 'not tuned'
        return math.inf, f'runs that qualify for a verdict, of {where}: {why}'
    # More seeds do not make up for these.
    codes = {reason.code for reason in verdict.reasons}
    if ReasonCode.DIVERGED in codes:
        return math.inf, f'trials that do not diverge, of {where}'
    if ReasonCode.SPLITS_DISAGREE in codes:
        return math.inf, f'a validation split that agrees, of {where}'
    sides = {'better': -1, 'not_better': -1, 'worse': 1, 'not_worse': 1}
    side = sides.get(row.relation or '', math.copysign(1, difference.mean))
    bound = side * difference.margin
    if row.relation == AS_REPORTED:
        ends = row.expected - row.tolerance, row.expected + row.tolerance
        bound = min(ends, key=lambda end: abs(end - difference.mean))
    about = f'to tell a difference of {difference.mean:+.2g} from {bound:+g} nats/token in {where}'
    if difference.sd is None:
        return math.inf, f'more seeds than {difference.n}, {about}'
    if row.relation == AS_REPORTED:
        alpha = 1 - LEVEL  # what was reported is compared with an interval
    else:
        # Tests at a bound are one-sided. Further seeds are those of a repeat, another look.
        alpha = 2 * level(verdict.look + 1) / max(1, verdict.num_comparisons)
    hidden = difference.tuning_high if bound > difference.mean else difference.tuning_low
    sweep = f'a finer sweep (this one may miss {hidden:.2g} nats/token)'
    if (more := to_find(difference, bound - difference.mean, alpha)) is None:
        return 1e9, f'{sweep}, {about}'
    seeds, documents = more
    held_out = f' and {documents:.2g} times as many held-out documents' if documents > 1 else ''
    # Where tuning takes most of the distance, a sweep is the cheaper way.
    fewer = f', or fewer after {sweep}' if hidden > abs(bound - difference.mean) / 2 else ''
    return seeds, f'{seeds:,} seeds in place of {difference.n}{held_out}{fewer}, {about}'


def _models(name: str, loaded: Findings) -> Iterator[str]:
    """The baselines of a study: their size, training and loss, and what they have to beat."""
    for arm in baselines(loaded.study, loaded.every_arm):
        trial = arm.example
        loss = arm.loss
        text = (
            f'{name}, {arm.size} on {arm.corpus}: {trial.parameters["total"]:,} parameters, '
            f'{trial.num_steps:,} steps, {trial.num_tokens:,} tokens'
        )
        text += f', {SPLITS[arm.split]} loss {loss.mean:.3f}' if loss else ''
        if yardstick := yardstick_text(loaded, arm):
            text += f' ({yardstick})'
        yield text + ('' if arm.bleu is None else f', BLEU {arm.bleu:.1f}')


def _provenance(studies: Iterable[Findings]) -> tuple[str, str, float]:
    """Commits and hardware of what was trained, else of this process; seconds of training."""
    trials = [run.trials[0] for loaded in studies for run in loaded.study.runs if run.trials]
    starts = [trial.provenance for trial in trials] or [describe_start()]
    commits = {(dict(flat(start)).get('git.commit') or NOT_RECORDED)[:12] for start in starts}
    seconds = sum(trial.train_seconds or 0.0 for trial in trials)
    return ', '.join(sorted(commits)), ', '.join(sorted(set(map(device, starts)))), seconds

"""Decides a claim from its checks and from the studies of a directory.

The checks and studies give rows of evidence; from these follow the truth of the claim in each
context and its verdict (`verdicts`), and what an undecided claim needs (`needs`).

A claim is one family. "True in every context" and "false in every context" are shown if every row
rejects at the error rate, without correction: the null hypothesis is a union, that of some context,
so the test of their intersection errs at most at that rate (Berger 1982, Technometrics 24:295).
Rows of one context, any of which makes it false, share the rate for "false".
"True here, false there" selects rows, so each is tested at the error rate over their number.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax

from experiments.claims.claim import (
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
from experiments.claims.needs import needed
from experiments.claims.protocol import pick
from experiments.claims.studies import Results, context_of
from experiments.claims.verdicts import condition_of, finding, verdict_on
from qkattn.config.calls import called
from qkattn.errors import ConfigError
from qkattn.report.prose import NOT_RECORDED, SPLITS, device, length
from qkattn.storage.records import flat
from qkattn.storage.run_directory import describe_start
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.verdict import judging
from qkattn.verdict.codes import Comparison, Remark
from qkattn.verdict.comparing import compare
from qkattn.verdict.findings import Findings
from qkattn.verdict.rules import baselines
from qkattn.verdict.settling import Length
from qkattn.verdict.trained_arm import TrainedArm


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


@dataclass(frozen=True)
class _Outcome:
    """What the evidence of a claim gives where each arm is tested as one of so many."""

    rows: list[Row]  # all rows of the claim
    arms: list[tuple[Row, TrainedArm]]  # the rows about arms, each with its arm and verdict
    verdict: ClaimVerdict


def decide(claim: Claim, scale: str, results: Results) -> ClaimResult:
    """Decides a claim from the results in a directory and names the missing ones.

    The rows of a claim are those of its exact checks, those of the arms that it expects something
    of, other parts of the differences of these arms, and those of its measures.

    ConfigError if the claim expects an arm that its study does not declare, and if a check or a
    measure of the claim raises.
    """
    started = time.perf_counter()
    checked = called('claim', claim.name, lambda: _rows_of_checks(claim))
    measured = called('claim', claim.name, lambda: _rows_of_measures(claim, scale, results))

    trained = _trained(claim, scale, results)
    every_case: list[Case] = []
    for expected, loaded in trained:
        every_case.extend(cases(expected, loaded, results))
    studies = _studies(claim, every_case, results)
    problems: dict[str, str] = {}  # what studies lack, by their names
    for name in dict.fromkeys([*claim.studies, *studies]):
        problem = results.problem(name)
        if problem is not None:
            problems[name] = problem
    missing = _missing(problems, every_case, trained, scale)

    outcome = _tested(
        every_case,
        num_untrained=len(claim.expected_at(scale)) - len(trained),
        checked=checked,
        others=[*_rows_beside(every_case), *measured],
        complete=not missing,
    )
    condition: str | None = None
    needs: str | None = None
    if outcome.verdict == ClaimVerdict.HOLDS_ONLY_IF:
        contexts = condition_of(outcome.rows)
        condition = claim.conditions.get(contexts, contexts)
    elif outcome.verdict == ClaimVerdict.UNDECIDED:
        needs = _needs(claim, scale, problems, outcome.arms)

    statement = {field.name: getattr(claim, field.name) for field in fields(Statement)}
    commit, hardware, seconds = _provenance(studies.values())
    models = [text for name, loaded in studies.items() for text in _models(name, loaded)]
    return ClaimResult(
        **statement,
        scale=scale,
        verdict=outcome.verdict,
        rows=tuple(outcome.rows),
        condition=condition,
        needed=needs,
        missing=tuple(missing),
        studies=tuple(studies),
        commit=commit,
        hardware=hardware,
        seconds=round(seconds + time.perf_counter() - started, 1),
        models=tuple(models),
    )


def _rows_of_checks(claim: Claim) -> list[Row]:
    """The rows of the exact checks of a claim, computed in float64."""
    rows: list[Row] = []
    with jax.enable_x64(True):
        for check in claim.checks:
            rows.extend(check())
    return rows


def _rows_of_measures(claim: Claim, scale: str, results: Results) -> list[Row]:
    """The rows that a claim measures on its studies; at scale smoke they decide nothing."""
    rows: list[Row] = []
    for measure in claim.measures:
        rows.extend(results.rows(measure, decisive=scale != 'smoke'))
    return rows


def _trained(claim: Claim, scale: str, results: Results) -> list[tuple[Expectation, Findings]]:
    """The expectations of a claim whose study has results, with the study."""
    trained = []
    for expected in claim.expected_at(scale):
        loaded = results.study(expected.study)
        if loaded is not None:
            trained.append((expected, loaded))
    return trained


def _studies(claim: Claim, every_case: Iterable[Case], results: Results) -> dict[str, Findings]:
    """The studies with results that decide a claim, by their names.

    First those that the claim names, then the repeats that decide in place of them.
    """
    studies: dict[str, Findings] = {}
    for name in claim.studies:
        loaded = results.study(name)
        if loaded is not None:
            studies[name] = loaded
    for case in every_case:
        studies[case.name] = case.loaded
    return studies


def _missing(
    problems: Mapping[str, str],
    every_case: Iterable[Case],
    trained: Iterable[tuple[Expectation, Findings]],
    scale: str,
) -> list[str]:
    """What a claim lacks, a sentence each: results of studies, of arms, and controls.

    `problems` are what studies lack, by their names.
    """
    missing = [f'study {name} {problem.removesuffix(".")}' for name, problem in problems.items()]
    for case in every_case:
        if case.arm is None or case.arm.comparison is None:
            missing.append(
                f'study {case.name}: {case.key.variant} at {case.key.size} on {case.key.corpus} '
                f'has no difference from {case.expected.versus or "the baseline"} yet'
            )
    for expected, loaded in trained:
        # No study is tuned at scale smoke.
        if scale != 'smoke' and expected.at == Kind.SAME_SHAPE and not loaded.study.tuned:
            missing.append(
                f'study {expected.study}: {expected.variant} has no control at the same shape, as '
                'it is not tuned'
            )
    return list(dict.fromkeys(missing))


def _tested(
    every_case: Sequence[Case],
    *,
    num_untrained: int,
    checked: Sequence[Row],
    others: Sequence[Row],
    complete: bool,
) -> _Outcome:
    """The rows of a claim and its verdict, each arm tested at the error rate of that verdict.

    Args:
      every_case: the arms that have a row each.
      num_untrained: the number of expectations whose study has no results.
      checked: the rows of exact checks, which stand before those of arms.
      others: the rows that stand behind those of arms.
      complete: whether no results are missing.
    """

    def outcome_in(family: int) -> _Outcome:
        """The outcome where each arm is tested at the error rate divided by `family`."""
        arms = list(evidence(every_case, family))
        rows = [*checked, *(row for row, _ in arms), *others]
        return _Outcome(rows, arms, verdict_on(rows, complete))

    # "True (false) in every context" is one test at the error rate, all rows together.
    outcome = outcome_in(1)
    if outcome.arms and outcome.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
        # Any row of a context makes it false, so that the rows of a context share the rate.
        num_rows = Counter(tuple(row.context.items()) for row, _ in outcome.arms)
        outcome = outcome_in(max(num_rows.values()))
    if outcome.verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        # Single rows are told apart, so that all of them share the rate; an expectation without
        # results counts as one.
        outcome = outcome_in(max(1, len(every_case) + num_untrained))
    return outcome


def _needs(
    claim: Claim, scale: str, problems: Iterable[str], arms: Iterable[tuple[Row, TrainedArm]]
) -> str:
    """What an undecided claim needs: missing results, else what its open arms need at most.

    `problems` are the names of studies that lack results.
    """
    lacking = ', '.join(problems)
    if lacking:
        return f'the results of {lacking} at scale {scale}'
    needs_of_arms = [needed(row, arm) for row, arm in arms if row.speaks == Speaks.OPEN]
    if needs_of_arms:
        return max(needs_of_arms).text
    larger_scale = pick(scale, smoke='cpu', cpu='gpu', gpu='gpu')
    return f'--scale={larger_scale}: {", ".join(claim.studies)}'


def cases(expected: Expectation, loaded: Findings, results: Results) -> Iterator[Case]:
    """One for each size and corpus that decide an expectation once its study is finished.

    Each is of the last study of `results` that repeats the question of its arm, else of `loaded`.
    What a baseline lacks, such as its yardstick, also withholds the verdicts on pairs of the arms
    beside it. ConfigError if the study does not declare the arm.
    """
    study = loaded.study
    if expected.at == Kind.SAME_SHAPE and not study.tuned:
        return  # a study without tuning has no controls
    # Without a match, the primary arms themselves are at the baseline's shape.
    is_control = expected.at == Kind.SAME_SHAPE and study.match is not None
    control = SAME_SHAPE if is_control else None
    keys = [key for key in study.arms if key.control == control]
    for variant in expected.variants:
        if not any(loaded.study.is_variant(key.variant, variant) for key in keys):
            declared = ', '.join(dict.fromkeys(key.variant for key in keys))
            raise ConfigError(
                f'study {expected.study!r} has no {expected.at} arm of variant {variant!r}; it has '
                f'{declared or "none"}'
            )
    keys = [key for key in keys if loaded.study.is_variant(key.variant, expected.variant)]
    keys.sort(key=lambda key: (study.sizes.index(key.size), study.corpora.index(key.corpus)))
    for key in keys:
        deciding, key_there = _last_repeat(key, loaded, expected, results)
        yield _case(expected, deciding, key_there)


def _last_repeat(
    key: ArmKey, loaded: Findings, expected: Expectation, results: Results
) -> tuple[Findings, ArmKey]:
    """The last repeat of a study that has an arm of it, and the key of the arm there.

    The repeat has to have the variant that the arm is compared with, too. Without such a repeat,
    the study itself and the key as it is.
    """
    question = loaded.study.question_of(key)
    for name in results.newest_first(expected.study):
        repeat = results.study(name)
        if name == expected.study or repeat is None:
            continue
        keys_by_question = {repeat.study.question_of(other): other for other in repeat.study.arms}
        has_reference = expected.versus is None or any(
            repeat.study.is_variant(other.variant, expected.versus) for other in repeat.study.arms
        )
        if question in keys_by_question and has_reference:
            return repeat, keys_by_question[question]
    return loaded, key


def _case(expected: Expectation, loaded: Findings, key: ArmKey) -> Case:
    """The case of an arm in a study: compared with its baseline, or with `expected.versus`."""
    study = loaded.study
    arms = {arm.key: arm for arm in loaded.every_arm}
    arm = arms.get(key)
    if arm is None:
        return Case(expected, loaded, key, None, None, loaded.blocks)
    baseline = arms.get(arm.group)
    if expected.versus is None:
        return Case(expected, loaded, key, arm, baseline, loaded.blocks)
    reference = None
    for other in arms.values():
        # The other variant at the same size, on the same corpus and as the same control.
        is_alike = other.key._replace(variant=key.variant) == key
        if is_alike and loaded.study.is_variant(other.variant, expected.versus):
            reference = other
            break
    comparison = compare(arm, reference, study.margin) if reference else None
    blocks = loaded.blocks + (baseline.blocks if baseline else ())
    return Case(expected, loaded, key, replace(arm, comparison=comparison), reference, blocks)


def evidence(every_case: Iterable[Case], family: int = 1) -> Iterator[tuple[Row, TrainedArm]]:
    """A row for each case that has results, and its arm with the verdict among `family` ones."""
    for case in every_case:
        arm = case.arm
        if arm is None or arm.comparison is None:
            continue
        expected = case.expected
        study = case.loaded.study
        verdict = judging.pair(study, arm, case.other, case.blocks, family)
        # Without matching, an arm is neither removed nor at equal parameter count.
        is_unmatched = study.match is None and expected.at != Kind.SAME_SHAPE
        kind = Kind.MEASURED if is_unmatched else Kind(expected.at)
        row = _row(arm, arm.comparison, kind, expected, case.loaded)
        decision, speaks = finding(row, expected.relation, verdict, arm.comparison)
        row = replace(row, relation=expected.relation, decision=decision, speaks=speaks)
        yield row, replace(arm, verdict=verdict)


def _rows_beside(every_case: Iterable[Case]) -> list[Row]:
    """The rows that decide nothing: the other parts of each difference, each row once.

    A row says what its study found, pooled or not. So where a repeat decides a part of the cases of
    an expectation, the parts of a difference are all of the same study.
    """
    rows: list[Row] = []
    sources: set[tuple[int, str]] = set()
    for case in every_case:
        source = (id(case.expected), case.name)
        if source in sources:
            continue
        sources.add(source)
        for row in _other_parts(case.expected, case.loaded):
            if row not in rows:
                rows.append(row)
    return rows


def _other_parts(expected: Expectation, loaded: Findings) -> Iterator[Row]:
    """The parts of the difference of an arm from the baseline, but for the one that is expected.

    The parts are removed, reinvested and matched. Of a pair of variants, all parts of both.
    """
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
    """The row of a difference of an arm: itself, or a part of it."""
    fields_of_row: dict[str, Any] = {
        'study': loaded.study.directory.name,
        'tokens': arm.example.num_tokens,
        'length': Length.ONE_LENGTH.value,
    }
    if expected.reported:
        low, high = expected.reported
        fields_of_row['expected'] = (low + high) / 2
        fields_of_row['tolerance'] = (high - low) / 2
    if comparison is arm.comparison:
        # Of the arm itself: how well its models are trained, and whether its difference is settled.
        fields_of_row['loss'] = arm.loss.mean if arm.loss else None
        fields_of_row['is_short'] = bool(arm.shortfalls)
        fields_of_row['yardstick'] = yardstick_text(loaded, arm)
        if arm.settling and arm.settling.short == comparison.difference.mean:
            fields_of_row['length'] = length(arm.settling)
    return difference_row(
        expected.label or ' - '.join(expected.variants),
        kind,
        context_of(loaded, arm) | dict(expected.context),
        comparison.difference,
        **fields_of_row,
    )


def yardstick_text(loaded: Findings, arm: TrainedArm) -> str | None:
    """What the baseline of an arm has to beat: '5-gram 1.457', 'IBM model 1: BLEU 16.5'."""
    yardstick = (loaded.study.yardsticks or {}).get(arm.group)
    if yardstick is None:
        return None
    bleu = yardstick.bleu.get(arm.split)
    if bleu is not None:
        return f'IBM model 1: BLEU {bleu:.1f}'
    best = yardstick.best(arm.split)
    if best is None:
        return None
    name, loss = best
    return f'{name} {loss:.3f}'


def _models(study_name: str, loaded: Findings) -> Iterator[str]:
    """A text for each baseline of a study: its size, training and loss, and what it has to beat.

    'lm, d_model=96 on stdlib: 297,632 parameters, 2,000 steps, 4,096,000 tokens, test loss 1.272
    (5-gram 1.457)'
    """
    study = loaded.study
    for arm in baselines(study, loaded.every_arm):
        trial = arm.example
        text = (
            f'{study_name}, {arm.size} on {arm.corpus}: {trial.parameters["total"]:,} parameters, '
            f'{trial.num_steps:,} steps, {trial.num_tokens:,} tokens'
        )
        if arm.loss:
            text += f', {SPLITS[arm.split]} loss {arm.loss.mean:.3f}'
        yardstick = yardstick_text(loaded, arm)
        if yardstick:
            text += f' ({yardstick})'
        if arm.bleu is not None:
            text += f', BLEU {arm.bleu:.1f}'
        yield text


def _provenance(studies: Iterable[Findings]) -> tuple[str, str, float]:
    """Commits and hardware of what was trained, else of this process; seconds of training."""
    trials = [run.trials[0] for loaded in studies for run in loaded.study.runs if run.trials]
    starts = [trial.provenance for trial in trials] or [describe_start()]
    commits = set()
    devices = set()
    for start in starts:
        commit = dict(flat(start)).get('git.commit') or NOT_RECORDED
        commits.add(commit[:12])
        devices.add(device(start))
    seconds = sum(trial.train_seconds or 0.0 for trial in trials)
    return ', '.join(sorted(commits)), ', '.join(sorted(devices)), seconds

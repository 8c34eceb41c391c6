"""Decides a claim from its checks and from the studies of a directory.

Checks and studies give rows of evidence. From the rows follow the truth of the claim in each
context and its verdict (`verdicts`), and what an undecided claim needs (`needs`).

Error rates. All rows of a claim together err with probability at most ALPHA:

- "True in every context" is shown if every row rejects at ALPHA, without a correction. The null
  hypothesis is that the claim is false in some context, so requiring all rejections errs with
  probability ALPHA at most (intersection-union test, Berger 1982, Technometrics 24:295).
- "False in every context" is shown in the same way. Any row of a context can make it false, so the
  rows of one context share ALPHA.
- "True here, false there" selects rows, so all rows share ALPHA.
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
from experiments.claims.verdicts import condition_of, decide_relation, verdict_on
from qkattn.config.calls import call_with_config_errors
from qkattn.errors import ConfigError
from qkattn.report.prose import NOT_RECORDED, SPLITS, device, length_words
from qkattn.storage.records import flat
from qkattn.storage.run_directory import describe_start
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.verdict import judging
from qkattn.verdict.codes import Comparison, Remark
from qkattn.verdict.comparing import compare
from qkattn.verdict.findings import Findings
from qkattn.verdict.rules import baselines
from qkattn.verdict.runs import Trial
from qkattn.verdict.settling import Length
from qkattn.verdict.trained_arm import TrainedArm


class Case(NamedTuple):
    """An arm that an expectation is about, and the arm that it is compared with."""

    expected: Expectation
    findings: Findings  # the study of both arms
    key: ArmKey
    arm: TrainedArm | None  # with its comparison with `other`; None without results
    other: TrainedArm | None  # None without results
    blocks: tuple[Remark, ...]  # the remarks that withhold the verdict

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.findings.study.directory.name


@dataclass(frozen=True)
class _Outcome:
    """The rows and the verdict of a claim, after all arms were tested at the same error rate."""

    rows: list[Row]  # all rows of the claim
    arms: list[tuple[Row, TrainedArm]]  # the rows about arms, each with its arm and verdict
    verdict: ClaimVerdict


def decide(claim: Claim, scale: str, results: Results) -> ClaimResult:
    """Decides a claim from the results in a directory, and names missing results.

    The rows of a claim come from its exact checks, from the arms of its expectations, from the
    other parts of these arms' differences, and from its measures.

    Raises ConfigError if the claim expects an arm that its study does not declare, or if a check or
    a measure of the claim raises.
    """
    started = time.perf_counter()
    checked = call_with_config_errors('claim', claim.name, lambda: _rows_of_checks(claim))
    measured = call_with_config_errors(
        'claim', claim.name, lambda: _rows_of_measures(claim, scale, results)
    )

    trained = _expectations_with_results(claim, scale, results)
    every_case: list[Case] = []
    for expected, findings in trained:
        every_case.extend(cases(expected, findings, results))
    studies = _studies(claim, every_case, results)
    problems: dict[str, str] = {}  # what studies lack, by their names
    for name in dict.fromkeys([*claim.studies, *studies]):
        problem = results.problem(name)
        if problem is not None:
            problems[name] = problem
    missing = _missing(problems, every_case, trained, scale)

    outcome = _outcome(
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
    models = [text for name, findings in studies.items() for text in _models(name, findings)]
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
    """Computes the rows of a claim's exact checks, in float64."""
    rows: list[Row] = []
    with jax.enable_x64(True):
        for check in claim.checks:
            for row in check():
                if not isinstance(row, Row):
                    raise ConfigError(f'a check of claim {claim.name} gives {row!r:.80}, not a Row')
                rows.append(row)
    return rows


def _rows_of_measures(claim: Claim, scale: str, results: Results) -> list[Row]:
    """Computes the rows of a claim's measures. At scale smoke they decide nothing."""
    rows: list[Row] = []
    for measure in claim.measures:
        rows.extend(results.rows(measure, decisive=scale != 'smoke'))
    return rows


def _expectations_with_results(
    claim: Claim, scale: str, results: Results
) -> list[tuple[Expectation, Findings]]:
    """Returns the expectations of a claim whose study has results, each with the study."""
    trained = []
    for expected in claim.expected_at(scale):
        findings = results.study(expected.study)
        if findings is not None:
            trained.append((expected, findings))
    return trained


def _studies(claim: Claim, every_case: Iterable[Case], results: Results) -> dict[str, Findings]:
    """Returns the studies with results that decide a claim, by name.

    The studies that the claim names come first, then the repeats that decide in their place.
    """
    studies: dict[str, Findings] = {}
    for name in claim.studies:
        findings = results.study(name)
        if findings is not None:
            studies[name] = findings
    for case in every_case:
        studies[case.name] = case.findings
    return studies


def _missing(
    problems: Mapping[str, str],
    every_case: Iterable[Case],
    trained: Iterable[tuple[Expectation, Findings]],
    scale: str,
) -> list[str]:
    """Returns what a claim lacks, in sentences: results of studies, results of arms, and controls.

    `problems` says what each study lacks, by the name of the study.
    """
    missing = [f'study {name} {problem.removesuffix(".")}' for name, problem in problems.items()]
    for case in every_case:
        if case.arm is None or case.arm.comparison is None:
            missing.append(
                f'study {case.name}: {case.key.variant} at {case.key.size} on {case.key.corpus} '
                f'has no difference from {case.expected.versus or "the baseline"} yet'
            )
    for expected, findings in trained:
        # No study is tuned at scale smoke.
        if scale != 'smoke' and expected.at == Kind.SAME_SHAPE and not findings.study.tuned:
            missing.append(
                f'study {expected.study}: {expected.variant} has no control at the same shape, as '
                'it is not tuned'
            )
    return list(dict.fromkeys(missing))


def _outcome(
    every_case: Sequence[Case],
    *,
    num_untrained: int,
    checked: Sequence[Row],
    others: Sequence[Row],
    complete: bool,
) -> _Outcome:
    """Tests the arms of a claim; returns its rows and its verdict.

    How strict the tests have to be depends on the verdict (see the docstring of this module), and
    the verdict depends on the tests. So the arms are tested without a correction first, and again
    if the verdict asks for stricter tests.

    Args:
      every_case: the arms, with a row each.
      num_untrained: the number of expectations whose study has no results.
      checked: the rows of exact checks, which come before the rows of arms.
      others: the rows that come after the rows of arms.
      complete: whether no results are missing.
    """

    def test_arms(num_sharing: int) -> _Outcome:
        """Tests each arm at the error rate ALPHA / num_sharing."""
        arms = list(judge_cases(every_case, num_sharing))
        rows_of_arms = [row for row, _ in arms]
        rows = [*checked, *rows_of_arms, *others]
        return _Outcome(rows, arms, verdict_on(rows, complete))

    # "True in every context" needs no correction.
    outcome = test_arms(num_sharing=1)
    if outcome.arms and outcome.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
        # The claim is false in a context if any row of it is false, so these rows share the rate.
        num_rows = Counter(tuple(row.context.items()) for row, _ in outcome.arms)
        outcome = test_arms(num_sharing=max(num_rows.values()))
    if outcome.verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        # The verdict is about single rows, so all rows share the rate. An expectation without
        # results counts as one row.
        outcome = test_arms(num_sharing=max(1, len(every_case) + num_untrained))
    return outcome


def _needs(
    claim: Claim, scale: str, problems: Iterable[str], arms: Iterable[tuple[Row, TrainedArm]]
) -> str:
    """Returns what an undecided claim needs, in words.

    If studies lack results (`problems`), it is these. Otherwise it is the largest need of an arm
    that leaves the claim open, such as '40 seeds in place of 16, to tell ...'.
    """
    names = ', '.join(problems)
    if names:
        return f'the results of {names} at scale {scale}'
    needs_of_arms = [needed(row, arm) for row, arm in arms if row.speaks == Speaks.OPEN]
    if needs_of_arms:
        # Needs are compared by their number of seeds.
        return max(needs_of_arms).text
    larger_scale = pick(scale, smoke='cpu', cpu='gpu', gpu='gpu')
    return f'--scale={larger_scale}: {", ".join(claim.studies)}'


def cases(expected: Expectation, findings: Findings, results: Results) -> Iterator[Case]:
    """Yields the cases that decide an expectation: one for each size and corpus of its study.

    `findings` is the study that the expectation names. If later studies in `results` train an arm
    again with other seeds, the last of them gives its case. Raises ConfigError if the study does
    not declare the arm.
    """
    study = findings.study
    if expected.at == Kind.SAME_SHAPE and not study.tuned:
        # A study without tuning trains no arm at the baseline's shape.
        return
    # An arm at the baseline's shape is a control of an arm that is matched in size. If a study
    # matches no sizes, all its arms are at this shape, and it needs no controls.
    is_control = expected.at == Kind.SAME_SHAPE and study.match is not None
    control = SAME_SHAPE if is_control else None
    keys = [key for key in study.arms if key.control == control]
    for variant in expected.variants:
        if not any(study.is_variant(key.variant, variant) for key in keys):
            declared = ', '.join(dict.fromkeys(key.variant for key in keys))
            raise ConfigError(
                f'study {expected.study!r} has no {expected.at} arm of variant {variant!r}; it has '
                f'{declared or "none"}'
            )

    keys = [key for key in keys if study.is_variant(key.variant, expected.variant)]
    keys.sort(key=lambda key: (study.sizes.index(key.size), study.corpora.index(key.corpus)))
    for key in keys:
        deciding, key_there = _last_repeat(key, findings, expected, results)
        yield _case(expected, deciding, key_there)


def _last_repeat(
    key: ArmKey, findings: Findings, expected: Expectation, results: Results
) -> tuple[Findings, ArmKey]:
    """Finds the newest study that trains an arm again with other seeds; returns it and the arm.

    Such a study repeats the question of the arm. It also needs the variant `expected.versus` that
    the arm is compared with, if any. Returns the study itself, and its own arm, if no study repeats
    it. Arms are given by their keys.
    """
    question = findings.study.question_of(key)
    for name in results.newest_first(expected.study):
        repeat = results.study(name)
        if name == expected.study or repeat is None:
            continue
        arms = repeat.study.arms
        key_by_question = {repeat.study.question_of(other): other for other in arms}
        has_reference = True
        if expected.versus is not None:
            has_reference = any(
                repeat.study.is_variant(other.variant, expected.versus) for other in arms
            )
        if question in key_by_question and has_reference:
            return repeat, key_by_question[question]
    return findings, key


def _case(expected: Expectation, findings: Findings, key: ArmKey) -> Case:
    """Builds the case of an arm in a study.

    The arm is compared with its baseline, or with the variant `expected.versus` at the same size
    and on the same corpus. The blocks of a case are remarks that withhold its verdict: those on the
    study, and those on the baseline of two variants that are compared.
    """
    study = findings.study
    arms = {arm.key: arm for arm in findings.every_arm}
    arm = arms.get(key)
    if arm is None:
        return Case(expected, findings, key, None, None, findings.blocks)
    baseline = arms.get(arm.baseline_key)
    if expected.versus is None:
        return Case(expected, findings, key, arm, baseline, findings.blocks)
    reference = None
    for other in arms.values():
        # The other variant at the same size, on the same corpus and as the same control.
        is_alike = other.key._replace(variant=key.variant) == key
        if is_alike and findings.study.is_variant(other.variant, expected.versus):
            reference = other
            break
    comparison = compare(arm, reference, study.margin) if reference else None
    blocks = findings.blocks + (baseline.blocks if baseline else ())
    return Case(expected, findings, key, replace(arm, comparison=comparison), reference, blocks)


def judge_cases(
    every_case: Iterable[Case], num_sharing: int = 1
) -> Iterator[tuple[Row, TrainedArm]]:
    """Judges each case that has results; yields its row, and the arm with its verdict.

    `num_sharing` is the number of comparisons that share the error rate ALPHA.
    """
    for case in every_case:
        arm = case.arm
        if arm is None or arm.comparison is None:
            continue
        expected = case.expected
        study = case.findings.study
        verdict = judging.verdict_on_pair(study, arm, case.other, case.blocks, num_sharing)
        # In a study that matches no sizes, the arms do not have equal parameter counts. Their rows
        # may not say so.
        is_unmatched = study.match is None and expected.at != Kind.SAME_SHAPE
        kind = Kind.MEASURED if is_unmatched else Kind(expected.at)
        row = _row_of_difference(arm, arm.comparison, kind, expected, case.findings)
        decision, speaks = decide_relation(row, expected.relation, verdict, arm.comparison)
        row = replace(row, relation=expected.relation, decision=decision, speaks=speaks)
        yield row, replace(arm, verdict=verdict)


def _rows_beside(every_case: Iterable[Case]) -> list[Row]:
    """Returns rows that are shown beside those of the cases, but decide nothing; each row once.

    They are the other parts of the differences that the cases are about.
    """
    rows: list[Row] = []
    # The cases of an expectation have the same rows beside them, if they are from the same study.
    done: set[tuple[int, str]] = set()
    for case in every_case:
        expectation_and_study = (id(case.expected), case.name)
        if expectation_and_study in done:
            continue
        done.add(expectation_and_study)
        for row in _other_parts(case.expected, case.findings):
            if row not in rows:
                rows.append(row)
    return rows


def _other_parts(expected: Expectation, findings: Findings) -> Iterator[Row]:
    """Yields the parts of an arm's difference from the baseline that an expectation is not about.

    The difference at equal parameter count (MATCHED) is the sum of two parts: first, parameters are
    removed (SAME_SHAPE), and then they are spent elsewhere (REINVESTED). If the expectation is
    about MATCHED, this yields the rows of the other two. If it compares two variants with each
    other, it is about none of these, and all three rows of both variants are yielded.
    """
    study = findings.study
    for arm in findings.arms:
        if not any(study.is_variant(arm.variant, variant) for variant in expected.variants):
            continue
        expectation_of_arm = expected
        if expected.versus:
            # The rows compare each variant with the baseline.
            variant = study.bare(arm.variant)
            expectation_of_arm = Expectation(expected.study, variant, expected.relation)
        comparison_by_kind = {
            Kind.SAME_SHAPE: arm.parts.same_shape,
            Kind.REINVESTED: arm.parts.reinvesting,
            Kind.MATCHED: arm.comparison if study.match is not None else None,
        }
        for kind, comparison in comparison_by_kind.items():
            is_expected = kind == expected.at and not expected.versus
            if comparison and not is_expected:
                yield _row_of_difference(arm, comparison, kind, expectation_of_arm, findings)


def _row_of_difference(
    arm: TrainedArm, comparison: Comparison, kind: Kind, expected: Expectation, findings: Findings
) -> Row:
    """Builds the row of an arm's difference from the baseline, or of a part of it.

    Args:
        arm: The arm.
        comparison: The whole difference, which is `arm.comparison`, or a part of it.
        kind: Which of these it is.
        expected: The expectation that the row is shown for.
        findings: The study of the arm.
    """
    fields_of_row: dict[str, Any] = {
        'study': findings.study.directory.name,
        'tokens': arm.example.num_tokens,
        'length': Length.ONE_LENGTH.value,
    }
    if expected.reported:
        # A row holds the range that a source reports as its middle, and half its width.
        low, high = expected.reported
        fields_of_row['expected'] = (low + high) / 2
        fields_of_row['tolerance'] = (high - low) / 2
    if comparison is arm.comparison:
        # Only the whole difference says how well the models are trained and whether it is settled.
        fields_of_row['loss'] = arm.loss.mean if arm.loss else None
        fields_of_row['is_short'] = bool(arm.shortfalls)
        fields_of_row['yardstick'] = yardstick_text(findings, arm)
        # The settling is about the difference from the baseline, and the row perhaps about another.
        if arm.settling and arm.settling.short == comparison.difference.mean:
            fields_of_row['length'] = length_words(arm.settling)
    return difference_row(
        expected.label or ' - '.join(expected.variants),
        kind,
        context_of(findings, arm) | dict(expected.context),
        comparison.difference,
        **fields_of_row,
    )


def yardstick_text(findings: Findings, arm: TrainedArm) -> str | None:
    """Returns what an arm's baseline has to beat: '5-gram 1.457' or 'IBM model 1: BLEU 16.5'.

    Such a yardstick is the loss of the best n-gram model, in nats/token, or the BLEU of a
    translation word by word. Returns None if it was not recorded.
    """
    yardstick = (findings.study.yardsticks or {}).get(arm.baseline_key)
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


def _models(study_name: str, findings: Findings) -> Iterator[str]:
    """Yields a text for each baseline: its size, training and loss, and what it has to beat.

    'lm, d_model=96 on stdlib: 297,632 parameters, 2,000 steps, 4,096,000 tokens, test loss 1.272
    (5-gram 1.457)'
    """
    study = findings.study
    for arm in baselines(study, findings.every_arm):
        trial = arm.example
        text = (
            f'{study_name}, {arm.size} on {arm.corpus}: {trial.parameters["total"]:,} parameters, '
            f'{trial.num_steps:,} steps, {trial.num_tokens:,} tokens'
        )
        if arm.loss:
            text += f', {SPLITS[arm.split]} loss {arm.loss.mean:.3f}'
        yardstick = yardstick_text(findings, arm)
        if yardstick:
            text += f' ({yardstick})'
        if arm.bleu is not None:
            text += f', BLEU {arm.bleu:.1f}'
        yield text


def _provenance(studies: Iterable[Findings]) -> tuple[str, str, float]:
    """Returns the commits and the hardware of all runs, and the seconds of their training.

    Without runs, the commit and the hardware are those of this process.
    """
    # All trials of a run share its start and its seconds, so the first one stands for the run.
    first_trials: list[Trial] = []
    for findings in studies:
        first_trials += [run.trials[0] for run in findings.study.runs if run.trials]
    starts = [trial.provenance for trial in first_trials]
    if not starts:
        starts = [describe_start()]

    commits = set()
    devices = set()
    for start in starts:
        commit = dict(flat(start)).get('git.commit') or NOT_RECORDED
        commits.add(commit[:12])
        devices.add(device(start))
    seconds = sum(trial.train_seconds or 0.0 for trial in first_trials)
    return ', '.join(sorted(commits)), ', '.join(sorted(devices)), seconds

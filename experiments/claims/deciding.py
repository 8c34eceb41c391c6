"""Decides a claim from its checks and from the studies of a directory.

Error rates. Each of three outcomes is wrong with probability at most ALPHA:

- "True in every context" needs every row to reject at ALPHA, without a correction. The null
  hypothesis is that the claim is false in some context (intersection-union test, Berger 1982,
  Technometrics 24:295).
- "False in every context" needs a rejection in every context. Any row of a context can make the
  claim false there, so the rows of a context share ALPHA.
- "True here, false there" selects rows, so all rows share ALPHA.

If a claim is true in one context and false in another, the first two outcomes are both wrong, so
together they may have probability 2 ALPHA.
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
from experiments.claims.verdicts import (
    condition_of,
    decide_relation,
    is_of_one_setting,
    verdict_on,
)
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
    """An arm of an expectation, and the arm to compare it with."""

    expected: Expectation
    findings: Findings  # the study of both arms
    key: ArmKey  # of `arm`
    arm: TrainedArm | None  # compared with `other`; None without results
    other: TrainedArm | None  # None without results
    blocks: tuple[Remark, ...]  # the remarks that withhold the verdict

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.findings.study.directory.name


@dataclass(frozen=True)
class _Outcome:
    """The rows and the verdict of a claim, with all arms tested at one error rate."""

    rows: list[Row]
    arms: list[tuple[Row, TrainedArm]]  # each arm with its row
    verdict: ClaimVerdict


def decide(claim: Claim, scale: str, results: Results) -> ClaimResult:
    """Decides a claim from the results in a directory, and lists missing results.

    Raises:
        ConfigError: An expected arm is not declared in its study, or a check or measure raises.
    """
    started = time.perf_counter()
    # An exception in code of a claim becomes a ConfigError that names the claim.
    checked = call_with_config_errors('claim', claim.name, lambda: _rows_of_checks(claim))
    measured = call_with_config_errors(
        'claim', claim.name, lambda: _rows_of_measures(claim, scale, results)
    )

    trained = _expectations_with_results(claim, scale, results)
    every_case: list[Case] = []
    for expected, findings in trained:
        every_case.extend(cases(expected, findings, results))
    studies = _studies(claim, every_case, results)
    problems: dict[str, str] = {}  # by study, such as 'has no results'
    for name in dict.fromkeys([*claim.studies, *studies]):
        problem = results.problem(name)
        if problem is not None:
            problems[name] = problem
    missing = _missing(problems, every_case, trained, scale)

    outcome = _outcome(
        every_case,
        num_untrained=len(claim.expected_at(scale)) - len(trained),
        first_rows=checked,
        last_rows=[*_rows_beside(every_case), *measured],
        complete=not missing,
    )
    contexts: str | None = None
    condition: str | None = None
    needs: str | None = None
    if outcome.verdict == ClaimVerdict.HOLDS_ONLY_IF:
        contexts = condition_of(outcome.rows)
        condition = claim.conditions.get(contexts, contexts)
    elif outcome.verdict == ClaimVerdict.UNDECIDED:
        needs = _needs(claim, scale, problems, outcome.arms)

    statement_fields = {field.name: getattr(claim, field.name) for field in fields(Statement)}
    commit, hardware, train_seconds = _provenance(studies.values())
    models: list[str] = []
    for name, findings in studies.items():
        models += _models(name, findings)
    return ClaimResult(
        **statement_fields,
        scale=scale,
        verdict=outcome.verdict,
        rows=tuple(outcome.rows),
        condition=condition,
        meaning=_meaning(claim, outcome, contexts),
        needed=needs,
        missing=tuple(missing),
        studies=tuple(studies),
        commit=commit,
        hardware=hardware,
        seconds=round(train_seconds + time.perf_counter() - started, 1),
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
    """Computes the rows of a claim's measures."""
    is_decisive = scale != 'smoke'
    rows: list[Row] = []
    for measure in claim.measures:
        rows.extend(results.rows(measure, decisive=is_decisive))
    return rows


def _expectations_with_results(
    claim: Claim, scale: str, results: Results
) -> list[tuple[Expectation, Findings]]:
    """Returns each expectation whose study has results, with the study."""
    trained = []
    for expected in claim.expected_at(scale):
        findings = results.study(expected.study)
        if findings is not None:
            trained.append((expected, findings))
    return trained


def _studies(claim: Claim, every_case: Iterable[Case], results: Results) -> dict[str, Findings]:
    """Returns the studies with results, by name: first the claim's own, then repeats of them."""
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
    """Returns a sentence for each incomplete study, missing difference and missing control.

    Args:
        problems: What a study lacks, such as 'has no results', by name of the study.
        every_case: The arms.
        trained: The expectations with results, each with its study.
        scale: The scale of the studies.
    """
    missing = [f'study {name} {problem.removesuffix(".")}' for name, problem in problems.items()]
    for case in every_case:
        if case.arm is None or case.arm.comparison is None:
            missing.append(
                f'study {case.name}: {case.key.variant} at {case.key.size} on {case.key.corpus} '
                f'has no difference from {case.expected.versus or "the baseline"} yet'
            )
    for expected, findings in trained:
        if expected.at != Kind.SAME_SHAPE or findings.study.tuned:
            continue
        # At scale smoke, no study is tuned.
        if scale != 'smoke':
            missing.append(
                f'study {expected.study}: {expected.variant} has no control at the same shape, as '
                'it is not tuned'
            )
    distinct_sentences = dict.fromkeys(missing)
    return list(distinct_sentences)


def _outcome(
    every_case: Sequence[Case],
    *,
    num_untrained: int,
    first_rows: Sequence[Row],
    last_rows: Sequence[Row],
    complete: bool,
) -> _Outcome:
    """Tests the arms of a claim; returns its rows and its verdict.

    The arms are first tested without a correction. Some verdicts need a second, stricter test.

    Args:
        every_case: The arms.
        num_untrained: The number of expectations without results, which count as a row each.
        first_rows: Rows to put before those of the arms.
        last_rows: Rows to put after those of the arms.
        complete: Whether no results are missing.
    """

    def test_arms(num_sharing: int) -> _Outcome:
        """Tests each arm at the error rate ALPHA / num_sharing."""
        arms = list(judge_cases(every_case, num_sharing))
        arm_rows = [row for row, _ in arms]
        rows = [*first_rows, *arm_rows, *last_rows]
        return _Outcome(rows, arms, verdict_on(rows, complete))

    outcome = test_arms(num_sharing=1)
    fails = outcome.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE)
    if fails and outcome.arms:
        # A single false row makes the claim false in its context. So rows of a context share ALPHA.
        contexts = [tuple(row.context.items()) for row, _ in outcome.arms]
        num_rows_by_context = Counter(contexts)
        outcome = test_arms(num_sharing=max(num_rows_by_context.values()))
    if outcome.verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        # The verdict is about single rows, so all rows share ALPHA.
        outcome = test_arms(num_sharing=max(1, len(every_case) + num_untrained))
    return outcome


def _meaning(claim: Claim, outcome: _Outcome, contexts: str | None) -> str | None:
    """Returns what the verdict means, if declared: 'in the one setting tried, Q = K costs ...'."""
    meaning = claim.meaning_of(outcome.verdict, contexts)
    is_decided = outcome.verdict != ClaimVerdict.UNDECIDED
    if meaning and is_decided and is_of_one_setting(outcome.rows):
        return f'in the one setting tried, {meaning}'
    return meaning


def _needs(
    claim: Claim,
    scale: str,
    incomplete_studies: Iterable[str],
    arms: Iterable[tuple[Row, TrainedArm]],
) -> str:
    """Returns what an undecided claim needs, such as '40 seeds in place of 16, to tell ...'."""
    names = ', '.join(incomplete_studies)
    if names:
        return f'the results of {names} at scale {scale}'
    needs_of_open_arms = [needed(row, arm) for row, arm in arms if row.speaks == Speaks.OPEN]
    if needs_of_open_arms:
        largest_need = max(needs_of_open_arms)  # the one with the most seeds
        return largest_need.text
    larger_scale = pick(scale, smoke='cpu', cpu='gpu', gpu='gpu')
    return f'--scale={larger_scale}: {", ".join(claim.studies)}'


def cases(expected: Expectation, findings: Findings, results: Results) -> Iterator[Case]:
    """Yields the arms of an expectation, one for each size and corpus.

    If later studies repeat an arm with other seeds, the arm is taken from the newest of them.

    Args:
        expected: The expectation.
        findings: The study that the expectation names.
        results: All studies.

    Raises:
        ConfigError: The study does not declare the arm.
    """
    study = findings.study
    if expected.at == Kind.SAME_SHAPE and not study.tuned:
        # Only tuned studies train controls at the baseline's shape.
        return
    # Without parameter matching, all arms have the baseline's shape. Then none is a control.
    is_control = expected.at == Kind.SAME_SHAPE and study.match is not None
    control = SAME_SHAPE if is_control else None
    declared_keys = [key for key in study.arms if key.control == control]
    for variant in expected.variants:
        # A variant without destination, such as 'qk/no_v', also stands for 'qk/no_v [d_ff]'.
        is_declared = any(study.is_variant(key.variant, variant) for key in declared_keys)
        if not is_declared:
            declared_variants = dict.fromkeys(key.variant for key in declared_keys)
            raise ConfigError(
                f'study {expected.study!r} has no {expected.at} arm of variant {variant!r}; it has '
                f'{", ".join(declared_variants) or "none"}'
            )

    keys = [key for key in declared_keys if study.is_variant(key.variant, expected.variant)]
    # In the order in which the study declares sizes and corpora.
    keys.sort(key=lambda key: (study.sizes.index(key.size), study.corpora.index(key.corpus)))
    for key in keys:
        newest, key_in_newest = _newest_repeat(key, findings, expected, results)
        yield _case(expected, newest, key_in_newest)


def _newest_repeat(
    key: ArmKey, findings: Findings, expected: Expectation, results: Results
) -> tuple[Findings, ArmKey]:
    """Returns the newest study that trains an arm again, and the arm's key in that study.

    The study must also train the variant `expected.versus`, if given. If no study does, `findings`
    and `key` are returned.
    """
    shared_key = findings.study.question_of(key)  # the same in all repeats
    for name in results.newest_first(expected.study):
        repeat = results.study(name)
        if name == expected.study or repeat is None:
            continue
        study = repeat.study
        key_by_shared_key = {study.question_of(own_key): own_key for own_key in study.arms}
        key_in_repeat = key_by_shared_key.get(shared_key)
        has_versus = expected.versus is None or any(
            study.is_variant(own_key.variant, expected.versus) for own_key in study.arms
        )
        if key_in_repeat is not None and has_versus:
            return repeat, key_in_repeat
    return findings, key


def _case(expected: Expectation, findings: Findings, key: ArmKey) -> Case:
    """Compares an arm with its baseline, or with the variant `expected.versus` if given."""
    study = findings.study
    arm_by_key = {arm.key: arm for arm in findings.every_arm}
    arm = arm_by_key.get(key)
    if arm is None:
        return Case(expected, findings, key, arm=None, other=None, blocks=findings.blocks)
    baseline = arm_by_key.get(arm.baseline_key)
    if expected.versus is None:
        return Case(expected, findings, key, arm, other=baseline, blocks=findings.blocks)

    versus_arm = None
    for candidate in arm_by_key.values():
        # A key consists of variant, size, corpus and control.
        differs_at_most_in_variant = candidate.key == key._replace(variant=candidate.variant)
        if differs_at_most_in_variant and study.is_variant(candidate.variant, expected.versus):
            versus_arm = candidate
            break
    comparison = compare(arm, versus_arm, study.margin) if versus_arm else None
    arm = replace(arm, comparison=comparison)
    # What withholds verdicts on the baseline also withholds this one.
    baseline_blocks = baseline.blocks if baseline else ()
    blocks = findings.blocks + baseline_blocks
    return Case(expected, findings, key, arm, other=versus_arm, blocks=blocks)


def judge_cases(
    every_case: Iterable[Case], num_sharing: int = 1
) -> Iterator[tuple[Row, TrainedArm]]:
    """Judges each case that has results; yields its row, and its arm with the verdict.

    `num_sharing` comparisons share the error rate ALPHA.
    """
    for case in every_case:
        arm = case.arm
        if arm is None or arm.comparison is None:
            continue
        expected = case.expected
        study = case.findings.study
        verdict = judging.verdict_on_pair(study, arm, case.other, case.blocks, num_sharing)
        # Without parameter matching, the arms do not have the equal parameter counts of MATCHED.
        is_unmatched = study.match is None and expected.at != Kind.SAME_SHAPE
        kind = Kind.MEASURED if is_unmatched else Kind(expected.at)
        row = _row_of_difference(arm, arm.comparison, kind, expected, case.findings)
        decision, speaks = decide_relation(row, expected.relation, verdict, arm.comparison)
        row = replace(row, relation=expected.relation, decision=decision, speaks=speaks)
        yield row, replace(arm, verdict=verdict)


def _rows_beside(every_case: Iterable[Case]) -> list[Row]:
    """Returns the distinct rows of `_other_parts`, which are shown but decide nothing."""
    rows: list[Row] = []
    # Cases of the same expectation and study have the same rows.
    visited: set[tuple[int, str]] = set()
    for case in every_case:
        expectation_and_study = (id(case.expected), case.name)
        if expectation_and_study in visited:
            continue
        visited.add(expectation_and_study)
        for row in _other_parts(case.expected, case.findings):
            if row not in rows:
                rows.append(row)
    return rows


def _other_parts(expected: Expectation, findings: Findings) -> Iterator[Row]:
    """Yields rows for the parts of a difference from the baseline, except the part `expected.at`.

    MATCHED is the sum of two parts: parameters are removed (SAME_SHAPE), and spent elsewhere
    (REINVESTED). If the expectation compares two variants with each other, all three rows of each
    variant are yielded.
    """
    study = findings.study
    for arm in findings.arms:
        if not any(study.is_variant(arm.variant, variant) for variant in expected.variants):
            continue
        expected_of_arm = expected
        if expected.versus:
            # The rows compare each variant with the baseline.
            variant = study.bare(arm.variant)  # 'qk/no_v [d_ff]' -> 'qk/no_v'
            expected_of_arm = Expectation(expected.study, variant, expected.relation)
        has_equal_counts = study.match is not None
        comparison_by_kind = {
            Kind.SAME_SHAPE: arm.parts.same_shape,
            Kind.REINVESTED: arm.parts.reinvesting,
            Kind.MATCHED: arm.comparison if has_equal_counts else None,
        }
        for kind, comparison in comparison_by_kind.items():
            is_expected = kind == expected.at and not expected.versus
            if comparison and not is_expected:
                yield _row_of_difference(arm, comparison, kind, expected_of_arm, findings)


def _row_of_difference(
    arm: TrainedArm, comparison: Comparison, kind: Kind, expected: Expectation, findings: Findings
) -> Row:
    """Builds the row of an arm's difference from the baseline, or of a part of the difference.

    Args:
        comparison: The difference, which is `arm.comparison`, or one of its parts.
        kind: The kind of the row.
        expected: The expectation that the row is shown for.
        findings: The study of the arm.
    """
    row_fields: dict[str, Any] = {
        'study': findings.study.directory.name,
        'tokens': arm.example.num_tokens,
        'length': Length.ONE_LENGTH.value,
    }
    if expected.reported:
        # A row holds the reported range as middle and half width.
        low, high = expected.reported
        row_fields['expected'] = (low + high) / 2
        row_fields['tolerance'] = (high - low) / 2
    is_whole_difference = comparison is arm.comparison
    if is_whole_difference:
        row_fields['loss'] = arm.loss.mean if arm.loss else None
        row_fields['is_short'] = bool(arm.shortfalls)
        row_fields['yardstick'] = yardstick_text(findings, arm)
        # How longer training changes the difference is known for the baseline only, and not for
        # `expected.versus`.
        settling = arm.settling
        if settling and settling.short == comparison.difference.mean:
            row_fields['length'] = length_words(settling)
    return difference_row(
        expected.label or ' - '.join(expected.variants),
        kind,
        context_of(findings, arm) | dict(expected.context),
        comparison.difference,
        **row_fields,
    )


def yardstick_text(findings: Findings, arm: TrainedArm) -> str | None:
    """Returns what an arm's baseline has to beat: '5-gram 1.457' or 'IBM model 1: BLEU 16.5'.

    Losses are in nats/token. Returns None if no yardstick was recorded.
    """
    yardstick_by_baseline = findings.study.yardsticks or {}
    yardstick = yardstick_by_baseline.get(arm.baseline_key)
    if yardstick is None:
        return None
    bleu = yardstick.bleu.get(arm.split)
    if bleu is not None:
        return f'IBM model 1: BLEU {bleu:.1f}'
    best = yardstick.best(arm.split)
    if best is None:
        return None
    model, loss = best
    return f'{model} {loss:.3f}'


def _models(study_name: str, findings: Findings) -> Iterator[str]:
    """Yields a text for each baseline of a study: its size, training, loss and yardstick.

    For example, 'lm, d_model=96 on stdlib: 297,632 parameters, 2,000 steps, 4,096,000 tokens, test
    loss 1.272 (5-gram 1.457)'.
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
    """Returns the commits and the devices of all runs as text, and their total training seconds.

    Without runs, the commit and the device are those of this process.
    """
    # All trials of a run have the same provenance and training time.
    first_trials: list[Trial] = []
    for findings in studies:
        first_trials += [run.trials[0] for run in findings.study.runs if run.trials]
    provenances = [trial.provenance for trial in first_trials]
    if not provenances:
        provenances = [describe_start()]

    commits = set()
    devices = set()
    for provenance in provenances:
        value_by_name = dict(flat(provenance))  # by names such as 'git.commit'
        commit = value_by_name.get('git.commit')
        commits.add(commit[:12] if commit else NOT_RECORDED)
        devices.add(device(provenance))
    seconds = sum(trial.train_seconds or 0.0 for trial in first_trials)
    return ', '.join(sorted(commits)), ', '.join(sorted(devices)), seconds

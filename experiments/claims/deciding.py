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
from experiments.claims.verdicts import condition_of, finding, verdict_on
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
    loaded: Findings  # the study of both arms
    key: ArmKey
    arm: TrainedArm | None  # with its comparison with `other`; None without results
    other: TrainedArm | None  # None without results
    blocks: tuple[Remark, ...]  # the remarks that withhold the verdict

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.loaded.study.directory.name


@dataclass(frozen=True)
class _Outcome:
    """The rows and the verdict of a claim, with each arm tested in a family of a certain size."""

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


def _trained(claim: Claim, scale: str, results: Results) -> list[tuple[Expectation, Findings]]:
    """Returns the expectations of a claim whose study has results, each with the study."""
    trained = []
    for expected in claim.expected_at(scale):
        loaded = results.study(expected.study)
        if loaded is not None:
            trained.append((expected, loaded))
    return trained


def _studies(claim: Claim, every_case: Iterable[Case], results: Results) -> dict[str, Findings]:
    """Returns the studies with results that decide a claim, by name.

    The studies that the claim names come first, then the repeats that decide in their place.
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
    """Tests the arms of a claim; returns its rows and its verdict.

    The level of the tests depends on the verdict (see the module), so they are repeated at another
    level if the verdict asks for one.

    Args:
      every_case: the arms, with a row each.
      num_untrained: the number of expectations whose study has no results.
      checked: the rows of exact checks, which come before the rows of arms.
      others: the rows that come after the rows of arms.
      complete: whether no results are missing.
    """

    def outcome_in(family: int) -> _Outcome:
        """Tests each arm at the error rate divided by `family`."""
        arms = list(evidence(every_case, family))
        rows_of_arms = [row for row, _ in arms]
        rows = [*checked, *rows_of_arms, *others]
        return _Outcome(rows, arms, verdict_on(rows, complete))

    # "True in every context" needs no correction.
    outcome = outcome_in(1)
    if outcome.arms and outcome.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
        # Any row of a context can make it false, so the rows of a context share the error rate.
        num_rows = Counter(tuple(row.context.items()) for row, _ in outcome.arms)
        outcome = outcome_in(max(num_rows.values()))
    if outcome.verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        # The verdict tells single rows apart, so all rows share the error rate. An expectation
        # without results counts as one row.
        outcome = outcome_in(max(1, len(every_case) + num_untrained))
    return outcome


def _needs(
    claim: Claim, scale: str, problems: Iterable[str], arms: Iterable[tuple[Row, TrainedArm]]
) -> str:
    """Returns what an undecided claim needs: missing results, or the largest need of its open arms.

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
    """Yields the cases that decide an expectation: one for each size and corpus of its study.

    `loaded` is the study that the expectation names. If studies in `results` repeat the question of
    an arm, the case comes from the last of them. Raises ConfigError if the study does not declare
    the arm.
    """
    study = loaded.study
    if expected.at == Kind.SAME_SHAPE and not study.tuned:
        # A study without tuning has no controls.
        return
    # Without a match, the primary arms themselves are at the baseline's shape.
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
        deciding, key_there = _last_repeat(key, loaded, expected, results)
        yield _case(expected, deciding, key_there)


def _last_repeat(
    key: ArmKey, loaded: Findings, expected: Expectation, results: Results
) -> tuple[Findings, ArmKey]:
    """Finds the last repeat of a study that has a certain arm, and the key of the arm there.

    The repeat also needs the variant that the arm is compared with. If there is no such repeat,
    returns the study itself and the key in it.
    """
    question = loaded.study.question_of(key)
    for name in results.newest_first(expected.study):
        repeat = results.study(name)
        if name == expected.study or repeat is None:
            continue
        keys_by_question = {repeat.study.question_of(other): other for other in repeat.study.arms}
        has_reference = True
        if expected.versus is not None:
            has_reference = any(
                repeat.study.is_variant(other.variant, expected.versus)
                for other in repeat.study.arms
            )
        if question in keys_by_question and has_reference:
            return repeat, keys_by_question[question]
    return loaded, key


def _case(expected: Expectation, loaded: Findings, key: ArmKey) -> Case:
    """Builds the case of an arm in a study. The arm is compared with its baseline or `versus`.

    If two variants are compared, remarks that block the baseline of both block the case, too.
    """
    study = loaded.study
    arms = {arm.key: arm for arm in loaded.every_arm}
    arm = arms.get(key)
    if arm is None:
        return Case(expected, loaded, key, None, None, loaded.blocks)
    baseline = arms.get(arm.baseline_key)
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
    """Yields a row for each case with results, and the arm with its verdict.

    `family` is the number of comparisons that share the error rate.
    """
    for case in every_case:
        arm = case.arm
        if arm is None or arm.comparison is None:
            continue
        expected = case.expected
        study = case.loaded.study
        verdict = judging.verdict_on_pair(study, arm, case.other, case.blocks, family)
        # Without matching, an arm is neither removed nor at equal parameter count.
        is_unmatched = study.match is None and expected.at != Kind.SAME_SHAPE
        kind = Kind.MEASURED if is_unmatched else Kind(expected.at)
        row = _row(arm, arm.comparison, kind, expected, case.loaded)
        decision, speaks = finding(row, expected.relation, verdict, arm.comparison)
        row = replace(row, relation=expected.relation, decision=decision, speaks=speaks)
        yield row, replace(arm, verdict=verdict)


def _rows_beside(every_case: Iterable[Case]) -> list[Row]:
    """Returns the rows that decide nothing: the other parts of each difference, each row once.

    All parts of a difference come from the study of its case.
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
    """Yields the parts of an arm's difference from the baseline that the expectation is not about.

    The parts are: removed (at the same shape), reinvested, and matched (their sum). If the
    expectation compares two variants, yields all parts of both.
    """
    study = loaded.study
    for arm in loaded.arms:
        if not any(study.is_variant(arm.variant, variant) for variant in expected.variants):
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
    """Builds the row of an arm's difference (`arm.comparison`) or of a part of the difference."""
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
        # Only the whole difference says how well the models are trained and whether it is settled.
        fields_of_row['loss'] = arm.loss.mean if arm.loss else None
        fields_of_row['is_short'] = bool(arm.shortfalls)
        fields_of_row['yardstick'] = yardstick_text(loaded, arm)
        if arm.settling and arm.settling.short == comparison.difference.mean:
            fields_of_row['length'] = length_words(arm.settling)
    return difference_row(
        expected.label or ' - '.join(expected.variants),
        kind,
        context_of(loaded, arm) | dict(expected.context),
        comparison.difference,
        **fields_of_row,
    )


def yardstick_text(loaded: Findings, arm: TrainedArm) -> str | None:
    """Returns what an arm's baseline has to beat: '5-gram 1.457' or 'IBM model 1: BLEU 16.5'."""
    yardstick = (loaded.study.yardsticks or {}).get(arm.baseline_key)
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
    """Yields a text for each baseline: its size, training and loss, and what it has to beat.

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
    """Returns the commits and the hardware of all runs, and the seconds of their training.

    Without runs, the commit and the hardware are those of this process.
    """
    # All trials of a run share its start and its seconds, so the first one stands for the run.
    first_trials: list[Trial] = []
    for loaded in studies:
        first_trials += [run.trials[0] for run in loaded.study.runs if run.trials]
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

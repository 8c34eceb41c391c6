"""Decides a claim from its checks and from the studies of a directory."""

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from qkattn.claims import rules
from qkattn.claims.claim import (
    Claim,
    ClaimResult,
    ClaimVerdict,
    Expectation,
    Kind,
    Row,
    Speaks,
    Statement,
)
from qkattn.claims.protocol import pick
from qkattn.claims.studies import UNIT, Loaded, Results
from qkattn.errors import ConfigError
from qkattn.report.prose import NOT_RECORDED, SPLITS, device, reasons
from qkattn.stats.decision import ALPHA
from qkattn.stats.inference import Difference, to_find
from qkattn.storage.run_directory import describe_start
from qkattn.study.arm_key import EQUAL_SHAPE, LONGER, ArmKey
from qkattn.verdict import Decision, judging
from qkattn.verdict.arms import Arm, compare
from qkattn.verdict.codes import Comparison, Verdict
from qkattn.verdict.rules import standings

_BELOW_MARGIN = (Decision.BETTER_BELOW_MARGIN, Decision.WORSE_BELOW_MARGIN)


class Evidence(NamedTuple):
    """A row that decides an expectation, with its arm and the verdict."""

    row: Row
    arm: Arm
    verdict: Verdict
    difference: Difference


def decide(claim: Claim, scale: str, results: Results) -> ClaimResult:
    """Decides a claim from the results in a directory and names the missing ones.

    ConfigError if the claim expects an arm that its study does not declare.
    """
    started = time.perf_counter()
    checked = [row for check in claim.checks for row in check()]
    measured = [row for measure in claim.measures for row in results.rows(measure)]
    if scale == 'smoke':  # its studies only show that they run
        measured = [replace(row, speaks=Speaks.OPEN) for row in measured]
    expected = claim.expected_at(scale)
    loaded = [(e, study) for e in expected if (study := results.study(e.study))]
    beside = [row for pair in loaded for row in _beside(*pair)]
    beside = [row for place, row in enumerate(beside) if row not in beside[:place]]
    missing = [*_missing(claim, results), *(text for pair in loaded for text in _lack(*pair))]

    def judged(family: int) -> tuple[list[Row], list[Evidence], ClaimVerdict]:
        items = [item for pair in loaded for item in evidence(*pair, family)]
        rows = [*checked, *(item.row for item in items), *beside, *measured]
        return rows, items, rules.verdict(rows, complete=not missing)

    # All rows together are one test at the error rate; single ones are tested at their share.
    rows, items, verdict = judged(1)
    if verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        number = sum(number_of_rows(e, results.study(e.study)) for e in expected)
        rows, items, verdict = judged(max(1, number))
    undecided = verdict == ClaimVerdict.UNDECIDED
    condition = rules.condition(rows) if verdict == ClaimVerdict.HOLDS_ONLY_IF else None
    commit, hardware, seconds = _provenance(claim, results)
    return ClaimResult(
        **{field.name: getattr(claim, field.name) for field in fields(Statement)},
        scale=scale,
        verdict=verdict,
        rows=tuple(rows),
        condition=claim.conditions.get(condition, condition) if condition else None,
        needed=_needed(claim, scale, results, items) if undecided else None,
        missing=tuple(dict.fromkeys(missing)),
        studies=tuple(name for name in claim.studies if results.has(name)),
        commit=commit,
        hardware=hardware,
        seconds=round(seconds + time.perf_counter() - started, 1),
        models=tuple(_models(claim, results)),
    )


def evidence(expected: Expectation, loaded: Loaded, family: int = 1) -> list[Evidence]:
    """The evidence for an expectation: verdicts of its arms, among `family` comparisons.

    An arm has a row at its own length of training and, matched, at a longer one. What a baseline
    lacks, such as its yardstick, also withholds the verdicts on pairs of the arms beside it.
    """
    made = []
    arms = (*loaded.findings.arms, *loaded.findings.controls)
    for arm, other, comparison in _cases(expected, loaded):
        kind = Kind.REMOVED if arm.control == EQUAL_SHAPE else Kind.MATCHED
        if loaded.study.matched is None:
            kind = Kind.MEASURED  # neither removed nor at equal parameter count
        blocks = list(loaded.findings.blocks)
        if expected.versus:
            baselines = (one for one in arms if one.is_baseline and one.group == arm.group)
            blocks += [remark for baseline in baselines for remark in baseline.blocks]
        verdict = judging.pair(loaded.study, arm, other, blocks, family)
        row = _row(arm, comparison, kind, expected, loaded)
        decision, speaks = rules.finding(row, expected.relation, verdict, comparison)
        row = replace(row, relation=expected.relation, decision=decision, speaks=speaks)
        made.append(Evidence(row, arm, verdict, comparison.difference))
    return made


def number_of_rows(expected: Expectation, loaded: Loaded | None) -> int:
    """Number of rows that decide an expectation once its study is finished, if declared."""
    if loaded is None:
        return 1
    longer = expected.at == 'matched' and loaded.study.controls['longer'] is not None
    return len(_declared(expected, loaded)) * (2 if longer else 1)


def _declared(expected: Expectation, loaded: Loaded) -> list[ArmKey]:
    """The arms that the study declares for an expectation; ConfigError if there is none."""
    if loaded.study.tuning is None and expected.at == 'removed':
        return []  # a study without tuning has no controls
    control = EQUAL_SHAPE if expected.at == 'removed' else None
    keys = [key for key in loaded.study.arms if key.control == control]
    variants = list(dict.fromkeys(key.variant for key in keys))
    for variant in expected.variants:
        if not any(loaded.names(label, variant) for label in variants):
            raise ConfigError(
                f'study {expected.study!r} has no {expected.at} arm of variant {variant!r}; it has '
                f'{", ".join(variants) or "none"}'
            )
    return [key for key in keys if loaded.names(key.variant, expected.variant)]


def _cases(expected: Expectation, loaded: Loaded) -> Iterator[tuple[Arm, Arm | None, Comparison]]:
    """The arms of an expectation that have a difference, each with its reference."""
    arms = (*loaded.findings.arms, *loaded.findings.controls)
    others = {
        (arm.group, arm.control): arm
        for arm in arms
        if (loaded.names(arm.variant, expected.versus) if expected.versus else arm.is_baseline)
    }
    for control in (EQUAL_SHAPE,) if expected.at == 'removed' else (None, LONGER):
        against = control if expected.versus or control == LONGER else None
        for arm in arms:
            if arm.control == control and loaded.names(arm.variant, expected.variant):
                other, comparison = others.get((arm.group, against)), arm.comparison
                if expected.versus:
                    comparison = compare([(arm, other)], loaded.study) if other else None
                if comparison is not None:
                    yield arm, other, comparison


def _missing(claim: Claim, results: Results) -> Iterator[str]:
    """Names the studies of a claim that lack results."""
    for name in claim.studies:
        if problem := results.problem(name):
            yield f'study {name} {problem.removesuffix(".")}'
    for measure in claim.measures:
        if results.has(measure.study) and not results.rows(measure):
            yield f'the logs of study {measure.study} lack what a measurement reads'


def _lack(expected: Expectation, loaded: Loaded) -> Iterator[str]:
    """Names the declared arms that have no difference yet."""
    known = {arm.key for arm, _, _ in _cases(expected, loaded)}
    for key in _declared(expected, loaded):
        if key not in known:
            yield (
                f'study {expected.study}: {key.variant} at {key.size} on {key.corpus} has no '
                'difference from the baseline yet'
            )


def _beside(expected: Expectation, loaded: Loaded) -> Iterator[Row]:
    """The other parts of the difference: removed, reinvested, matched; of a pair, all of both."""
    study, findings = loaded
    parts = {part.key: part for part in findings.decomposition}
    decides = Kind.REMOVED if expected.at == 'removed' else Kind.MATCHED
    for arm in findings.arms:
        if not any(loaded.names(arm.variant, variant) for variant in expected.variants):
            continue
        part, shown = parts.get(arm.key), expected
        if expected.versus:
            shown = Expectation(expected.study, study.bare(arm.variant), expected.relation)
        comparisons = {
            Kind.REMOVED: part.removing if part else None,
            Kind.REINVESTED: part.reinvesting if part else None,
            Kind.MATCHED: arm.comparison if study.matched is not None else None,
        }
        for kind, comparison in comparisons.items():
            if comparison and (expected.versus or kind != decides):
                yield _row(arm, comparison, kind, shown, loaded)


def _row(
    arm: Arm, comparison: Comparison, kind: Kind, expected: Expectation, loaded: Loaded
) -> Row:
    low, high = expected.reported or (None, None)
    return Row(
        quantity=expected.label or ' - '.join(expected.variants),
        kind=kind,
        context=loaded.context(arm) | dict(expected.context),
        value=comparison.difference.mean,
        speaks=Speaks.BESIDE,
        unit=UNIT,
        low=comparison.difference.low,
        high=comparison.difference.high,
        expected=None if low is None else (low + high) / 2,
        tolerance=None if low is None else (high - low) / 2,
        study=expected.study,
    )


def _needed(claim: Claim, scale: str, results: Results, items: Sequence[Evidence]) -> str:
    """What decides a claim: missing results, more of those it has, or its studies at a scale."""
    if lacking := [name for name in claim.studies if results.problem(name)]:
        return f'--scale={scale}: {", ".join(lacking)}'
    larger = pick(scale, smoke='cpu', cpu='gpu', gpu='gpu')
    return needed(items) or f'--scale={larger}: {", ".join(claim.studies)}'


def needed(items: Sequence[Evidence]) -> str | None:
    """What would decide open arms, of the one that takes most; None without any.

    The seeds find a difference of the measured size, at least of the margin, with probability 0.8
    at the errors measured; of an arm below the margin, the distance from the margin.
    """
    needs = [_needed_by(item) for item in items if item.row.speaks == Speaks.OPEN]
    return max(needs)[1] if needs else None


def _needed_by(item: Evidence) -> tuple[float, str]:
    """What would decide an arm, in short before the first comma; behind a number to sort by."""
    row, arm, verdict, difference = item
    trial, margin = arm.example, difference.margin
    where = (
        f'{row.quantity} at {arm.size} on {arm.corpus}, {trial.parameters["total"]:,} '
        f'parameters and {trial.num_tokens:,} tokens a run'
    )
    if verdict.decision is Decision.NO_VERDICT:
        why = reasons(item) or 'not tuned'
        return math.inf, f'a verdict that is not withheld, of {where}: {why}'
    if verdict.decision in _BELOW_MARGIN:
        size = abs(abs(difference.mean) - margin)
        apart = f'{difference.mean:+.2g} from the margin of {margin:g} nats/token'
        about = f'to tell a difference of {apart} in {where}'
    else:
        size = max(abs(difference.mean), margin)
        about = f'to find a difference of {size:.2g} nats/token in {where}'
    alpha = ALPHA / max(1, verdict.num_comparisons)
    if (more := to_find(difference, size, alpha)) is None:
        hidden = difference.tuning_low + difference.tuning_high
        return 1e9, f'a finer sweep, as this one leaves {hidden:.2g} nats/token open, {about}'
    seeds, documents = more
    held_out = f' and {documents:.2g} times as many held-out documents' if documents > 1 else ''
    return seeds, f'{seeds:,} seeds in place of {difference.n}{held_out}, {about}'


def _models(claim: Claim, results: Results) -> Iterator[str]:
    """The baselines behind a claim: their size, training and loss, and what they have to beat."""
    for name in claim.studies:
        if (loaded := results.study(name)) is None:
            continue
        study, findings = loaded
        for standing in standings(study, (*findings.arms, *findings.controls)):
            arm, trial, loss = standing.arm, standing.arm.example, standing.arm.loss
            text = (
                f'{name}, {arm.size} on {arm.corpus}: {trial.parameters["total"]:,} parameters, '
                f'{trial.num_steps:,} steps, {trial.num_tokens:,} tokens'
            )
            if loss is not None:
                text += f', {SPLITS[arm.split]} loss {loss.mean:.3f}'
            if standing.best is not None:
                text += f' ({standing.best[0]} {standing.best[1]:.3f})'
            yield text + ('' if standing.bleu is None else f', BLEU {standing.bleu:.1f}')


def _provenance(claim: Claim, results: Results) -> tuple[str, str, float]:
    """Commits and hardware of what was trained, else of this process; seconds of training."""
    studies = [loaded.study for name in claim.studies if (loaded := results.study(name))]
    trials = [run.trials[0] for study in studies for run in study.runs if run.trials]
    records = [record for m in claim.measures if (record := results.recorded(m))]
    starts = [trial.provenance for trial in trials] + [record['start'] for record in records]
    starts = starts or [_here()]
    commits = {(start['git']['commit'] or NOT_RECORDED)[:12] for start in starts}
    seconds = sum(trial.train_seconds or 0.0 for trial in trials)
    return (
        ', '.join(sorted(commits)),
        ', '.join(sorted(set(map(device, starts)))),
        seconds + sum(record['seconds'] for record in records),
    )


@functools.cache
def _here() -> Mapping[str, Any]:
    return describe_start()

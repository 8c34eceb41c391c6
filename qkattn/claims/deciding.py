"""Decides a claim from its checks and from the studies of a directory."""

import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qkattn.claims import rules
from qkattn.claims.claim import Claim
from qkattn.claims.evidence import Evidence, evidence, number_of_rows
from qkattn.claims.needs import needed, planned
from qkattn.claims.results import Results
from qkattn.claims.studies import study_of
from qkattn.report.claim_results import ClaimResult, ClaimVerdict, Row, Speaks
from qkattn.report.prose import NOT_RECORDED, SPLITS, device
from qkattn.storage.run_directory import describe_start
from qkattn.verdict.trained import standings


def decide(claim: Claim, scale: str, results: Results) -> ClaimResult:
    """The verdict of a claim on what a directory has; what is missing is named.

    Raises:
      ConfigError: the claim expects an arm that its study does not declare.
    """
    started = time.perf_counter()
    exact = [row for check in claim.checks for row in check()]
    exact += [_premise(row) for check in claim.premises for row in check()]
    measured, lacking = _measured(claim, results)
    missing = [*results.missing(claim, scale), *lacking]

    def rows_of(family: int) -> tuple[list[Row], list[Evidence], list[str]]:
        found, beside, unfinished = _expected(claim, scale, results, family)
        rows = [*exact, *(of.row for of in found), *beside, *measured]
        return [_undecided(row) for row in rows] if scale == 'smoke' else rows, found, unfinished

    # All rows together are one test at the error rate; single ones are tested at their share.
    rows, decided, unfinished = rows_of(1)
    verdict = rules.verdict(rows, complete=not missing + unfinished)
    if verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        expectations = claim.expected_at(scale)
        number = sum(number_of_rows(of, results.study(of.study)) for of in expectations)
        rows, decided, unfinished = rows_of(max(1, number))
        verdict = rules.verdict(rows, complete=not missing + unfinished)
    missing += unfinished
    undecided = verdict == ClaimVerdict.UNDECIDED
    return ClaimResult(
        name=claim.name,
        title=claim.title,
        statement=claim.statement,
        source=claim.source,
        reported=claim.reported,
        rule=claim.rule,
        scale=scale,
        verdict=verdict,
        rows=tuple(rows),
        condition=rules.condition(rows) if verdict == ClaimVerdict.HOLDS_ONLY_IF else None,
        refuted=rules.condition(rows, Speaks.AGAINST) or None if undecided else None,
        needed=_needed(claim, scale, results, decided) if undecided else None,
        decisive=rules.decisive(rows, verdict),
        missing=tuple(dict.fromkeys(missing)),
        studies=tuple(name for name in claim.studies if results.has(name)),
        models=tuple(_models(claim, results)),
        command=f'python -m experiments.claims {claim.name} --scale={scale} --workdir=runs/{scale}',
        **_about(claim, results, time.perf_counter() - started),
    )


def _expected(
    claim: Claim, scale: str, results: Results, family: int
) -> tuple[list[Evidence], list[Row], list[str]]:
    """What decides the expectations of a claim, the rows beside it, and what is missing."""
    decided: list[Evidence] = []
    also: list[Row] = []
    missing: list[str] = []
    for expected in claim.expected_at(scale):
        if (loaded := results.study(expected.study)) is None:
            continue
        found, beside, lacking = evidence(expected, loaded, family)
        decided += found
        also += [row for row in beside if row not in also]
        missing += [
            f'study {expected.study}: {place.variant} at {place.size} on {place.corpus} has no '
            'difference from the baseline yet'
            for place in lacking
        ]
    return decided, also, missing


def _measured(claim: Claim, results: Results) -> tuple[list[Row], list[str]]:
    """The rows of the measures of a claim, and what is missing."""
    rows: list[Row] = []
    missing: list[str] = []
    for measure in claim.measures:
        measured = results.rows(measure)
        rows += measured
        if not measured and results.ready(measure):
            missing.append(f'the logs of study {measure.study} lack what a measurement reads')
    return rows, missing


def _models(claim: Claim, results: Results) -> Iterator[str]:
    """The baselines behind a claim: their size, training and loss, and what they have to beat."""
    for name in claim.studies:
        if (loaded := results.study(name)) is None:
            continue
        study, found = loaded
        for standing in standings(study, (*found.arms, *found.controls)):
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


def _premise(row: Row) -> Row:
    """A row that is true stands beside the claim."""
    return replace(row, speaks=Speaks.BESIDE) if row.speaks == Speaks.FOR else row


def _undecided(row: Row) -> Row:
    """The row, open if it comes from training: at scale smoke a study shows only that it runs."""
    if row.study is None or row.speaks == Speaks.BESIDE:
        return row
    return replace(row, speaks=Speaks.OPEN)


def _needed(claim: Claim, scale: str, results: Results, decided: list[Evidence]) -> str | None:
    """What decides a claim: studies without results, or more of those with open arms."""
    lacking = [name for name in claim.studies if results.unfinished(name)]
    if scale == 'smoke':
        wanted = 'cpu'
    elif lacking:
        wanted = scale
    elif text := needed(decided):
        return text
    else:
        wanted = 'gpu'
    studies = {name: study_of(name, wanted) for name in lacking or claim.studies}
    return planned({name: study for name, study in studies.items() if study}, wanted)


def _about(claim: Claim, results: Results, seconds: float) -> dict[str, Any]:
    """The commit, the hardware and the seconds of training and checks together."""
    trials = [
        trial
        for name in claim.studies
        if (loaded := results.study(name))
        for run in loaded.study.runs
        for trial in run.trials[:1]
    ]
    # A measure without a study has its own training.
    measured = [
        of
        for measure in claim.measures
        if results.study(measure.study) is None and (of := results.provenance(measure))
    ]
    starts = [*(trial.provenance for trial in trials), *(of['start'] for of in measured)]
    started = starts or [_here()]
    spent = [trial.train_seconds or 0.0 for trial in trials] + [of['seconds'] for of in measured]
    return {
        'commit': ', '.join(sorted({(of['git']['commit'] or NOT_RECORDED)[:12] for of in started})),
        'hardware': ', '.join(sorted(set(map(device, started)))),
        'seconds': round(sum(spent) + seconds, 1),
    }


@functools.cache
def _here() -> dict[str, Any]:
    return describe_start()

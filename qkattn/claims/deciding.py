"""Decides a claim from its checks and from the studies of a directory."""

import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from qkattn.claims import rules
from qkattn.claims.claim import Claim
from qkattn.claims.decided import ClaimResult, ClaimVerdict, Row, Speaks
from qkattn.claims.evidence import Evidence, evidence, number_of_rows
from qkattn.claims.results import Results
from qkattn.claims.studies import study_of
from qkattn.config import Study
from qkattn.report.prose import NOT_RECORDED, SPLITS, device, reasons
from qkattn.stats.inference import LEVEL, to_find
from qkattn.storage.run_directory import describe_start
from qkattn.verdict import Decision
from qkattn.verdict.rules import standings

_BELOW_MARGIN = (Decision.BETTER_BELOW_MARGIN, Decision.WORSE_BELOW_MARGIN)


def decide(claim: Claim, scale: str, results: Results) -> ClaimResult:
    """The verdict of a claim on what a directory has; what is missing is named.

    ConfigError if the claim expects an arm that its study does not declare.
    """
    started = time.perf_counter()
    exact = [row for check in claim.checks for row in check()]
    exact += [_premise(row) for check in claim.premises for row in check()]
    measured, unread = _measured(claim, results)
    missing = [*results.missing(claim, scale), *unread]

    def rows_of(family: int) -> tuple[list[Row], list[Evidence], list[str]]:
        decided, beside, unfinished = _expected(claim, scale, results, family)
        rows = [*exact, *(item.row for item in decided), *beside, *measured]
        return [_undecided(row) for row in rows] if scale == 'smoke' else rows, decided, unfinished

    # All rows together are one test at the error rate; single ones are tested at their share.
    rows, decided, unfinished = rows_of(1)
    verdict = rules.verdict(rows, complete=not missing + unfinished)
    if verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
        expectations = claim.expected_at(scale)
        number = sum(number_of_rows(e, results.study(e.study)) for e in expectations)
        rows, decided, unfinished = rows_of(max(1, number))
        verdict = rules.verdict(rows, complete=not missing + unfinished)
    missing += unfinished
    undecided = verdict == ClaimVerdict.UNDECIDED
    condition = rules.condition(rows) if verdict == ClaimVerdict.HOLDS_ONLY_IF else None
    lacking, wanted = _needed(claim, scale, results, decided) if undecided else (None, None)
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
        condition=claim.conditions.get(condition, condition) if condition else None,
        refuted=rules.condition(rows, Speaks.AGAINST) or None if undecided else None,
        lacking=lacking,
        needed=wanted,
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
        items, beside, lacking = evidence(expected, loaded, family)
        decided += items
        also += [row for row in beside if row not in also]
        missing += [
            f'study {expected.study}: {arm.variant} at {arm.size} on {arm.corpus} has no '
            'difference from the baseline yet'
            for arm in lacking
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


def _needed(
    claim: Claim, scale: str, results: Results, decided: list[Evidence]
) -> tuple[str | None, str | None]:
    """What a claim lacks, in short, and what decides it: studies, or more of those it has."""
    short: str | None = 'results are missing'
    lacking = [name for name in claim.studies if results.unfinished(name)]
    if scale == 'smoke':
        wanted = 'cpu'
    elif lacking:
        wanted = scale
    elif found := needed(decided):
        return found
    else:
        wanted, short = 'gpu', None
    studies = {name: study_of(name, wanted) for name in lacking or claim.studies}
    return short, _planned({name: study for name, study in studies.items() if study}, wanted)


def _planned(studies: Mapping[str, Study], scale: str) -> str | None:
    """What studies by name use at a scale; None for no studies."""
    parts = []
    for name, study in studies.items():
        base = study.base
        tokens = base.train.num_steps * base.train.batch_size * base.model.context
        parts.append(
            f'{name} with {len(base.trials.seeds)} seeds of {tokens:,} tokens at '
            f'{" and ".join(study.sizes)}'
        )
    return f'--scale={scale}: {"; ".join(parts)}' if parts else None


def needed(items: Iterable[Evidence]) -> tuple[str, str] | None:
    """What open arms lack, in short and whole, of the one that takes most; None without any.

    The seeds find a difference of the measured size, at least of the margin, with probability 0.8
    at the errors measured; of an arm below the margin, the distance from the margin.
    """
    needs = [_needed_by(item) for item in items if item.row.speaks == Speaks.OPEN]
    return max(needs)[1:] if needs else None


def _needed_by(item: Evidence) -> tuple[float, str, str]:
    """What would decide an arm, in short and whole, behind a number that grows with it."""
    row, arm, verdict, difference = item
    trial = arm.example
    point = f' at {row.x_label} {row.x:g}' if row.x is not None else ''
    where = (
        f'{row.what}{point} at {arm.size} on {arm.corpus}, {trial.parameters["total"]:,} '
        f'parameters and {trial.num_tokens:,} tokens a run'
    )
    if verdict.decision is Decision.NO_VERDICT:
        whole = f'a verdict of {where}, withheld: {reasons(item) or "not tuned"}'
        return math.inf, 'a verdict is withheld', whole
    if verdict.decision in _BELOW_MARGIN:
        size = abs(abs(difference.mean) - difference.margin)
        what = f'{difference.mean:+.2g} from the margin of {difference.margin:g} nats/token'
        about = f'to tell a difference of {what} in {where}'
    else:
        size = max(abs(difference.mean), difference.margin)
        about = f'to find a difference of {size:.2g} nats/token in {where}'
    alpha = (verdict.alpha or 1 - LEVEL) / max(1, verdict.num_comparisons)
    if (scale := to_find(difference, size, alpha)) is None:
        hidden = difference.tuning_low + difference.tuning_high
        whole = f'a finer sweep, as this one leaves {hidden:.2g} nats/token open, {about}'
        return 1e9, 'the sweep is too coarse', whole
    seeds, documents = scale
    more = f' and {documents:.2g} times as many held-out documents' if documents > 1 else ''
    whole = f'{seeds:,} seeds in place of {difference.n}{more}, {about}'
    return seeds, f'needs {seeds:,} seeds', whole


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
        recorded
        for measure in claim.measures
        if results.study(measure.study) is None and (recorded := results.provenance(measure))
    ]
    starts = [trial.provenance for trial in trials] + [recorded['start'] for recorded in measured]
    starts = starts or [_here()]
    spent = [trial.train_seconds or 0.0 for trial in trials]
    spent += [recorded['seconds'] for recorded in measured]
    commits = {(start['git']['commit'] or NOT_RECORDED)[:12] for start in starts}
    return {
        'commit': ', '.join(sorted(commits)),
        'hardware': ', '.join(sorted(set(map(device, starts)))),
        'seconds': round(sum(spent) + seconds, 1),
    }


@functools.cache
def _here() -> dict[str, Any]:
    return describe_start()

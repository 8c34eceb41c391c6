"""The scale that would decide a claim: seeds and documents, at which parameters and tokens."""

import math
from collections.abc import Iterable, Mapping

from qkattn.claims.evidence import Evidence
from qkattn.config import Study
from qkattn.report.claim_results import Speaks
from qkattn.report.prose import reasons
from qkattn.stats.inference import LEVEL
from qkattn.stats.planning import to_find
from qkattn.verdict import Decision

_BELOW_MARGIN = (Decision.BETTER_BELOW_MARGIN, Decision.WORSE_BELOW_MARGIN)


def needed(evidence: Iterable[Evidence]) -> str | None:
    """What would decide the open arms, by the one that takes most; None without an open arm.

    The seeds find a difference of the measured size, at least of the margin, with probability 0.8
    at the errors measured; of an arm below the margin, the distance from the margin.
    """
    needs = [_needed(of) for of in evidence if of.row.speaks == Speaks.OPEN]
    return max(needs)[1] if needs else None


def _needed(of: Evidence) -> tuple[float, str]:
    """What would decide an arm, behind a number that grows with it."""
    trial, place, found = of.arm.example, of.arm.place, of.difference
    point = f' at {of.row.x_label} {of.row.x:g}' if of.row.x is not None else ''
    where = (
        f'{of.row.what}{point} at {place.size} on {place.corpus}, {trial.parameters["total"]:,} '
        f'parameters and {trial.num_tokens:,} tokens a run'
    )
    if of.verdict.decision is Decision.NO_VERDICT:
        why = reasons(of) or 'not tuned'
        return math.inf, f'a verdict of {where}, withheld: {why}'
    if of.verdict.decision in _BELOW_MARGIN:
        size = abs(abs(found.mean) - found.margin)
        what = f'{found.mean:+.2g} from the margin of {found.margin:g} nats/token'
        about = f'to tell a difference of {what} in {where}'
    else:
        size = max(abs(found.mean), found.margin)
        about = f'to find a difference of {size:.2g} nats/token in {where}'
    alpha = (of.verdict.alpha or 1 - LEVEL) / max(1, of.verdict.num_comparisons)
    if (scale := to_find(found, size, alpha)) is None:
        hidden = found.tuning_low + found.tuning_high
        return 1e9, f'a finer sweep, as this one leaves {hidden:.2g} nats/token open, {about}'
    seeds, documents = scale
    more = f' and {documents:.2g} times as many held-out documents' if documents > 1 else ''
    return seeds, f'{seeds:,} seeds in place of {found.n}{more}, {about}'


def planned(studies: Mapping[str, Study], scale: str) -> str | None:
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

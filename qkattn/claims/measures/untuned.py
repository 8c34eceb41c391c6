"""What a difference would be without tuning: both arms at one learning rate."""

import functools
from pathlib import Path

from qkattn.claims.evidence import UNIT, Loaded
from qkattn.claims.results import load
from qkattn.report.claim_results import Kind, Row, Speaks
from qkattn.stats import inference
from qkattn.stats.inference import Difference
from qkattn.verdict.arms import Arm


def at_one_rate(directory: Path, variant: str) -> list[Row]:
    """Differences between untuned arms, from the screening: at each learning rate of both.

    A curve over learning rates; that at the lowest declared rate, where published baselines tend to
    stand, decides: better if its interval is below zero, not so if it is above. It is of the
    screening seeds and the validation split.
    """
    loaded = load(directory)
    if loaded.study.tuning is None:
        return []
    lowest = min(loaded.study.tuning.learning_rates)
    baselines = {arm.group: arm for arm in loaded.found.arms if arm.is_baseline}
    rows = []
    for arm in loaded.found.arms:
        if loaded.bare(arm.variant) != variant or arm.group not in baselines:
            continue
        for rate, found in sorted(_by_rate(loaded, arm, baselines[arm.group]).items()):
            rows.append(
                Row(
                    what=f'{variant} at one learning rate for both',
                    kind=Kind.MEASURED,
                    context=loaded.context(arm) | {'baseline': 'untuned'},
                    value=found.mean,
                    speaks=_better(found) if rate == lowest else Speaks.BESIDE,
                    unit=UNIT,
                    low=found.low,
                    high=found.high,
                    arm=variant,
                    x=rate,
                    x_label='learning rate',
                    study=directory.name,
                )
            )
    return rows


def untuned(variant: str) -> functools.partial:
    """`at_one_rate` of one variant, as a measure reads it."""
    return functools.partial(at_one_rate, variant=variant)


def _by_rate(loaded: Loaded, arm: Arm, baseline: Arm) -> dict[float, Difference]:
    """The paired differences at the learning rates at which both were screened."""
    losses = [
        {(t.learning_rate, t.seed): t.val_loss for t in of.screening_trials if t.val_loss}
        for of in (arm, baseline)
    ]
    pairs: dict[float, list[float]] = {}
    for at in losses[0].keys() & losses[1].keys():
        pairs.setdefault(at[0], []).append(losses[0][at] - losses[1][at])
    margin = loaded.study.margin
    return {rate: inference.paired(of, margin, resamples=None) for rate, of in pairs.items()}


def _better(found: Difference) -> Speaks:
    if found.low is None or found.high is None or found.low <= 0 <= found.high:
        return Speaks.OPEN
    return Speaks.FOR if found.high < 0 else Speaks.AGAINST

"""What a difference would be without tuning: both arms at one learning rate."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.claims.results import UNIT, load
from qkattn.stats.inference import Difference
from qkattn.verdict.arms import Arm, compare
from qkattn.verdict.load import Study


def at_one_rate(directory: Path, variant: str) -> list[Row]:
    """Differences of a study without tuning, at each learning rate that both arms have.

    A curve over learning rates; that at the lowest one, where published baselines tend to stand,
    decides: better if its interval is below zero, not so if it is above.
    """
    loaded = load(directory)
    baselines = {arm.group: arm for arm in loaded.found.arms if arm.is_baseline}
    rows = []
    for arm in loaded.found.arms:
        if loaded.study.bare(arm.variant) != variant or arm.group not in baselines:
            continue
        found = dict(_by_rate(arm, baselines[arm.group], loaded.study))
        for rate, difference in found.items():
            rows.append(
                Row(
                    what=f'{variant} at one learning rate for both',
                    kind=Kind.MEASURED,
                    context=loaded.context(arm) | {'baseline': 'untuned'},
                    value=difference.mean,
                    speaks=_better(difference) if rate == min(found) else Speaks.BESIDE,
                    unit=UNIT,
                    low=difference.low,
                    high=difference.high,
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


def _by_rate(arm: Arm, baseline: Arm, study: Study) -> Iterator[tuple[float, Difference]]:
    """The differences at the learning rates at which both have finished trials, ascending."""
    for rate in arm.learning_rates:
        pair = _at(rate, arm), _at(rate, baseline)
        if found := compare([pair], study, resamples=None):
            yield rate, found.difference


def _at(rate: float, arm: Arm) -> Arm:
    """The arm with no other trials than those at a learning rate, in place of those at its best."""
    trials = tuple(trial for trial in arm.trials if trial.learning_rate == rate)
    finished = tuple(trial for trial in trials if trial.finished)
    chosen = dataclasses.replace(arm, trials=trials, verdict_trials=trials, chosen=finished)
    return chosen.at({trial.seed for trial in trials})


def _better(found: Difference) -> Speaks:
    if found.low is None or found.high is None or found.low <= 0 <= found.high:
        return Speaks.OPEN
    return Speaks.FOR if found.high < 0 else Speaks.AGAINST

"""Losses read before training ends, from the evaluations that a study has logged."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from qkattn.claims.evidence import UNIT, Loaded
from qkattn.claims.results import load
from qkattn.report.claim_results import Kind, Row, Speaks
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.study.place import EQUAL_SHAPE, Place
from qkattn.verdict.arms import Arm, Group

# Early losses of a seed, by the fraction of training at which they are read.
Losses = Mapping[float, float]


def flips(directory: Path) -> list[Row]:
    """How many words of arms differ when validation losses are read early, a row a fraction.

    The same tests decide on early losses and on those of the last step, both on the validation
    split, on the seeds of the verdict. One word that differs speaks for the claim.
    """
    loaded = load(directory)
    differences = _differences(loaded)
    words = {f: _words(loaded, of) for f, of in differences.items()}
    annealed = words.pop(1.0, {})
    rows = []
    for fraction, early in words.items():
        both = [place for place in early if place in annealed]
        flipped = sum(early[place] is not annealed[place] for place in both)
        rows.append(
            Row(
                what=f'words of {len(both)} arms that differ from those of annealed losses',
                kind=Kind.MEASURED,
                context={},
                value=float(flipped),
                speaks=Speaks.FOR if flipped else Speaks.AGAINST,
                x=fraction,
                x_label='fraction of the steps',
                study=directory.name,
            )
        )
    return rows


def growth(directory: Path, variant: str) -> list[Row]:
    """By how much the loss of a control of equal shape grows away from the baseline, on each group.

    The difference at the last step minus that at the first evaluation, paired by seed, on the
    validation split. Less than the margin, by its interval, speaks for a difference that does not
    grow; above zero speaks against it.
    """
    loaded = load(directory)
    baselines = {arm.group: arm for arm in loaded.found.arms if arm.is_baseline}
    rows = []
    for arm in loaded.found.controls:
        if (arm.variant, arm.control) != (variant, EQUAL_SHAPE) or arm.group not in baselines:
            continue
        pairs = list(_pairs(loaded, arm, baselines[arm.group]))
        first, last = (min(pairs[0]), max(pairs[0])) if pairs else (1.0, 1.0)
        if first == last:
            continue
        grown = inference.paired([of[last] - of[first] for of in pairs], loaded.study.margin)
        rows.append(
            Row(
                what=f'growth of the difference from {first:.0%} of the steps on',
                kind=Kind.MEASURED,
                context=loaded.context(arm),
                value=grown.mean,
                speaks=_not_above(grown),
                unit=UNIT,
                low=grown.low,
                high=grown.high,
                arm=variant,
                study=directory.name,
            )
        )
    return rows


def growth_of(variant: str) -> functools.partial:
    """`growth` of one variant, as a measure reads it."""
    return functools.partial(growth, variant=variant)


def _not_above(found: Difference) -> Speaks:
    if found.low is None or found.high is None:
        return Speaks.OPEN
    if found.high < found.margin:
        return Speaks.FOR
    return Speaks.AGAINST if found.low > 0 else Speaks.OPEN


def _differences(loaded: Loaded) -> dict[float, dict[Place, list[float]]]:
    """By fraction of training, the differences of primary arms from their baseline over seeds."""
    baselines: dict[Group, Arm] = {a.group: a for a in loaded.found.arms if a.is_baseline}
    found: dict[float, dict[Place, list[float]]] = {}
    for arm in loaded.found.arms:
        if arm.is_baseline or arm.group not in baselines:
            continue
        for pair in _pairs(loaded, arm, baselines[arm.group]):
            for fraction, difference in pair.items():
                found.setdefault(fraction, {}).setdefault(arm.place, []).append(difference)
    return dict(sorted(found.items()))


def _pairs(loaded: Loaded, arm: Arm, baseline: Arm) -> Iterator[Losses]:
    """For each seed that both finished, the differences by fraction of the steps."""
    own, other = _losses(loaded, arm), _losses(loaded, baseline)
    for seed in sorted(own.keys() & other.keys()):
        fractions = sorted(own[seed].keys() & other[seed].keys())
        yield {f: own[seed][f] - other[seed][f] for f in fractions}


def _losses(loaded: Loaded, arm: Arm) -> dict[int, Losses]:
    """Validation losses of the chosen trials by seed and fraction of the steps."""
    found: dict[int, Losses] = {}
    for trial in arm.chosen:
        run = loaded.study.by_name[trial.run]
        if run.curve is None:
            continue
        column = run.trials.index(trial)
        losses_E = run.curve.values_EX['val_loss'][:, column]
        pairs = zip(run.curve.steps_E, losses_E, strict=True)
        found[trial.seed] = {float(s) / run.num_steps: float(x) for s, x in pairs if x == x}
    return found


def _words(loaded: Loaded, differences: Mapping[Place, list[float]]) -> dict[Place, Decision]:
    """The words of the tests of a verdict, without the errors of documents and tuning."""
    margin = loaded.study.margin
    tested = {
        place: inference.paired(of, margin, resamples=None) for place, of in differences.items()
    }
    judged = decision.judge(tested, planned=loaded.found.num_comparisons)
    return {place: of.decision for place, of in judged.items()}

"""Losses read before training ends, from the evaluations that a study has logged."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.claims.results import UNIT, Loaded, load
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import EQUAL_SHAPE, ArmKey
from qkattn.verdict.arms import Arm
from qkattn.verdict.judging import ABOVE_ZERO, BELOW_ZERO
from qkattn.verdict.load import Group

Losses = Mapping[float, float]  # of a seed, or differences, by the fraction of training
SIDES = {**dict.fromkeys(BELOW_ZERO, -1), Decision.EQUIVALENT: 0, **dict.fromkeys(ABOVE_ZERO, 1)}


def early(directory: Path) -> list[Row]:
    """What changes when differences are read early: counts of arms by fraction of training.

    Differences of primary arms on the validation split, paired by seed. Those that differ from the
    annealed ones by more than the margin speak for the claim; against it, that all are equivalent
    to them. Beside them stand verdicts that turn, to the other side of zero or to equivalence and
    back, and those that only one of both has, which contradict nothing.
    """
    loaded = load(directory)
    by_arm = dict(_differences(loaded))
    fractions = sorted({f for seeds in by_arm.values() for seed in seeds for f in seed} - {1.0})
    annealed = _words(
        loaded,
        {arm: [seed[1.0] for seed in seeds if 1.0 in seed] for arm, seeds in by_arm.items()},
    )
    rows = []
    for fraction in fractions:
        pairs = {
            arm: [(seed[fraction], seed[1.0]) for seed in seeds if {fraction, 1.0} <= seed.keys()]
            for arm, seeds in by_arm.items()
        }
        words = _words(loaded, {arm: [early for early, _ in both] for arm, both in pairs.items()})
        change = _words(loaded, {arm: [a - b for a, b in both] for arm, both in pairs.items()})
        sides = [(SIDES.get(words[arm]), SIDES.get(annealed[arm])) for arm in words]
        changed = sum(word in (Decision.BETTER, Decision.WORSE) for word in change.values())
        same = all(word is Decision.EQUIVALENT for word in change.values())
        speaks = Speaks.FOR if changed else Speaks.AGAINST if same and change else Speaks.OPEN
        turned = sum(None not in pair and pair[0] != pair[1] for pair in sides)
        gained = sum((early is None) != (late is None) for early, late in sides)
        counts = (
            ('differences that change by more than the margin', changed, speaks),
            ('verdicts that turn', turned, Speaks.BESIDE),
            ('verdicts gained or lost', gained, Speaks.BESIDE),
        )
        rows += [
            Row(
                what=what,
                kind=Kind.MEASURED,
                context={'arms': str(len(words))},
                value=float(count),
                speaks=spoken,
                unit='arms',
                x=fraction,
                x_label='fraction of the steps',
                study=directory.name,
            )
            for what, count, spoken in counts
        ]
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
        grown = inference.paired([seed[last] - seed[first] for seed in pairs], loaded.study.margin)
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


def _differences(loaded: Loaded) -> Iterator[tuple[ArmKey, list[Losses]]]:
    """Of each primary arm, its differences from the baseline, seed by seed."""
    baselines: dict[Group, Arm] = {a.group: a for a in loaded.found.arms if a.is_baseline}
    for arm in loaded.found.arms:
        if not arm.is_baseline and arm.group in baselines:
            yield arm.key, list(_pairs(loaded, arm, baselines[arm.group]))


def _pairs(loaded: Loaded, arm: Arm, baseline: Arm) -> Iterator[Losses]:
    """For each seed that both finished, the differences by fraction of the steps."""
    losses, others = _losses(loaded, arm), _losses(loaded, baseline)
    for seed in sorted(losses.keys() & others.keys()):
        fractions = sorted(losses[seed].keys() & others[seed].keys())
        yield {f: losses[seed][f] - others[seed][f] for f in fractions}


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


def _words(loaded: Loaded, differences: Mapping[ArmKey, list[float]]) -> dict[ArmKey, Decision]:
    """The words of the tests of a verdict, without the errors of documents and tuning."""
    margin = loaded.study.margin
    tested = {
        arm: inference.paired(values, margin, resamples=None) if values else None
        for arm, values in differences.items()
    }
    judged = decision.judge(tested, planned=loaded.found.num_comparisons)
    return {arm: verdict.decision for arm, verdict in judged.items()}

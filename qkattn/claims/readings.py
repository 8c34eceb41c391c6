"""Rows that claims read from the logs of studies: early losses, growth, untuned differences."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from qkattn.claims.claim import Kind, Row, Speaks
from qkattn.claims.studies import UNIT, Loaded, load
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import EQUAL_SHAPE, ArmKey
from qkattn.verdict.arms import Arm, compare
from qkattn.verdict.judging import ABOVE_ZERO, BELOW_ZERO

Losses = Mapping[float, float]  # of a seed, or differences, by the fraction of training
SIDES = {**dict.fromkeys(BELOW_ZERO, -1), Decision.EQUIVALENT: 0, **dict.fromkeys(ABOVE_ZERO, 1)}


def early(directory: Path) -> list[Row]:
    """What changes when differences are read early: counts of arms by fraction of training.

    Differences of primary arms on the validation split, paired by seed. Early differences that
    are more than the margin away from the annealed ones support the claim; if all are equivalent,
    they refute it. Two counts decide nothing: verdicts that turn, to the other side of zero or to
    or from equivalence, and arms that only one of both decides.
    """
    loaded = load(directory)
    by_arm = {
        arm.key: list(_pairs(loaded, arm, baseline))
        for arm, baseline in _with_baselines(loaded, loaded.findings.arms)
        if not arm.is_baseline
    }
    fractions = sorted({f for seeds in by_arm.values() for seed in seeds for f in seed} - {1.0})
    annealed = _decisions(
        loaded,
        {arm: [seed[1.0] for seed in seeds if 1.0 in seed] for arm, seeds in by_arm.items()},
    )
    rows = []
    for fraction in fractions:
        pairs = {
            arm: [(seed[fraction], seed[1.0]) for seed in seeds if {fraction, 1.0} <= seed.keys()]
            for arm, seeds in by_arm.items()
        }
        at_once = _decisions(loaded, {arm: [a for a, _ in both] for arm, both in pairs.items()})
        change = _decisions(loaded, {arm: [a - b for a, b in both] for arm, both in pairs.items()})
        sides = [(SIDES.get(at_once[arm]), SIDES.get(annealed[arm])) for arm in at_once]
        changed = sum(verdict in (Decision.BETTER, Decision.WORSE) for verdict in change.values())
        same = all(verdict is Decision.EQUIVALENT for verdict in change.values())
        speaks = Speaks.FOR if changed else Speaks.AGAINST if same and change else Speaks.OPEN
        turned = sum(None not in pair and pair[0] != pair[1] for pair in sides)
        gained = sum((one is None) != (other is None) for one, other in sides)
        context = {'arms': str(len(by_arm)), 'fraction of the steps': f'{fraction:g}'}
        for quantity, count, spoken in (
            ('differences that change by more than the margin', changed, speaks),
            ('verdicts that turn', turned, Speaks.BESIDE),
            ('verdicts gained or lost', gained, Speaks.BESIDE),
        ):
            rows.append(Row(quantity, Kind.MEASURED, context, float(count), spoken, 'arms'))
    return rows


def growth(directory: Path, variant: str) -> list[Row]:
    """By how much the loss of a control of equal shape grows away from the baseline, on each group.

    The difference at the last step minus that at the first evaluation, paired by seed, on the
    validation split. Less than the margin, by its interval, speaks for a difference that does not
    grow; above zero speaks against it.
    """
    loaded, rows = load(directory), []
    for arm, baseline in _with_baselines(loaded, loaded.findings.controls):
        if (arm.variant, arm.control) != (variant, EQUAL_SHAPE):
            continue
        pairs = list(_pairs(loaded, arm, baseline))
        if not pairs or len(pairs[0]) < 2:
            continue
        first, last = min(pairs[0]), max(pairs[0])
        grown = inference.paired([seed[last] - seed[first] for seed in pairs], loaded.study.margin)
        quantity = f'growth of the difference from {first:.0%} of the steps on'
        rows.append(_row(quantity, loaded.context(arm), grown, _speaks(grown, grown.margin)))
    return rows


def at_one_rate(directory: Path, variant: str) -> list[Row]:
    """Differences of a study without tuning, at each learning rate that both arms have.

    That at the lowest one, where published baselines tend to stand, decides: better if its interval
    is below zero, not so if it is above.
    """
    loaded, rows = load(directory), []
    for arm, baseline in _with_baselines(loaded, loaded.findings.arms):
        if loaded.study.bare(arm.variant) != variant:
            continue
        by_rate = {}
        for rate in arm.learning_rates:
            pair = _at(rate, arm), _at(rate, baseline)
            if comparison := compare([pair], loaded.study):
                by_rate[rate] = comparison.difference
        for rate, difference in by_rate.items():
            context = loaded.context(arm) | {'baseline': 'untuned', 'learning rate': f'{rate:g}'}
            speaks = _speaks(difference, 0.0) if rate == min(by_rate) else Speaks.BESIDE
            rows.append(
                _row(f'{variant} at one learning rate for both', context, difference, speaks)
            )
    return rows


def _speaks(difference: Difference, bound: float) -> Speaks:
    """For, if the interval lies below `bound`; against, if it lies above zero."""
    if difference.low is None or difference.high is None:
        return Speaks.OPEN
    if difference.high < bound:
        return Speaks.FOR
    return Speaks.AGAINST if difference.low > 0 else Speaks.OPEN


def _row(quantity: str, context: dict[str, str], difference: Difference, speaks: Speaks) -> Row:
    numbers = difference.mean, speaks, UNIT, difference.low, difference.high
    return Row(quantity, Kind.MEASURED, context, *numbers)


def _with_baselines(loaded: Loaded, arms: tuple[Arm, ...]) -> Iterator[tuple[Arm, Arm]]:
    """Pairs of an arm and its baseline, where the baseline has results."""
    baselines = {arm.group: arm for arm in loaded.findings.arms if arm.is_baseline}
    return ((arm, baselines[arm.group]) for arm in arms if arm.group in baselines)


def _at(rate: float, arm: Arm) -> Arm:
    """The arm restricted to the trials at one learning rate."""
    trials = tuple(trial for trial in arm.trials if trial.learning_rate == rate)
    finished = tuple(trial for trial in trials if trial.finished)
    return dataclasses.replace(arm, trials=trials, verdict_trials=trials, chosen=finished)


def _pairs(loaded: Loaded, arm: Arm, baseline: Arm) -> Iterator[Losses]:
    """For each seed that both arms finished, the differences by fraction of the steps."""
    losses, others = _losses(loaded, arm), _losses(loaded, baseline)
    for seed in sorted(losses.keys() & others.keys()):
        fractions = sorted(losses[seed].keys() & others[seed].keys())
        yield {f: losses[seed][f] - others[seed][f] for f in fractions}


def _losses(loaded: Loaded, arm: Arm) -> dict[int, Losses]:
    """Validation losses of the chosen trials by seed and fraction of the steps."""
    by_seed: dict[int, Losses] = {}
    for trial in arm.chosen:
        run = loaded.study.by_name[trial.run]
        if run.curve is not None:
            losses_E = run.curve.values_EX['val_loss'][:, run.trials.index(trial)]
            pairs = zip(run.curve.steps_E, losses_E, strict=True)
            by_seed[trial.seed] = {float(s) / run.num_steps: float(x) for s, x in pairs if x == x}
    return by_seed


def _decisions(loaded: Loaded, differences: Mapping[ArmKey, list[float]]) -> dict[ArmKey, Decision]:
    """The decisions of the tests of a verdict, without the errors of documents and tuning."""
    margin = loaded.study.margin
    tested = {
        arm: inference.paired(values, margin) if values else None
        for arm, values in differences.items()
    }
    judged = decision.judge(tested, planned=loaded.findings.num_comparisons)
    return {arm: verdict.decision for arm, verdict in judged.items()}

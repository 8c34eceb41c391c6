"""Rows that claims read from the logs of studies: early losses, growth, untuned differences."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from qkattn.claims.claim import Kind, Row, Speaks
from qkattn.claims.studies import UNIT, Loaded, load
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import EQUAL_SHAPE
from qkattn.verdict.arms import Arm, compare, with_baselines

Losses = Mapping[float, float]  # of a seed, or differences, by the fraction of training


def early(directory: Path) -> list[Row]:
    """How many differences change after they are read early, by fraction of training.

    Differences of primary arms on the validation split, paired by seed. An early difference that
    is more than the margin away from the annealed one supports the claim; if all are equivalent,
    they refute it. The tests are those of a verdict, without the errors of documents and tuning.
    """
    loaded = load(directory)
    margin, planned = loaded.study.margin, loaded.findings.num_comparisons
    by_arm = {
        arm.key: list(_by_seed(arm, baseline, loaded))
        for arm, baseline in _compared(loaded)
        if arm.control is None
    }
    rows = []
    for fraction in sorted(
        {f for seeds in by_arm.values() for seed in seeds for f in seed} - {1.0}
    ):
        changes = {
            arm: [seed[fraction] - seed[1.0] for seed in seeds if {fraction, 1.0} <= seed.keys()]
            for arm, seeds in by_arm.items()
        }
        tested = {arm: inference.paired(x, margin) if x else None for arm, x in changes.items()}
        decided = [d.decision for d in decision.judge(tested, planned=planned).values()]
        changed = sum(one in (Decision.BETTER, Decision.WORSE) for one in decided)
        speaks = Speaks.FOR if changed else Speaks.OPEN
        if {*decided} == {Decision.EQUIVALENT}:
            speaks = Speaks.AGAINST
        context = {'arms': str(len(by_arm)), 'fraction of the steps': f'{fraction:g}'}
        quantity = 'differences that change by more than the margin'
        rows.append(Row(quantity, Kind.MEASURED, context, float(changed), speaks, 'arms'))
    return rows


def growth(directory: Path, variant: str) -> list[Row]:
    """By how much the loss of a control of equal shape grows away from the baseline, on each group.

    The difference at the last step minus that at the first evaluation, paired by seed, on the
    validation split. Less than the margin, by its interval, speaks for a difference that does not
    grow; above zero speaks against it.
    """
    loaded, rows = load(directory), []
    for arm, baseline in _compared(loaded):
        if (arm.variant, arm.control) != (variant, EQUAL_SHAPE):
            continue
        seeds = list(_by_seed(arm, baseline, loaded))
        if seeds and len(seeds[0]) > 1:
            first, last, margin = min(seeds[0]), max(seeds[0]), loaded.study.margin
            grown = inference.paired([seed[last] - seed[first] for seed in seeds], margin)
            quantity = f'growth of the difference from {first:.0%} of the steps on'
            rows.append(_row(quantity, loaded.context(arm), grown, _speaks(grown, margin)))
    return rows


def at_one_rate(directory: Path, variant: str) -> list[Row]:
    """Differences of a study without tuning, at each learning rate that both arms have.

    That at the lowest one, where published baselines tend to stand, decides: better if its interval
    is below zero, not so if it is above.
    """
    loaded, rows = load(directory), []
    for arm, baseline in _compared(loaded):
        if loaded.study.bare(arm.variant) != variant:
            continue
        speaks = None
        for rate in arm.learning_rates:
            if comparison := compare([(_at(rate, arm), _at(rate, baseline))], loaded.study):
                difference = comparison.difference
                speaks = Speaks.BESIDE if speaks else _speaks(difference, 0.0)
                context = {'baseline': 'untuned', 'learning rate': f'{rate:g}'}
                quantity = f'{variant} at one learning rate for both'
                rows.append(_row(quantity, loaded.context(arm) | context, difference, speaks))
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


def _compared(loaded: Loaded) -> Iterator[tuple[Arm, Arm]]:
    """All arms and controls but the baselines, each with its baseline, if that has results."""
    arms = (*loaded.findings.arms, *loaded.findings.controls)
    pairs = with_baselines(arms)
    return ((arm, other) for arm, other in pairs if other and not arm.is_baseline)


def _at(rate: float, arm: Arm) -> Arm:
    """The arm restricted to the trials at one learning rate."""
    trials = tuple(trial for trial in arm.trials if trial.learning_rate == rate)
    finished = tuple(trial for trial in trials if trial.finished)
    return dataclasses.replace(arm, trials=trials, verdict_trials=trials, chosen=finished)


def _by_seed(arm: Arm, baseline: Arm, loaded: Loaded) -> Iterator[Losses]:
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

"""What claims measure: early losses, growth, untuned differences.

Rows that are not differences between the arms of a study, read from its logs.
"""

from collections.abc import Iterator

from experiments.claims.claim import Kind, Row, Speaks, difference_row
from experiments.claims.studies import context_of
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import SAME_SHAPE
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm, with_baselines


def early(loaded: Findings) -> list[Row]:
    """How many differences change after they are read early, by fraction of training.

    Differences of primary arms on the validation split, paired by seed. An early difference that
    is more than the margin away from the annealed one supports the claim; if all are equivalent,
    they refute it. The tests are those of a verdict, without the errors of documents and tuning;
    all fractions share the error rate. Where a trial diverged, or a rule withholds the verdict,
    that of a change is withheld, too.
    """
    margin = loaded.study.margin
    pairs = {arm.key: (arm, other) for arm, other in _compared(loaded) if not arm.key.control}
    curves = {key: _curves(*pair) for key, pair in pairs.items()}
    withheld = {key: (_withheld(*pair),) * 2 for key, pair in pairs.items()}
    looks = {key: loaded.study.look(key, other.key) for key, (_, other) in pairs.items()}
    steps = {step for seeds in curves.values() for seed in seeds for step in seed}
    last = max(steps, default=0)
    rows = []
    planned = loaded.num_comparisons * len(steps - {last})
    for step in sorted(steps - {last}):
        changes = {
            arm: [seed[step] - seed[last] for seed in seeds if {step, last} <= seed.keys()]
            for arm, seeds in curves.items()
        }
        tested = {arm: inference.paired(x, margin) if x else None for arm, x in changes.items()}
        judged = decision.judge(tested, diverged=withheld, planned=planned, looks=looks)
        decided = [one.decision for one in judged.values()]
        changed = sum(one in (Decision.BETTER, Decision.WORSE) for one in decided)
        same = Speaks.AGAINST if {*decided} == {Decision.EQUIVALENT} else Speaks.OPEN
        speaks = Speaks.FOR if changed else same
        context = {'arms': str(len(curves)), 'fraction of the steps': f'{step / last:g}'}
        quantity = 'arms whose difference changes by more than the margin'
        rows.append(Row(quantity, Kind.MEASURED, context, float(changed), speaks))
    return rows


def growth(loaded: Findings, variant: str) -> list[Row]:
    """By how much the loss of a same-shape control grows away from the baseline, on each group.

    The difference at the last step minus that at the first evaluation, paired by seed, on the
    validation split. Less than the margin, by its interval, speaks for a difference that does not
    grow; above zero speaks against it.
    """
    rows = []
    for arm, baseline in _compared(loaded):
        if (arm.variant, arm.key.control) != (variant, SAME_SHAPE):
            continue
        seeds = _curves(arm, baseline)
        if seeds and len(seeds[0]) > 1:
            first = min(seeds[0])
            last = max(seeds[0])
            margin = loaded.study.margin
            grown = inference.paired([seed[last] - seed[first] for seed in seeds], margin)
            quantity = f'growth of the difference from {first / last:.0%} of the steps on'
            speaks = _speaks(arm, baseline, grown, margin, 0.0)
            context = context_of(loaded, arm)
            rows.append(difference_row(quantity, Kind.MEASURED, context, grown, speaks=speaks))
    return rows


def at_one_rate(loaded: Findings, variant: str) -> list[Row]:
    """The difference of a study without tuning, whose arms share one learning rate.

    Better by more than the margin, or not, by its interval.
    """
    rows = []
    margin = -loaded.study.margin
    for arm, baseline in _compared(loaded):
        if loaded.study.bare(arm.variant) == variant and arm.difference:
            context = context_of(loaded, arm)
            context |= {'baseline': 'untuned', 'learning rate': f'{arm.learning_rate:g}'}
            about = f'{variant} at one learning rate for both', Kind.MEASURED, context
            speaks = _speaks(arm, baseline, arm.difference, margin, margin)
            rows.append(difference_row(*about, arm.difference, speaks=speaks))
    return rows


def _withheld(arm: TrainedArm, baseline: TrainedArm) -> bool:
    """Whether a diverged trial or a broken rule keeps a difference from deciding."""
    return any(one.num_diverged > 0 or bool(one.blocks) for one in (arm, baseline))


def _speaks(
    arm: TrainedArm, baseline: TrainedArm, difference: Difference, below: float, above: float
) -> Speaks:
    """For, if the interval lies below one bound; against, if it lies above the other."""
    if _withheld(arm, baseline) or difference.low is None or difference.high is None:
        return Speaks.OPEN
    if difference.high < below:
        return Speaks.FOR
    return Speaks.AGAINST if difference.low > above else Speaks.OPEN


def _compared(loaded: Findings) -> Iterator[tuple[TrainedArm, TrainedArm]]:
    """All arms and controls but the baselines, each with its baseline, if that has results."""
    pairs = with_baselines(loaded.every_arm)
    return ((arm, other) for arm, other in pairs if other and not arm.is_baseline)


def _curves(arm: TrainedArm, baseline: TrainedArm) -> list[dict[int, float]]:
    """For each seed that both arms finished, the differences in validation loss by step."""
    shared = [seed for seed in arm.by_seed if seed in baseline.by_seed]
    pairs = [(arm.by_seed[seed].evaluations, baseline.by_seed[seed].evaluations) for seed in shared]
    return [{step: a[step] - b[step] for step in a if step in b} for a, b in pairs if a and b]

"""What claims measure: early losses, growth, untuned differences.

Rows that are not differences between the arms of a study, read from its logs.
"""

from collections.abc import Iterable, Iterator, Mapping

from experiments.claims.claim import Kind, Row, Speaks, difference_row
from experiments.claims.studies import context_of
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm, with_baselines


def early(loaded: Findings) -> list[Row]:
    """How many differences change after they are read early: a row for each fraction of training.

    Differences of primary arms on the validation split, paired by seed. An early difference that
    is more than the margin away from the annealed one supports the claim; if all are equivalent,
    they refute it. The tests are those of a verdict, without the errors of documents and tuning;
    all fractions share the error rate. Where a trial diverged, or a rule withholds the verdict,
    that of a change is withheld, too.
    """
    margin = loaded.study.margin
    curves: dict[ArmKey, list[dict[int, float]]] = {}
    looks: dict[ArmKey, int] = {}
    # `decision.judge` takes how many trials of an arm and of its baseline diverged.
    withheld: dict[ArmKey, tuple[int, int]] = {}
    for arm, baseline in _compared(loaded):
        if arm.key.control is None:
            curves[arm.key] = _differences_by_step(arm, baseline)
            looks[arm.key] = loaded.study.look(arm.key, baseline.key)
            is_withheld = _is_withheld(arm, baseline)
            withheld[arm.key] = (int(is_withheld), int(is_withheld))
    steps = {step for of_seeds in curves.values() for of_seed in of_seeds for step in of_seed}
    last = max(steps, default=0)
    early_steps = sorted(steps - {last})
    rows = []
    for step in early_steps:
        judged = decision.judge(
            {key: _change(of_seeds, step, last, margin) for key, of_seeds in curves.items()},
            diverged=withheld,
            planned=loaded.num_comparisons * len(early_steps),
            looks=looks,
        )
        decisions = [judgement.decision for judgement in judged.values()]
        num_changed = decisions.count(Decision.BETTER) + decisions.count(Decision.WORSE)
        if num_changed:
            speaks = Speaks.FOR
        elif set(decisions) == {Decision.EQUIVALENT}:
            speaks = Speaks.AGAINST
        else:
            speaks = Speaks.OPEN
        quantity = 'arms whose difference changes by more than the margin'
        context = {'arms': str(len(curves)), 'fraction of the steps': f'{step / last:g}'}
        rows.append(Row(quantity, Kind.MEASURED, context, float(num_changed), speaks))
    return rows


def growth(loaded: Findings, variant: str) -> list[Row]:
    """By how much the loss of a same-shape control grows away from that of its baseline.

    A row for each size and corpus: the difference at the last step minus that at the first
    evaluation, paired by seed, on the validation split. An interval below the margin speaks for a
    difference that does not grow; one above zero speaks against it.
    """
    margin = loaded.study.margin
    rows = []
    for arm, baseline in _compared(loaded):
        if arm.variant != variant or arm.key.control != SAME_SHAPE:
            continue
        curves = _differences_by_step(arm, baseline)
        if not curves or len(curves[0]) < 2:
            continue
        first = min(curves[0])
        last = max(curves[0])
        grown = inference.paired([of_seed[last] - of_seed[first] for of_seed in curves], margin)
        quantity = f'growth of the difference from {first / last:.0%} of the steps on'
        speaks = _speaks(arm, baseline, grown, below=margin, above=0.0)
        context = context_of(loaded, arm)
        rows.append(difference_row(quantity, Kind.MEASURED, context, grown, speaks=speaks))
    return rows


def at_one_rate(loaded: Findings, variant: str) -> list[Row]:
    """The difference of a variant in a study without tuning, whose arms share one learning rate.

    A row for each size and corpus. An interval below minus the margin speaks for a variant that is
    better, one above it against that.
    """
    bound = -loaded.study.margin
    rows = []
    for arm, baseline in _compared(loaded):
        if loaded.study.bare(arm.variant) != variant or arm.difference is None:
            continue
        quantity = f'{variant} at one learning rate for both'
        context = context_of(loaded, arm)
        context |= {'baseline': 'untuned', 'learning rate': f'{arm.learning_rate:g}'}
        speaks = _speaks(arm, baseline, arm.difference, below=bound, above=bound)
        rows.append(difference_row(quantity, Kind.MEASURED, context, arm.difference, speaks=speaks))
    return rows


def _is_withheld(arm: TrainedArm, baseline: TrainedArm) -> bool:
    """Whether a diverged trial or a broken rule keeps a difference from deciding."""
    has_diverged = arm.num_diverged > 0 or baseline.num_diverged > 0
    return has_diverged or bool(arm.blocks) or bool(baseline.blocks)


def _speaks(
    arm: TrainedArm, baseline: TrainedArm, difference: Difference, below: float, above: float
) -> Speaks:
    """FOR if the interval lies below the bound `below`; AGAINST if it lies above `above`."""
    if _is_withheld(arm, baseline) or difference.low is None or difference.high is None:
        return Speaks.OPEN
    if difference.high < below:
        return Speaks.FOR
    if difference.low > above:
        return Speaks.AGAINST
    return Speaks.OPEN


def _compared(loaded: Findings) -> Iterator[tuple[TrainedArm, TrainedArm]]:
    """All arms and controls but the baselines, each with its baseline, if that has results."""
    for arm, baseline in with_baselines((*loaded.arms, *loaded.controls)):
        if baseline is not None and not arm.is_baseline:
            yield arm, baseline


def _change(
    curves: Iterable[Mapping[int, float]], step: int, last: int, margin: float
) -> Difference | None:
    """The difference at a step minus that at the last one, paired by seed; None without seeds.

    `curves` are the differences of each seed by step.
    """
    changes = [curve[step] - curve[last] for curve in curves if step in curve and last in curve]
    return inference.paired(changes, margin) if changes else None


def _differences_by_step(arm: TrainedArm, baseline: TrainedArm) -> list[dict[int, float]]:
    """For each seed that both arms finished, the differences in validation loss by step."""
    trials = arm.by_seed
    baseline_trials = baseline.by_seed
    curves = []
    for seed in trials:
        if seed not in baseline_trials:
            continue
        losses = trials[seed].evaluations
        baseline_losses = baseline_trials[seed].evaluations
        if losses and baseline_losses:
            steps = [step for step in losses if step in baseline_losses]
            curves.append({step: losses[step] - baseline_losses[step] for step in steps})
    return curves

"""What claims measure: early losses, growth, untuned differences.

Each function reads the logs of a study and returns rows of evidence that are not simply differences
between tuned arms.
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


def early(findings: Findings) -> list[Row]:
    """Counts the differences that change between an early evaluation and the end of training.

    Returns a row for each fraction of training. The differences are those of primary arms on the
    validation split, paired by seed. A row supports the claim if a difference changes by more than
    the margin. A row refutes the claim if all early differences are equivalent to the final ones.

    A change is tested like the difference of a verdict, but without the errors of documents and
    tuning. All fractions share the error rate. If a trial diverged, or a rule withholds the verdict
    of an arm, the arm's change stays undecided.
    """
    margin = findings.study.margin
    curves: dict[ArmKey, list[dict[int, float]]] = {}
    looks: dict[ArmKey, int] = {}
    # `decision.judge` leaves an arm undecided if trials of both it and its baseline diverged. So a
    # change that must stay undecided is passed with one diverged trial of each.
    diverged: dict[ArmKey, tuple[int, int]] = {}
    for arm, baseline in _arms_with_baselines(findings):
        if arm.key.control is None:
            curves[arm.key] = _differences_by_step(arm, baseline)
            looks[arm.key] = findings.study.look(arm.key, baseline.key)
            diverged[arm.key] = (1, 1) if _is_withheld(arm, baseline) else (0, 0)

    steps: set[int] = set()
    for curves_of_arm in curves.values():
        for curve in curves_of_arm:
            steps.update(curve)
    last = max(steps, default=0)
    early_steps = sorted(steps - {last})
    rows = []
    for step in early_steps:
        changes = {
            key: _change(curves_of_arm, step, last, margin) for key, curves_of_arm in curves.items()
        }
        judged = decision.judge(
            changes,
            diverged=diverged,
            planned=findings.num_comparisons * len(early_steps),
            looks=looks,
        )
        decisions = [judgement.decision for judgement in judged.values()]
        # 'better' and 'worse' mean a change by more than the margin.
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


def growth(findings: Findings, variant: str) -> list[Row]:
    """Measures how far the losses of a same-shape control and its baseline drift apart in training.

    Returns a row for each size and corpus: the difference at the last step minus the difference at
    the first evaluation, paired by seed, on the validation split. The claim is that the difference
    does not grow. An interval below the margin supports it; an interval above zero refutes it.
    """
    margin = findings.study.margin
    rows = []
    for arm, baseline in _arms_with_baselines(findings):
        if arm.variant != variant or arm.key.control != SAME_SHAPE:
            continue
        curves = _differences_by_step(arm, baseline)
        if not curves or len(curves[0]) < 2:
            continue
        first = min(curves[0])
        last = max(curves[0])
        growth_by_seed = [curve[last] - curve[first] for curve in curves]
        grown = inference.paired_test(growth_by_seed, margin)
        quantity = f'growth of the difference from {first / last:.0%} of the steps on'
        speaks = _speaks_of_interval(arm, baseline, grown, below=margin, above=0.0)
        context = context_of(findings, arm)
        rows.append(difference_row(quantity, Kind.MEASURED, context, grown, speaks=speaks))
    return rows


def at_one_rate(findings: Findings, variant: str) -> list[Row]:
    """Reads the difference of a variant in an untuned study, whose arms share a learning rate.

    Returns a row for each size and corpus. The claim is that the variant is better by more than the
    margin. An interval below minus the margin supports it; an interval above minus the margin
    refutes it.
    """
    bound = -findings.study.margin
    rows = []
    for arm, baseline in _arms_with_baselines(findings):
        if findings.study.bare(arm.variant) != variant or arm.difference is None:
            continue
        quantity = f'{variant} at one learning rate for both'
        context = context_of(findings, arm)
        context |= {'baseline': 'untuned', 'learning rate': f'{arm.learning_rate:g}'}
        speaks = _speaks_of_interval(arm, baseline, arm.difference, below=bound, above=bound)
        rows.append(difference_row(quantity, Kind.MEASURED, context, arm.difference, speaks=speaks))
    return rows


def _is_withheld(arm: TrainedArm, baseline: TrainedArm) -> bool:
    """Returns whether a difference must not decide: a trial diverged or a rule is broken."""
    has_diverged = arm.num_diverged > 0 or baseline.num_diverged > 0
    return has_diverged or bool(arm.blocks) or bool(baseline.blocks)


def _speaks_of_interval(
    arm: TrainedArm, baseline: TrainedArm, difference: Difference, below: float, above: float
) -> Speaks:
    """Returns whether the 95 % interval of a difference supports a claim.

    Returns FOR if the whole interval lies below `below`, AGAINST if it lies above `above`, and
    otherwise OPEN. A difference that must not decide (`_is_withheld`) is also OPEN.
    """
    if _is_withheld(arm, baseline) or difference.low is None or difference.high is None:
        return Speaks.OPEN
    if difference.high < below:
        return Speaks.FOR
    if difference.low > above:
        return Speaks.AGAINST
    return Speaks.OPEN


def _arms_with_baselines(findings: Findings) -> Iterator[tuple[TrainedArm, TrainedArm]]:
    """Yields each arm or control with its baseline, if the baseline has results."""
    for arm, baseline in with_baselines((*findings.arms, *findings.controls)):
        if baseline is not None and not arm.is_baseline:
            yield arm, baseline


def _change(
    curves: Iterable[Mapping[int, float]], step: int, last: int, margin: float
) -> Difference | None:
    """Returns the difference at a step minus the difference at the last step, paired by seed.

    `curves` are the differences of each seed by step. Returns None if no seed has both steps.
    """
    changes = [curve[step] - curve[last] for curve in curves if step in curve and last in curve]
    if not changes:
        return None
    return inference.paired_test(changes, margin)


def _differences_by_step(arm: TrainedArm, baseline: TrainedArm) -> list[dict[int, float]]:
    """Returns the differences in validation loss by step, one dict for each seed.

    The seeds are those that both arms finished.
    """
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

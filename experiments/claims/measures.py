"""Rows of evidence beyond verdicts on arms: early losses, growth, untuned differences."""

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
    """Counts arms whose difference from the baseline changes between an early step and the end.

    The differences in validation loss are paired by seed. Controls are left out. A change is tested
    like the difference of a verdict, but without the errors of documents and tuning. All steps
    share the error rate. The change of an arm stays undecided if a trial diverged or a rule is
    broken.

    Returns:
        A row for each early step. The row supports the claim if any difference changes by more than
        the margin. The row refutes the claim if every change is equivalent to zero.
    """
    margin = findings.study.margin
    # For each arm, a curve of differences for each seed.
    curves_by_arm: dict[ArmKey, list[dict[int, float]]] = {}
    looks: dict[ArmKey, int] = {}
    diverged: dict[ArmKey, tuple[int, int]] = {}  # numbers of trials, (the arm's, the baseline's)
    for arm, baseline in _arms_with_baselines(findings):
        if arm.key.control is None:
            curves_by_arm[arm.key] = _differences_by_step(arm, baseline)
            looks[arm.key] = findings.study.look(arm.key, baseline.key)
            # `decision.judge` leaves an arm undecided if a trial of each diverged.
            diverged[arm.key] = (1, 1) if _is_withheld(arm, baseline) else (0, 0)

    steps: set[int] = set()
    for curves in curves_by_arm.values():
        for curve in curves:
            steps.update(curve)
    last_step = max(steps, default=0)
    early_steps = sorted(steps - {last_step})
    rows = []
    for step in early_steps:
        changes = {}
        for key, curves in curves_by_arm.items():
            changes[key] = _change(curves, step, last_step, margin)
        judged = decision.judge(
            changes,
            diverged=diverged,
            planned=findings.num_comparisons * len(early_steps),
            looks=looks,
        )
        context = {
            'arms': str(len(curves_by_arm)),
            'fraction of the steps': f'{step / last_step:g}',
        }
        decisions = [judgement.decision for judgement in judged.values()]
        rows.append(_row_of_changed_arms(decisions, context))
    return rows


def _row_of_changed_arms(decisions: list[Decision], context: Mapping[str, str]) -> Row:
    """Returns the row of `early` for one step, from the decisions on the changes of the arms."""
    # 'better' and 'worse' mean a change by more than the margin.
    num_changed = decisions.count(Decision.BETTER) + decisions.count(Decision.WORSE)
    if num_changed:
        speaks = Speaks.FOR
    elif set(decisions) == {Decision.EQUIVALENT}:
        speaks = Speaks.AGAINST
    else:
        speaks = Speaks.OPEN
    quantity = 'arms whose difference changes by more than the margin'
    return Row(quantity, Kind.MEASURED, context, float(num_changed), speaks)


def growth(findings: Findings, variant: str) -> list[Row]:
    """Measures how much the loss difference between a variant and the baseline grows in training.

    The variant has the baseline's shape. The growth is the difference in validation loss at the
    last evaluation minus the difference at the first one, paired by seed.

    Returns:
        A row for each size and corpus. The claim is that the difference does not grow. The claim is
        supported if the 95 % interval lies below the margin, and refuted if it lies above zero.
    """
    margin = findings.study.margin
    rows = []
    for arm, baseline in _arms_with_baselines(findings):
        if arm.variant != variant or arm.key.control != SAME_SHAPE:
            continue
        curves = _differences_by_step(arm, baseline)
        if not curves:
            continue
        steps = list(curves[0])  # those of every seed
        if len(steps) < 2:
            continue
        first_step = min(steps)
        last_step = max(steps)
        growth_by_seed = [curve[last_step] - curve[first_step] for curve in curves]
        mean_growth = inference.paired_test(growth_by_seed, margin)
        quantity = f'growth of the difference from {first_step / last_step:.0%} of the steps on'
        speaks = _speaks_of_interval(arm, baseline, mean_growth, below=margin, above=0.0)
        context = context_of(findings, arm)
        rows.append(difference_row(quantity, Kind.MEASURED, context, mean_growth, speaks=speaks))
    return rows


def at_one_rate(findings: Findings, variant: str) -> list[Row]:
    """Measures the loss difference of a variant and its baseline at one learning rate for both.

    Returns:
        A row for each size and corpus. The claim is that the variant is better by more than the
        margin. The claim is supported if the 95 % interval lies below -margin, and refuted if it
        lies above -margin.
    """
    margin = findings.study.margin
    rows = []
    for arm, baseline in _arms_with_baselines(findings):
        variant_of_arm = findings.study.bare(arm.variant)  # 'qk/no_v [d_ff]' -> 'qk/no_v'
        if variant_of_arm != variant or arm.difference is None:
            continue
        quantity = f'{variant} at one learning rate for both'
        context = context_of(findings, arm)
        context |= {'baseline': 'untuned', 'learning rate': f'{arm.learning_rate:g}'}
        speaks = _speaks_of_interval(arm, baseline, arm.difference, below=-margin, above=-margin)
        rows.append(difference_row(quantity, Kind.MEASURED, context, arm.difference, speaks=speaks))
    return rows


def _is_withheld(arm: TrainedArm, baseline: TrainedArm) -> bool:
    """Returns whether no verdict is allowed, because a trial diverged or a rule is broken."""
    has_diverged = arm.num_diverged > 0 or baseline.num_diverged > 0
    return has_diverged or bool(arm.blocks) or bool(baseline.blocks)


def _speaks_of_interval(
    arm: TrainedArm, baseline: TrainedArm, difference: Difference, below: float, above: float
) -> Speaks:
    """Returns FOR if the 95 % interval lies below `below`, AGAINST if above `above`, else OPEN."""
    if _is_withheld(arm, baseline) or difference.low is None or difference.high is None:
        return Speaks.OPEN
    if difference.high < below:
        return Speaks.FOR
    if difference.low > above:
        return Speaks.AGAINST
    return Speaks.OPEN


def _arms_with_baselines(findings: Findings) -> Iterator[tuple[TrainedArm, TrainedArm]]:
    """Yields each arm, controls included, with its baseline if the baseline has results."""
    for arm, baseline in with_baselines((*findings.arms, *findings.controls)):
        if baseline is not None and not arm.is_baseline:
            yield arm, baseline


def _change(
    curves: Iterable[Mapping[int, float]], step: int, last_step: int, margin: float
) -> Difference | None:
    """Tests curve[step] - curve[last_step] over seeds. Returns None if no seed has both steps."""
    change_by_seed = []
    for curve in curves:
        if step in curve and last_step in curve:
            change_by_seed.append(curve[step] - curve[last_step])
    if not change_by_seed:
        return None
    return inference.paired_test(change_by_seed, margin)


def _differences_by_step(arm: TrainedArm, baseline: TrainedArm) -> list[dict[int, float]]:
    """Returns the validation loss minus the baseline's, by step.

    The list has a dict for each seed that both arms have.
    """
    baseline_trials = baseline.by_seed
    curves = []
    for seed, trial in arm.by_seed.items():
        if seed not in baseline_trials:
            continue
        losses = trial.evaluations
        baseline_losses = baseline_trials[seed].evaluations
        if losses and baseline_losses:
            steps = [step for step in losses if step in baseline_losses]
            curves.append({step: losses[step] - baseline_losses[step] for step in steps})
    return curves

"""Computes the findings of a study, which all tables, figures and pages show."""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from qkattn.errors import ReportError
from qkattn.stats import scaling
from qkattn.storage.files import Files, as_path
from qkattn.study import stored
from qkattn.study.arm_key import LONGER, SAME_SHAPE, ArmKey
from qkattn.study.family import is_compared
from qkattn.verdict import judging, longer, rules
from qkattn.verdict.codes import Comparison, Remark, RemarkCode
from qkattn.verdict.comparing import compare
from qkattn.verdict.findings import Findings, Scaling
from qkattn.verdict.repeats import with_earlier_arms
from qkattn.verdict.trained_arm import Decomposition, TrainedArm, arms_of, with_baselines
from qkattn.verdict.trained_study import TrainedStudy, load_study

# Remarks that withhold a verdict, but still allow an estimate of the difference.
WITHHOLD_VERDICT_ONLY = (
    RemarkCode.NOT_BRACKETED,
    RemarkCode.UNBOUNDED_OPTIMUM,
    RemarkCode.FEW_DOCUMENTS,
    RemarkCode.NO_TEST,
    RemarkCode.POST_HOC,
    RemarkCode.NO_YARDSTICK,
    RemarkCode.BIMODAL_SEEDS,
    RemarkCode.BELOW_YARDSTICK,
    RemarkCode.LITTLE_CONTEXT,
    RemarkCode.OUTDATED_YARDSTICK,
    RemarkCode.LOW_BLEU,
    RemarkCode.SOURCES_UNUSED,
)


def load_findings(directory: str | Path) -> Findings:
    """Reads a study and computes its findings.

    Findings of a stored study, whose logs are in an archive, are cached until a file changes.

    Raises:
        ReportError: The study cannot be read (`load_study`).
    """
    path = as_path(directory)
    files = stored.open_files(path)  # `StoredFiles` if the logs are in an archive
    if isinstance(files, stored.StoredFiles):
        return _load_stored(path, files)
    study = load_study(path)
    return find(study)


@functools.lru_cache(maxsize=32)
def _load_stored(directory: Path, files: Files) -> Findings:
    """Computes the findings of a stored study, with a cache.

    `files` is only a part of the cache key: once a file of the study changes, it is another object.
    """
    study = load_study(directory)
    return find(study)


def find(study: TrainedStudy, *, read_longer: bool = True) -> Findings:
    """Computes the findings of a study.

    Args:
        study: The study. The studies that it repeats are read, too, to pool their seeds.
        read_longer: Whether to read studies in sibling directories that train the same arms longer,
            to see which differences last.

    Raises:
        ReportError: A repeated study cannot be read.
    """
    earlier_findings = _earlier_findings(study)
    arms = with_earlier_arms(study, arms_of(study), earlier_findings)

    # Apply the rules, compare the arms with their baselines, and decide on them.
    remarks = rules.check(study, arms)
    general_remarks = [remark for remark in remarks if remark.arm is None]
    blocks = [remark for remark in general_remarks if remark.blocks]  # no arm gets a verdict
    arms = _with_comparisons(study, arms, remarks)
    arms = _with_verdicts(study, arms, blocks)

    # Compare the differences with the differences after longer training.
    longer_findings = _longer_findings(study) if read_longer and study.tuned else []
    settlings = longer.settlings(study, arms, blocks, longer_findings)
    arms = tuple(dataclasses.replace(arm, settling=settlings.get(arm.key)) for arm in arms)
    return Findings(
        study=study,
        arms=tuple(arm for arm in arms if arm.key.control is None),
        controls=tuple(arm for arm in arms if arm.key.control),
        remarks=remarks,
        scaling=() if blocks else _scaling(study, arms),
        num_comparisons=judging.family_size(study) if study.tuned else 0,
        positive=judging.positive_controls(study, arms, blocks) if study.tuned else (),
    )


def _earlier_findings(study: TrainedStudy) -> dict[str, Findings]:
    """Returns the findings of the studies that a study repeats, by study name."""
    findings_by_name = {}
    for earlier in study.earlier:
        if earlier.path is not None:  # None if the study is lost
            findings_by_name[earlier.name] = load_findings(earlier.path)
    return findings_by_name


def _longer_findings(study: TrainedStudy) -> list[Findings]:
    """Returns the findings of the studies beside a study that train its arms longer.

    Studies that are damaged or have no results are left out.
    """
    longer_findings = []
    for path in longer.studies_beside(study):
        with contextlib.suppress(ReportError):  # leaves out this study
            longer_study = load_study(path)
            findings = find(longer_study, read_longer=False)
            longer_findings.append(findings)
    return longer_findings


def _with_comparisons(
    study: TrainedStudy, arms: Sequence[TrainedArm], remarks: Sequence[Remark]
) -> tuple[TrainedArm, ...]:
    """Adds to each arm its remarks and its comparison with the baseline."""
    completed = []
    for arm, baseline in with_baselines(arms):
        comparison = None
        if baseline is not None and not arm.is_baseline:
            comparison = compare(arm, baseline, study.margin)
        own_remarks = tuple(remark for remark in remarks if remark.arm == arm.key)
        completed.append(dataclasses.replace(arm, comparison=comparison, remarks=own_remarks))
    return tuple(completed)


def _with_verdicts(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> tuple[TrainedArm, ...]:
    """Adds to each arm its verdict, and the parts of its difference from the baseline.

    Only a tuned study has verdicts. `blocks` are the remarks that withhold every verdict.
    """
    verdicts = judging.primary_verdicts(study, arms, blocks) if study.tuned else {}
    parts_by_arm = _decompositions(study, arms, blocks)
    judged_arms = []
    for arm in arms:
        verdict = verdicts.get(arm.key)
        parts = parts_by_arm.get(arm.key, Decomposition())
        judged_arms.append(dataclasses.replace(arm, verdict=verdict, parts=parts))
    return tuple(judged_arms)


def _decompositions(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> dict[ArmKey, Decomposition]:
    """Splits each primary arm's difference from its baseline into parts.

    For example, an arm without W_O may have a loss that is 0.010 nats/token below the baseline:

        same_shape    +0.004   from removing W_O, at the baseline's shape
        reinvesting   -0.014   from spending the saved parameters on a larger model

    A third estimate, `longer`, is the arm minus the baseline after longer training of both.

    Args:
        arms: All arms of the study.
        blocks: The blocking remarks that are about every arm or about the study as a whole.

    Returns:
        The parts by arm key.
    """
    arm_by_key = {arm.key: arm for arm in arms}
    # A remark about the study as a whole blocks verdicts, but not estimates.
    blocks_of_every_arm = [remark for remark in blocks if remark.every_arm]

    def difference(arm: TrainedArm | None, other: TrainedArm | None) -> Comparison | None:
        return _estimate(arm, other, blocks_of_every_arm, study.margin)

    parts_by_arm = {}
    primary_arms = [arm for arm in arms if is_compared(arm.key, study.baseline)]
    for arm in primary_arms:
        bare_variant = study.bare(arm.variant)  # 'qk/no_o' for 'qk/no_o [d_ff]'
        same_shape_key = arm.key._replace(variant=bare_variant, control=SAME_SHAPE)
        longer_key = arm.key._replace(control=LONGER)
        longer_baseline_key = arm.baseline_key._replace(control=LONGER)

        # Each of these is None if it has no results.
        baseline = arm_by_key.get(arm.baseline_key)
        same_shape = arm_by_key.get(same_shape_key)
        longer_arm = arm_by_key.get(longer_key)
        longer_baseline = arm_by_key.get(longer_baseline_key)
        parts_by_arm[arm.key] = Decomposition(
            same_shape=difference(same_shape, baseline),
            reinvesting=difference(arm, same_shape),
            longer=difference(longer_arm, longer_baseline),
        )
    return parts_by_arm


def _estimate(
    arm: TrainedArm | None,
    other: TrainedArm | None,
    blocks_of_every_arm: Sequence[Remark],
    margin: float,
) -> Comparison | None:
    """Compares two arms; returns None if an arm is missing or a remark prevents an estimate."""
    if arm is None or other is None:
        return None
    # Some remarks withhold only the verdict, but still allow an estimate.
    blocks_of_pair = [*blocks_of_every_arm, *arm.blocks, *other.blocks]
    allows_estimate = all(remark.code in WITHHOLD_VERDICT_ONLY for remark in blocks_of_pair)
    return compare(arm, other, margin) if allows_estimate else None


def _scaling(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Scaling, ...]:
    """Fits a scaling law, loss against parameters, to each variant on each corpus.

    Returns () if the study has a single size.
    """
    if len(study.sizes) < 2:
        return ()
    arms_to_fit = _arms_to_fit(study, arms)
    laws = {}
    for variant_and_corpus, arm_by_size in arms_to_fit.items():
        laws[variant_and_corpus] = _law(list(arm_by_size.values()))

    fits = []
    for (variant, corpus), arm_by_size in arms_to_fit.items():
        law = laws[variant, corpus]
        worth = None  # for the baseline itself, and if none of its arms can be fitted
        baseline_by_size = arms_to_fit.get((study.baseline, corpus))
        if variant != study.baseline and baseline_by_size is not None:
            baseline_law = laws[study.baseline, corpus]
            worth = _worth(arm_by_size, baseline_by_size, baseline_law)
        fits.append(Scaling(variant, corpus, law, worth))
    return tuple(fits)


def _arms_to_fit(
    study: TrainedStudy, arms: Sequence[TrainedArm]
) -> dict[tuple[str, str], dict[str, TrainedArm]]:
    """Returns the arms that a scaling law may use, by (variant, corpus), then by size.

    An arm is left out if its mean loss is biased, or if its baseline is not trained well enough.
    """
    untrained_baselines: set[ArmKey] = set()
    for baseline in rules.baselines(study, arms):
        reasons = rules.why_untrained(baseline)
        if any(reasons):
            untrained_baselines.add(baseline.key)

    arms_to_fit: dict[tuple[str, str], dict[str, TrainedArm]] = {}
    for arm in arms:
        is_control = arm.key.control is not None
        has_trained_baseline = arm.baseline_key not in untrained_baselines
        if not is_control and arm.scales and has_trained_baseline:
            arm_by_size = arms_to_fit.setdefault((arm.variant, arm.corpus), {})
            arm_by_size[arm.size] = arm
    return arms_to_fit


def _worth(
    arm_by_size: Mapping[str, TrainedArm],
    baseline_by_size: Mapping[str, TrainedArm],
    baseline_law: scaling.Law | scaling.Problem,
) -> scaling.Interval | scaling.Problem:
    """Returns how many baseline parameters one parameter of a variant is worth.

    For example, if a variant with 1.0 million parameters has the loss of a baseline with 1.2
    million parameters, one parameter is worth 1.2. The result is a mean over sizes.
    """
    points = []  # (parameters, baseline's parameters, difference in loss) of each size
    for size, arm in arm_by_size.items():
        baseline = baseline_by_size.get(size)
        if baseline is not None and arm.difference is not None:
            point = (_parameters(arm), _parameters(baseline), arm.difference.mean)
            points.append(point)
    return scaling.multiplier(baseline_law, points)


def _law(arms: Sequence[TrainedArm]) -> scaling.Law | scaling.Problem:
    """Fits a scaling law to the mean losses of one variant at several sizes."""
    parameters = [_parameters(arm) for arm in arms]
    losses = [arm.loss for arm in arms if arm.loss]
    means = [loss.mean for loss in losses]
    # The variance of the mean over n seeds, sd**2 / n, averaged over sizes.
    variances_of_mean = []
    for loss in losses:
        sd = loss.sd or 0.0  # None for a single seed
        variances_of_mean.append(sd**2 / loss.n)
    variance = statistics.fmean(variances_of_mean)
    degrees_of_freedom = max(1, sum(loss.n - 1 for loss in losses))
    return scaling.fit(parameters, means, seeds=(variance, degrees_of_freedom))


def _parameters(arm: TrainedArm) -> int:
    """Returns the parameter count of an arm's models."""
    return arm.example.parameters['total']

"""Computes the findings of a study: differences from the baseline, verdicts, scaling fits, remarks.

All tables, figures and pages show these findings. `qkattn.stats` has the statistics.
"""

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

# An arm with one of these remarks has no verdict, but its difference can still be estimated.
UNSURE = (
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
    """Reads a study and computes its findings; raises as `load_study`.

    A stored study has its logs in an archive. Its findings are kept in memory until one of its
    files changes.
    """
    path = as_path(directory)
    files = stored.open_files(path)
    if isinstance(files, stored.StoredFiles):
        return _load_stored(path, files)
    return find(load_study(path))


@functools.lru_cache(maxsize=32)
def _load_stored(directory: Path, files: Files) -> Findings:
    """Computes the findings of a stored study once for each `files`.

    `stored.open_files` returns another `files` object once a file of the study has changed.
    """
    return find(load_study(directory))


def find(study: TrainedStudy, *, read_longer: bool = True) -> Findings:
    """Computes the findings of a study.

    Two kinds of other studies are read:

    - The studies that it repeats. Their seeds are pooled with its own. If one cannot be read,
      raises as `load_study`.
    - Studies in directories beside it that train the same arms longer. They say which differences
      last. Without `read_longer`, they are left out.
    """
    # Each step fills in further fields of the arms, which the next step needs. First come the same
    # arms of earlier studies, the remarks of the rules, and the differences from the baselines.
    arms = with_earlier_arms(study, arms_of(study), _earlier_findings(study))
    remarks = rules.check(study, arms)
    blocks = [remark for remark in remarks if remark.blocks and remark.arm is None]
    arms = _with_comparisons(study, arms, remarks)

    # Then the verdicts, and the parts of each difference.
    verdicts = judging.primary_verdicts(study, arms, blocks) if study.tuned else {}
    parts = _decomposed(study, arms, blocks)
    judged_arms = []
    for arm in arms:
        verdict = verdicts.get(arm.key)
        parts_of_arm = parts.get(arm.key, Decomposition())
        judged_arms.append(dataclasses.replace(arm, verdict=verdict, parts=parts_of_arm))

    # Last, whether the differences last when models are trained longer.
    longer_findings = _longer_findings(study) if read_longer and study.tuned else []
    settlings = longer.settlings(study, judged_arms, blocks, longer_findings)
    arms = tuple(dataclasses.replace(arm, settling=settlings.get(arm.key)) for arm in judged_arms)
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
    """Returns the findings of the earlier studies of a chain, by name, without lost studies."""
    findings_by_name = {}
    for earlier in study.earlier:
        if earlier.path is not None:
            findings_by_name[earlier.name] = load_findings(earlier.path)
    return findings_by_name


def _longer_findings(study: TrainedStudy) -> list[Findings]:
    """Returns the findings of the studies beside a study that train its arms longer.

    A study that is damaged or has no results is left out; its own report says why.
    """
    longer_findings = []
    for path in longer.studies_beside(study):
        with contextlib.suppress(ReportError):
            longer_study = load_study(path)
            # Whether its own differences last is not asked here.
            longer_findings.append(find(longer_study, read_longer=False))
    return longer_findings


def _with_comparisons(
    study: TrainedStudy, arms: Sequence[TrainedArm], remarks: Sequence[Remark]
) -> tuple[TrainedArm, ...]:
    """Adds to each arm its own remarks and its comparison with its baseline."""
    completed = []
    for arm, baseline in with_baselines(arms):
        comparison = None
        if baseline is not None and not arm.is_baseline:
            comparison = compare(arm, baseline, study.margin)
        own_remarks = tuple(remark for remark in remarks if remark.arm == arm.key)
        completed.append(dataclasses.replace(arm, comparison=comparison, remarks=own_remarks))
    return tuple(completed)


def _decomposed(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> dict[ArmKey, Decomposition]:
    """Splits the difference of each primary arm from its baseline into parts, by the arm's key.

    For example, an arm without W_O is better than the baseline by 0.010 nats/token. At the
    baseline's shape it has fewer parameters and is worse by 0.004 (`same_shape`). Spending the
    saved parameters on a larger model gains 0.014 (`reinvesting`).

    `blocks` are the remarks that withhold every verdict.
    """
    arm_by_key = {arm.key: arm for arm in arms}
    # A remark about every arm counts for each of them. Other remarks in `blocks` are about the
    # study, and do not prevent an estimate.
    blocks_of_every_arm = [remark for remark in blocks if remark.every_arm]
    margin = study.margin
    parts = {}
    for arm in arms:
        if not is_compared(arm.key, study.baseline):
            continue
        # The label of a same-shape control does not name where saved parameters go: it saves none.
        bare_label = study.bare(arm.variant)
        same_shape = arm_by_key.get(arm.key._replace(variant=bare_label, control=SAME_SHAPE))
        baseline = arm_by_key.get(arm.baseline_key)
        longer_arm = arm_by_key.get(arm.key._replace(control=LONGER))
        longer_baseline = arm_by_key.get(arm.baseline_key._replace(control=LONGER))
        parts[arm.key] = Decomposition(
            same_shape=_estimated(same_shape, baseline, blocks_of_every_arm, margin),
            reinvesting=_estimated(arm, same_shape, blocks_of_every_arm, margin),
            longer=_estimated(longer_arm, longer_baseline, blocks_of_every_arm, margin),
        )
    return parts


def _estimated(
    arm: TrainedArm | None,
    other: TrainedArm | None,
    blocks_of_every_arm: Sequence[Remark],
    margin: float,
) -> Comparison | None:
    """Compares two arms; returns None if their difference cannot be estimated.

    It cannot if an arm is missing, or if a remark withholds the verdict of an arm. The remarks in
    UNSURE are an exception: they withhold a verdict, but not an estimate.
    """
    if arm is None or other is None:
        return None
    blocks_of_pair = [*blocks_of_every_arm, *arm.blocks, *other.blocks]
    if any(remark.code not in UNSURE for remark in blocks_of_pair):
        return None
    return compare(arm, other, margin)


def _scaling(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Scaling, ...]:
    """Fits a scaling law, loss against parameters, to each variant on each corpus.

    A size is left out of the fit if the baseline is not trained well enough there, or if the arm's
    mean loss there is biased (`TrainedArm.scales`). A variant without any size left has no fit.
    """
    if len(study.sizes) < 2:
        return ()
    untrained_baselines: set[ArmKey] = set()
    for baseline in rules.baselines(study, arms):
        if any(rules.why_untrained(baseline)):
            untrained_baselines.add(baseline.key)

    # The arms to fit: for each variant and corpus, the arm of each size.
    arms_to_fit: dict[tuple[str, str], dict[str, TrainedArm]] = {}
    for arm in arms:
        is_primary = arm.key.control is None
        if is_primary and arm.scales and arm.baseline_key not in untrained_baselines:
            arm_by_size = arms_to_fit.setdefault((arm.variant, arm.corpus), {})
            arm_by_size[arm.size] = arm

    laws = {}
    for key, arm_by_size in arms_to_fit.items():
        laws[key] = _law(list(arm_by_size.values()))

    # What a parameter of a variant is worth follows from the law of the baseline.
    fits = []
    for (variant, corpus), arm_by_size in arms_to_fit.items():
        baseline_key = (study.baseline, corpus)
        worth = None
        if variant != study.baseline and baseline_key in arms_to_fit:
            worth = _worth(arm_by_size, arms_to_fit[baseline_key], laws[baseline_key])
        fits.append(Scaling(variant, corpus, laws[variant, corpus], worth))
    return tuple(fits)


def _worth(
    arm_by_size: Mapping[str, TrainedArm],
    baseline_by_size: Mapping[str, TrainedArm],
    baseline_law: scaling.Law | scaling.Problem,
) -> scaling.Interval | scaling.Problem:
    """Returns how many baseline parameters one parameter of a variant is worth.

    For example, a variant with 1.0 million parameters has the loss that the baseline would reach
    with 1.2 million. One of its parameters is then worth 1.2 of the baseline's. The result is a
    mean over the sizes at which both have results.
    """
    # For each size: the parameters of the arm, those of the baseline, and the difference in loss.
    points = []
    for size, arm in arm_by_size.items():
        if size in baseline_by_size and arm.difference:
            baseline_parameters = _parameters(baseline_by_size[size])
            points.append((_parameters(arm), baseline_parameters, arm.difference.mean))
    return scaling.multiplier(baseline_law, points)


def _law(arms: Sequence[TrainedArm]) -> scaling.Law | scaling.Problem:
    """Fits a scaling law to the mean losses of one variant at several sizes."""
    losses = [arm.loss for arm in arms if arm.loss]
    means = [loss.mean for loss in losses]
    # The variance of a mean over seeds, averaged over sizes, and its degrees of freedom.
    variances = [(loss.sd or 0.0) ** 2 / loss.n for loss in losses]
    variance = statistics.fmean(variances)
    degrees = sum(loss.n - 1 for loss in losses) or 1
    parameters = [_parameters(arm) for arm in arms]
    return scaling.fit(parameters, means, (variance, degrees))


def _parameters(arm: TrainedArm) -> int:
    """Returns the number of trained parameters of an arm's models."""
    return arm.example.parameters['total']

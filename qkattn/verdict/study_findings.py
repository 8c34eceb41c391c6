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
from qkattn.verdict.repeats import with_earlier
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

    The findings of a stored study are kept in memory until one of its files changes.
    """
    path = as_path(directory)
    files = stored.opened(path)
    # `opened` returns the directory itself unless the study is stored.
    is_stored = files != path
    if is_stored:
        return _load_stored(path, files)
    return find(load_study(path))


@functools.lru_cache(maxsize=32)
def _load_stored(directory: Path, files: Files) -> Findings:
    """Computes the findings of a stored study once for each `files`.

    `stored.opened` returns another `files` object once a file of the study has changed.
    """
    return find(load_study(directory))


def find(study: TrainedStudy, *, alone: bool = False) -> Findings:
    """Computes the findings of a study.

    Seeds of the studies that it repeats are pooled with its own. Longer studies in directories
    beside it say which differences are settled; with `alone`, they are not read. Raises as
    `load_study` if a study that it repeats cannot be read.
    """
    # Each step fills in further fields of the arms, which the next step needs.
    arms = with_earlier(study, arms_of(study), _earlier_findings(study))
    remarks = rules.check(study, arms)
    blocks = [remark for remark in remarks if remark.blocks and remark.arm is None]
    arms = _compared(study, arms, remarks)

    verdicts = judging.primary(study, arms, blocks) if study.tuned else {}
    parts = _decomposed(study, arms, blocks)
    judged_arms = []
    for arm in arms:
        verdict = verdicts.get(arm.key)
        parts_of_arm = parts.get(arm.key, Decomposition())
        judged_arms.append(dataclasses.replace(arm, verdict=verdict, parts=parts_of_arm))

    longer_studies = [] if alone or not study.tuned else _longer_findings(study)
    settlings = longer.settlings(study, judged_arms, blocks, longer_studies)
    arms = tuple(dataclasses.replace(arm, settling=settlings.get(arm.key)) for arm in judged_arms)
    return Findings(
        study=study,
        arms=tuple(arm for arm in arms if arm.key.control is None),
        controls=tuple(arm for arm in arms if arm.key.control),
        remarks=remarks,
        scaling=() if blocks else _scaling(study, arms),
        num_comparisons=judging.family_size(study) if study.tuned else 0,
        positive=judging.positive(study, arms, blocks) if study.tuned else (),
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
            longer_findings.append(find(longer_study, alone=True))
    return longer_findings


def _compared(
    study: TrainedStudy, arms: Sequence[TrainedArm], remarks: Sequence[Remark]
) -> tuple[TrainedArm, ...]:
    """Adds to each arm its remarks and its comparison with its baseline."""
    compared = []
    for arm, baseline in with_baselines(arms):
        comparison = None
        if baseline is not None and not arm.is_baseline:
            comparison = compare(arm, baseline, study.margin)
        own_remarks = tuple(remark for remark in remarks if remark.arm == arm.key)
        compared.append(dataclasses.replace(arm, comparison=comparison, remarks=own_remarks))
    return tuple(compared)


def _decomposed(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> dict[ArmKey, Decomposition]:
    """Splits the difference of each primary arm from its baseline into parts.

    See `Decomposition` for the parts. `blocks` are the remarks that withhold every verdict.
    """
    arm_by_key = {arm.key: arm for arm in arms}
    # These remarks stand for one about each arm. Other blocks are about the study, and its
    # differences can still be estimated.
    blocks_of_every_arm = [remark for remark in blocks if remark.every_arm]

    def part(arm: TrainedArm | None, other: TrainedArm | None) -> Comparison | None:
        """Compares two arms.

        Returns None if an arm is missing, or if it breaks a rule that is not in UNSURE: its
        difference cannot be estimated then.
        """
        if arm is None or other is None:
            return None
        blocks_of_pair = [*blocks_of_every_arm, *arm.blocks, *other.blocks]
        if any(remark.code not in UNSURE for remark in blocks_of_pair):
            return None
        return compare(arm, other, study.margin)

    parts = {}
    for arm in arms:
        if not is_compared(arm.key, study.baseline):
            continue
        # The label of a same-shape control has no destination of saved parameters.
        bare_label = study.bare(arm.variant)
        same_shape = arm_by_key.get(arm.key._replace(variant=bare_label, control=SAME_SHAPE))
        baseline = arm_by_key.get(arm.group)
        longer_arm = arm_by_key.get(arm.key._replace(control=LONGER))
        longer_baseline = arm_by_key.get(arm.group._replace(control=LONGER))
        parts[arm.key] = Decomposition(
            same_shape=part(same_shape, baseline),
            reinvesting=part(arm, same_shape),
            longer=part(longer_arm, longer_baseline),
        )
    return parts


def _scaling(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Scaling, ...]:
    """Fits a scaling law to each variant on each corpus.

    A fit uses the sizes at which the baseline is trained well enough and at which the arm's loss is
    not biased (`TrainedArm.scales`). A variant without such a size has no fit.
    """
    if len(study.sizes) < 2:
        return ()
    untrained_groups: set[ArmKey] = set()
    for baseline in rules.baselines(study, arms):
        if any(rules.untrained(baseline)):
            untrained_groups.add(baseline.group)

    # The arms of each variant and corpus, by size.
    arms_by_size: dict[tuple[str, str], dict[str, TrainedArm]] = {}
    for arm in arms:
        if arm.key.control is None and arm.group not in untrained_groups and arm.scales:
            arm_by_size = arms_by_size.setdefault((arm.variant, arm.corpus), {})
            arm_by_size[arm.size] = arm

    laws = {key: _law(list(arm_by_size.values())) for key, arm_by_size in arms_by_size.items()}

    fits = []
    for (variant, corpus), arm_by_size in arms_by_size.items():
        worth = None
        baseline_key = (study.baseline, corpus)
        if baseline_key in arms_by_size and variant != study.baseline:
            worth = _worth(arm_by_size, arms_by_size[baseline_key], laws[baseline_key])
        fits.append(Scaling(variant, corpus, laws[variant, corpus], worth))
    return tuple(fits)


def _worth(
    arm_by_size: Mapping[str, TrainedArm],
    baseline_by_size: Mapping[str, TrainedArm],
    baseline_law: scaling.Law | scaling.Problem,
) -> scaling.Interval | scaling.Problem:
    """Returns how many baseline parameters one parameter of a variant is worth.

    It follows from the law of the baseline and the differences at the sizes that both have.
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

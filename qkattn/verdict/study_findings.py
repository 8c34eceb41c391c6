"""The findings of a study: differences from the baseline, verdicts, scaling fits, remarks.

Computed once for all tables, figures and pages; the statistics are those of `qkattn.stats`.
"""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Sequence
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

# Remarks that withhold a verdict and leave an estimate.
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
    """The findings of a study; a stored one is read again only if its files changed.

    Raises as `load_study`.
    """
    path = as_path(directory)
    files = stored.opened(path)
    is_stored = files != path
    if is_stored:
        return _load_stored(path, files)
    return find(load_study(path))


@functools.lru_cache(maxsize=32)
def _load_stored(directory: Path, files: Files) -> Findings:
    """`files` is another object once a file of the study changed, so that it is read again."""
    return find(load_study(directory))


def find(study: TrainedStudy, *, alone: bool = False) -> Findings:
    """Computes the findings of a study, pooled with those of the studies that it repeats.

    Which differences are settled depends on longer studies beside it, unless it is to be judged
    `alone`. Raises as `load_study` where a study that it repeats cannot be read.
    """
    arms = with_earlier(study, arms_of(study), _of_chain(study))
    remarks = rules.check(study, arms)
    blocks = [remark for remark in remarks if remark.blocks and remark.arm is None]
    arms = _compared(study, arms, remarks)
    # Each step needs the arms of the one before it.
    verdicts = judging.primary(study, arms, blocks) if study.tuned else {}
    parts = _decomposed(study, arms, blocks)
    arms = tuple(
        dataclasses.replace(
            arm, verdict=verdicts.get(arm.key), parts=parts.get(arm.key, Decomposition())
        )
        for arm in arms
    )
    beside = [] if alone or not study.tuned else _beside(study)
    settlings = longer.settlings(study, arms, blocks, beside)
    arms = tuple(dataclasses.replace(arm, settling=settlings.get(arm.key)) for arm in arms)
    return Findings(
        study=study,
        arms=tuple(arm for arm in arms if arm.key.control is None),
        controls=tuple(arm for arm in arms if arm.key.control),
        remarks=remarks,
        scaling=() if blocks else _scaling(study, arms),
        num_comparisons=judging.family_size(study) if study.tuned else 0,
        positive=judging.positive(study, arms, blocks) if study.tuned else (),
    )


def _of_chain(study: TrainedStudy) -> dict[str, Findings]:
    """The findings of each earlier study of a chain that is kept, by its name."""
    return {
        earlier.name: load_findings(earlier.path)
        for earlier in study.earlier
        if earlier.path is not None
    }


def _beside(study: TrainedStudy) -> list[Findings]:
    """The findings of the longer studies beside a study that can be read."""
    longer_studies = []
    for path in longer.studies_beside(study):
        with contextlib.suppress(ReportError):  # without results, or damaged, as its report says
            longer_studies.append(find(load_study(path), alone=True))
    return longer_studies


def _compared(
    study: TrainedStudy, arms: Sequence[TrainedArm], remarks: Sequence[Remark]
) -> tuple[TrainedArm, ...]:
    """The arms, each with its remarks and with its comparison with its baseline."""
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
    """The parts of the difference of each primary arm but the baseline."""
    by_key = {arm.key: arm for arm in arms}
    shared = [remark for remark in blocks if remark.every_arm]

    def part(arm: TrainedArm | None, other: TrainedArm | None) -> Comparison | None:
        """The difference of two arms that break no rule but those that leave an estimate."""
        if arm is None or other is None:
            return None
        if any(remark.code not in UNSURE for remark in (*shared, *arm.blocks, *other.blocks)):
            return None
        return compare(arm, other, study.margin)

    parts = {}
    for arm in arms:
        if not is_compared(arm.key, study.baseline):
            continue
        # A control at the same shape has no destination in its name.
        bare = arm.key._replace(variant=study.bare(arm.variant), control=SAME_SHAPE)
        same_shape = by_key.get(bare)
        baseline = by_key.get(arm.group)
        longer_arm = by_key.get(arm.key._replace(control=LONGER))
        longer_baseline = by_key.get(arm.group._replace(control=LONGER))
        parts[arm.key] = Decomposition(
            same_shape=part(same_shape, baseline),
            reinvesting=part(arm, same_shape),
            longer=part(longer_arm, longer_baseline),
        )
    return parts


def _scaling(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Scaling, ...]:
    """Scaling fits of all variants that have a size to use, at which models are trained enough."""
    if len(study.sizes) < 2:
        return ()
    baselines = rules.baselines(study, arms)
    short = {baseline.group for baseline in baselines if any(rules.untrained(baseline))}
    curves: dict[tuple[str, str], dict[str, TrainedArm]] = {}  # by variant and corpus; by size
    for arm in arms:
        if arm.key.control is None and arm.group not in short and arm.scales:
            curves.setdefault((arm.variant, arm.corpus), {})[arm.size] = arm
    laws = {key: _law(list(curve.values())) for key, curve in curves.items()}
    fits = []
    for (variant, corpus), curve in curves.items():
        worth = None
        of_baseline = curves.get((study.baseline, corpus))
        if of_baseline is not None and variant != study.baseline:
            # Parameters of the arm and of its baseline, and their difference, by size.
            shared = [
                (_parameters(arm), _parameters(of_baseline[size]), arm.difference.mean)
                for size, arm in curve.items()
                if size in of_baseline and arm.difference
            ]
            worth = scaling.multiplier(laws[study.baseline, corpus], shared)
        fits.append(Scaling(variant, corpus, laws[variant, corpus], worth))
    return tuple(fits)


def _law(arms: Sequence[TrainedArm]) -> scaling.Law | scaling.Problem:
    """The fit to the mean losses of one variant at several sizes."""
    means = [arm.loss for arm in arms if arm.loss]
    # The variance of a mean over seeds, and the degrees of freedom of all of them together.
    variance = statistics.fmean((loss.sd or 0.0) ** 2 / loss.n for loss in means)
    degrees = sum(loss.n - 1 for loss in means) or 1
    parameters = [_parameters(arm) for arm in arms]
    return scaling.fit(parameters, [loss.mean for loss in means], (variance, degrees))


def _parameters(arm: TrainedArm) -> int:
    return arm.example.parameters['total']

"""The findings of a study: differences from the baseline, verdicts, scaling fits, remarks.

Computed once for all tables, figures and pages; the statistics are those of `qkattn.stats`.
"""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from qkattn.errors import ReportError
from qkattn.stats import scaling
from qkattn.storage.files import Files, as_path
from qkattn.study import stored
from qkattn.study.arm_key import LONGER, SAME_SHAPE, ArmKey
from qkattn.verdict import judging, longer, rules
from qkattn.verdict.codes import Comparison, Remark, RemarkCode
from qkattn.verdict.comparing import compare
from qkattn.verdict.findings import Findings, Scaling
from qkattn.verdict.repeats import with_earlier
from qkattn.verdict.trained_arm import Decomposition, TrainedArm, arms_of, with_baselines
from qkattn.verdict.trained_study import TrainedStudy, load_study

# Remarks that withhold a verdict and leave an estimate.
UNSURE = (
    *(RemarkCode.NOT_BRACKETED, RemarkCode.UNBOUNDED_OPTIMUM, RemarkCode.FEW_DOCUMENTS),
    *(RemarkCode.NO_TEST, RemarkCode.POST_HOC, RemarkCode.NO_YARDSTICK, RemarkCode.BIMODAL_SEEDS),
    *(RemarkCode.BELOW_YARDSTICK, RemarkCode.LITTLE_CONTEXT),
    *(RemarkCode.OUTDATED_YARDSTICK, RemarkCode.LOW_BLEU, RemarkCode.SOURCES_UNUSED),
)


def load_findings(directory: str | Path) -> Findings:
    """The findings of a study; a stored one is read again only if its files changed.

    Raises as `load_study`.
    """
    path = as_path(directory)
    files = stored.opened(path)
    if files == path:
        return _load.__wrapped__(path, files)
    return _load(path, files)


@functools.lru_cache(maxsize=32)
def _load(directory: Path, files: Files) -> Findings:
    """`files`, another object once a file of a stored study changed, tell when to read again."""
    return find(load_study(directory))


def find(study: TrainedStudy, *, alone: bool = False) -> Findings:
    """Computes the findings of a study, pooled with those of the studies that it repeats.

    Which differences are settled depends on longer studies beside it, unless it is to be judged
    `alone`. Raises as `load_study` where a study that it repeats cannot be read.
    """
    arms = with_earlier(study, arms_of(study), _of_chain(study))
    remarks = rules.check(study, arms)
    blocks = [remark for remark in remarks if remark.blocks and remark.arm is None]
    arms = tuple(
        dataclasses.replace(
            arm,
            comparison=None
            if arm.is_baseline or baseline is None
            else compare(arm, baseline, study.margin),
            remarks=tuple(remark for remark in remarks if remark.arm == arm.key),
        )
        for arm, baseline in with_baselines(arms)
    )
    verdicts = judging.primary(study, arms, blocks) if study.tuned else {}
    parts = dict(_decomposed(study, arms, blocks))
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


def _decomposed(
    study: TrainedStudy, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> Iterator[tuple[ArmKey, Decomposition]]:
    """The parts of each primary arm but the baseline."""
    by_key = {arm.key: arm for arm in arms}
    shared = [remark for remark in blocks if remark.every_arm]

    def part(one: TrainedArm | None, other: TrainedArm | None) -> Comparison | None:
        if one is None or other is None:
            return None
        if any(remark.code not in UNSURE for remark in (*shared, *one.blocks, *other.blocks)):
            return None
        return compare(one, other, study.margin)

    for arm in (arm for arm in arms if not arm.key.control and not arm.is_baseline):
        # A control at the same shape has no destination in its name.
        bare = arm.key._replace(variant=study.bare(arm.variant), control=SAME_SHAPE)
        same = by_key.get(bare)
        lengthened = by_key.get(arm.key._replace(control=LONGER))
        longest = by_key.get(arm.group._replace(control=LONGER))
        three = part(same, by_key.get(arm.group)), part(arm, same), part(lengthened, longest)
        yield arm.key, Decomposition(*three)


def _scaling(study: TrainedStudy, arms: Sequence[TrainedArm]) -> tuple[Scaling, ...]:
    """Scaling fits of all variants that have a size to use, at which models are trained enough."""
    if len(study.sizes) < 2:
        return ()
    short = {one.group for one in rules.baselines(study, arms) if [*rules.untrained(one)]}
    curves: dict[tuple[str, str], dict[str, TrainedArm]] = {}  # by variant and corpus; arms by size
    for arm in arms:
        if arm.key.control is None and arm.group not in short and arm.scales:
            curves.setdefault((arm.variant, arm.corpus), {})[arm.size] = arm

    def parameters(arm: TrainedArm) -> int:
        return arm.example.parameters['total']

    laws = {}
    for key, curve in curves.items():
        means = [arm.loss for arm in curve.values() if arm.loss]
        variance = statistics.fmean((one.sd or 0.0) ** 2 / one.n for one in means)
        seeds = variance, sum(one.n - 1 for one in means) or 1
        sizes = [*map(parameters, curve.values())]
        laws[key] = scaling.fit(sizes, [one.mean for one in means], seeds)
    made = []
    for (variant, corpus), curve in curves.items():
        worth = None
        key = (study.baseline, corpus)
        if key in curves and variant != study.baseline:
            shared = [
                (parameters(arm), parameters(curves[key][size]), arm.difference.mean)
                for size, arm in curve.items()
                if size in curves[key] and arm.difference
            ]
            worth = scaling.multiplier(laws[key], shared)
        made.append(Scaling(variant, corpus, laws[variant, corpus], worth))
    return tuple(made)

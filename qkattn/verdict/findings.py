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
from qkattn.study.arm_key import EQUAL_SHAPE, LONGER, ArmKey
from qkattn.verdict import judging, longer, rules
from qkattn.verdict.arms import Arm, Decomposition, arms_of, compare, with_baselines
from qkattn.verdict.codes import TEST, VALIDATION, Comparison, Remark, RemarkCode
from qkattn.verdict.judging import PositiveControl
from qkattn.verdict.load import Study, load_study
from qkattn.verdict.repeats import with_earlier

# Remarks that withhold a verdict and leave an estimate.
UNSURE = (
    *(RemarkCode.NOT_BRACKETED, RemarkCode.UNBOUNDED_OPTIMUM, RemarkCode.FEW_DOCUMENTS),
    *(RemarkCode.NO_TEST, RemarkCode.POST_HOC, RemarkCode.NO_YARDSTICK, RemarkCode.BIMODAL_SEEDS),
    *(RemarkCode.BELOW_YARDSTICK, RemarkCode.LITTLE_CONTEXT),
    *(RemarkCode.OUTDATED_YARDSTICK, RemarkCode.LOW_BLEU, RemarkCode.SOURCES_UNUSED),
)


PARTS = tuple(field.name for field in dataclasses.fields(Decomposition))


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss against parameters over the sizes of one variant on one corpus."""

    variant: str
    corpus: str
    law: scaling.Law | scaling.Problem
    # Baseline parameters that one of the variant is worth; None for the baseline or without one.
    worth: scaling.Interval | scaling.Problem | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """The findings of a study."""

    arms: tuple[Arm, ...]  # the primary ones: size by size, corpus by corpus, the baseline first
    controls: tuple[Arm, ...]  # the others, in the same order, without a verdict
    remarks: tuple[Remark, ...]  # all hygiene findings, the blocking ones first
    # One fit per variant and corpus over the arms that `scales`; empty for fewer than two sizes and
    # if a remark blocks every arm.
    scaling: tuple[Scaling, ...] = ()
    num_comparisons: int = 0  # the family of Holm's correction; 0 in a study without tuning
    positive: tuple[PositiveControl, ...] = ()  # decided as a family of their own

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """The remarks that withhold every verdict."""
        return tuple(remark for remark in self.remarks if remark.blocks and remark.arm is None)

    @property
    def has_intervals(self) -> bool:
        """Whether the difference of any arm from the baseline has an interval."""
        differences = [arm.difference for arm in self.arms]
        return any(one is not None and one.low is not None for one in differences)

    @property
    def has_part_intervals(self) -> bool:
        """Whether any part of the difference of any arm has an interval."""
        parts = [getattr(arm.parts, name) for arm in self.arms for name in PARTS]
        return any(one is not None and one.difference.low is not None for one in parts)

    @property
    def has_parts(self) -> bool:
        """Whether a part of the difference of any arm is known."""
        return any(arm.parts != Decomposition() for arm in self.arms)

    @property
    def split(self) -> str:
        """The split of the differences: TEST, or VALIDATION where trials have no test loss."""
        splits = {arm.comparison.split for arm in self.arms if arm.comparison}
        return VALIDATION if VALIDATION in splits else TEST


def load_findings(directory: str | Path) -> tuple[Study, Findings]:
    """A study with its findings; a stored one is read again only if its files changed.

    Raises as `load_study`.
    """
    path = as_path(directory)
    files = stored.opened(path)
    if files == path:
        return _load.__wrapped__(path, files)
    return _load(path, files)


@functools.lru_cache(maxsize=32)
def _load(directory: Path, files: Files) -> tuple[Study, Findings]:
    """`files`, another object once a file of a stored study changed, tell when to read again."""
    study = load_study(directory)
    return study, find(study)


def find(study: Study, *, alone: bool = False) -> Findings:
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
            else compare(arm, baseline, study),
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
        arms=tuple(arm for arm in arms if arm.key.control is None),
        controls=tuple(arm for arm in arms if arm.key.control),
        remarks=remarks,
        scaling=() if blocks else _scaling(study, arms),
        num_comparisons=judging.family_size(study) if study.tuned else 0,
        positive=judging.positive(study, arms, blocks) if study.tuned else (),
    )


def _of_chain(study: Study) -> dict[str, tuple[Study, tuple[Arm, ...]]]:
    """The arms of each earlier study of a chain that is kept, by its name."""
    known: dict[str, tuple[Study, tuple[Arm, ...]]] = {}
    for one in study.earlier:
        if one.path is not None:
            other, findings = load_findings(one.path)
            arms = () if findings.blocks else (*findings.arms, *findings.controls)
            known[one.name] = other, arms
    return known


def _beside(study: Study) -> list[tuple[Study, tuple[Arm, ...]]]:
    """The longer studies beside a study that can be read, with their arms."""
    made = []
    for path in longer.studies_beside(study):
        with contextlib.suppress(ReportError):  # without results, or damaged, as its report says
            other = load_study(path)
            made.append((other, find(other, alone=True).arms))
    return made


def _decomposed(
    study: Study, arms: Sequence[Arm], blocks: Sequence[Remark]
) -> Iterator[tuple[ArmKey, Decomposition]]:
    """The parts of each primary arm but the baseline."""
    by_key = {arm.key: arm for arm in arms}
    shared = [remark for remark in blocks if remark.every_arm]

    def part(one: Arm | None, other: Arm | None) -> Comparison | None:
        if one is None or other is None:
            return None
        if any(remark.code not in UNSURE for remark in (*shared, *one.blocks, *other.blocks)):
            return None
        return compare(one, other, study)

    for arm in (arm for arm in arms if not arm.key.control and not arm.is_baseline):
        # A control of equal shape has no destination in its name.
        bare = arm.key._replace(variant=study.bare(arm.variant), control=EQUAL_SHAPE)
        same = by_key.get(bare)
        lengthened = by_key.get(arm.key._replace(control=LONGER))
        longest = by_key.get(arm.group._replace(control=LONGER))
        three = part(same, by_key.get(arm.group)), part(arm, same), part(lengthened, longest)
        yield arm.key, Decomposition(*three)


def _scaling(study: Study, arms: Sequence[Arm]) -> tuple[Scaling, ...]:
    """Scaling fits of all variants that have a size to use, at which models are trained enough."""
    if len(study.sizes) < 2:
        return ()
    short = {one.group for one in rules.baselines(study, arms) if [*rules.untrained(one)]}
    curves: dict[tuple[str, str], dict[str, Arm]] = {}  # by variant and corpus; arms by size
    for arm in arms:
        if arm.key.control is None and arm.group not in short and arm.scales:
            curves.setdefault((arm.variant, arm.corpus), {})[arm.size] = arm

    def parameters(arm: Arm) -> int:
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
